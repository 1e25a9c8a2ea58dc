# SPDX-License-Identifier: Apache-2.0
"""Documents of an indexed dataset by number, through memory maps: opening costs nothing, whatever the size."""

import numpy as np

from zaya_plugin.data.indexed_format import HEADER, IndexedFile, read_index


class IndexedReader:
    """Reads a `.bin`/`.idx` pair whose two files agree.

    lengths: int64 [documents], tokens of each document.
    starts: int64 [documents + 1], first token of each document in .bin, then the number of all tokens.

    Raises:
        ValueError: see `read_index`.
    """

    def __init__(self, prefix: str):
        self.indexed: IndexedFile = read_index(prefix)
        self.prefix, self.dtype = prefix, self.indexed.dtype
        sequences, documents = self.indexed.sequences, self.indexed.documents
        self.starts = np.zeros(documents + 1, np.int64)
        if sequences:
            path = prefix + ".idx"
            lengths = np.memmap(path, "<i4", "r", HEADER.size, (sequences,))
            marks = np.memmap(path, "<i8", "r", HEADER.size + 12 * sequences, (documents + 1,))
            ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            self.starts = ends[marks]
        self.lengths = np.diff(self.starts)
        self.stream = np.memmap(prefix + ".bin", self.dtype, "r") if self.indexed.tokens else np.empty(0, self.dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def document(self, number: int) -> np.ndarray:
        """Token ids [tokens] of a document, in the dtype of the file; a view of it."""
        return self.stream[self.starts[number] : self.starts[number + 1]]

# SPDX-License-Identifier: Apache-2.0
"""Which documents are the first of their kind. Decided over all parts in order of the input, so workers make no difference."""

import numpy as np

from zaya_plugin.corpus.parts import Part


def first_of_each(parts: list[Part], splits: tuple[str, ...]) -> tuple[dict[str, list[np.ndarray]], int]:
    """Takes the first document of each key, over all splits.

    Keys are 128-bit hashes: among 10^12 documents two different ones are taken for equal with a chance of 10^-15.
    Memory: 24 bytes a document, three times that while they are sorted.

    Returns:
        For each split and part bool [documents of the part in the split], and the number of documents left out.
    """
    loaded = [part.keys() for part in parts]
    keys = np.concatenate([key for key, _ in loaded]) if loaded else np.empty((0, 2), np.uint64)
    order = np.lexsort((np.arange(len(keys)), keys[:, 1], keys[:, 0]))
    repeats = np.zeros(len(keys), bool)
    repeats[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    kept: dict[str, list[np.ndarray]] = {name: [] for name in splits}
    begin = 0
    for key, numbers in loaded:
        first = ~repeats[begin : begin + len(key)]
        for number, name in enumerate(splits):
            kept[name].append(first[numbers == number])
        begin += len(key)
    return kept, int(repeats.sum())

# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files, in order, beginning anywhere. Needs pyarrow, and imports it when the first file is opened."""

from collections.abc import Iterator
from itertools import accumulate

BATCH_ROWS = 256


class ParquetRows:
    """Reads one column of texts, and one of document ids if that is asked for.

    Raises:
        EOFError: the file is damaged or has no such columns of a usable type; the message says which.
    """

    def __init__(self, path: str, text_field: str, id_field: str | None):
        import pyarrow as pa
        import pyarrow.parquet as pq

        self.path, self.errors = path, (pa.ArrowException, OSError)
        self.with_ids = id_field is not None
        self.columns = [text_field] if id_field in (None, text_field) else [text_field, id_field]
        try:
            self.file = pq.ParquetFile(path)
        except self.errors as error:
            raise EOFError(f"damaged Parquet file: {error}") from error
        schema = self.file.schema_arrow
        for name in self.columns:
            if name not in schema.names:
                raise EOFError(f"no column {name!r}; it has {', '.join(map(repr, schema.names[:8])) or 'none'}")
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise EOFError(f"column {text_field!r} is not of strings but of {kind}")

    def begin(self, row: int) -> Iterator[tuple[str | None, object]]:
        """Text and id of each row from `row` (from 0) on; the id is None where none is asked for."""
        metadata = self.file.metadata
        ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
        groups = [group for group, end in enumerate(ends) if end > row]
        if not groups:
            return
        skip = row - (ends[groups[0] - 1] if groups[0] else 0)
        try:
            for batch in self.file.iter_batches(BATCH_ROWS, row_groups=groups, columns=self.columns):
                if skip >= batch.num_rows:
                    skip -= batch.num_rows
                    continue
                texts = batch.column(self.columns[0]).to_pylist()
                ids = batch.column(self.columns[-1]).to_pylist() if self.with_ids else [None] * len(texts)
                yield from list(zip(texts, ids, strict=True))[skip:]
                skip = 0
        except (*self.errors, UnicodeDecodeError) as error:
            raise EOFError(f"damaged Parquet file: {error}") from error

    def close(self) -> None:
        self.file.close()

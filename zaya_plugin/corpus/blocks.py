# SPDX-License-Identifier: Apache-2.0
"""Cuts the input into blocks, the unit that one worker tokenises and that an interrupted run does not do again.

The cut depends on the input and the options alone, never on the number of workers, and reading can begin at the end of
any block: that end is stored with the finished part.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

from zaya_plugin.corpus.documents import Block, LinesPiece, Rejected, RowsPiece, TextPiece
from zaya_plugin.corpus.inputs import InputFile
from zaya_plugin.corpus.parquet_rows import ParquetRows
from zaya_plugin.corpus.streams import DAMAGE, kind, unpacked


@dataclass(frozen=True)
class Position:
    """A place in the input. `offset` counts unpacked bytes, or rows of a Parquet file; `taken` bytes of documents so far
    (lines after unpacking, texts of rows), `disk` bytes of files read."""

    file: int = 0
    offset: int = 0
    line: int = 1
    taken: int = 0
    disk: int = 0


class BlockReader:
    """Reads blocks of about `block_bytes` from `files`, in order.

    Args:
        max_bytes: stop before the first document that would take the total past this; None for everything.
        max_document_bytes: longer lines are cut after this many bytes plus one, enough for the worker to reject them.
        text_field, id_field: columns of Parquet files.
    """

    def __init__(
        self,
        files: list[InputFile],
        block_bytes: int,
        max_bytes: int | None,
        max_document_bytes: int,
        text_field: str = "text",
        id_field: str | None = None,
    ):
        self.files, self.block_bytes, self.max_bytes = files, block_bytes, max_bytes
        self.fields = text_field, id_field
        self.line_limit = max_document_bytes + 1
        self._disk_after = list(accumulate(file.size for file in files))
        self._open_path, self._raw, self._stream = None, None, None
        self._rows, self._rows_at = None, None

    def read(self, at: Position) -> tuple[Block, Position] | None:
        """The block that begins at a position and the position after it; None at the end."""
        block = Block()
        while block.taken < self.block_bytes and at.file < len(self.files):
            file = self.files[at.file]
            budget = None if self.max_bytes is None else self.max_bytes - at.taken
            if file.is_jsonl:
                at = self._read_lines(file, at, block, budget)
            elif file.is_parquet:
                at = self._read_rows(file, at, block, budget)
            elif budget is not None and file.size > budget:
                at = replace(at, file=len(self.files))
            else:
                block.pieces.append(TextPiece(file.path))
                block.taken += file.size
                at = Position(at.file + 1, taken=at.taken + file.size, disk=self._disk_after[at.file])
        if block.pieces or block.damaged:
            return block, at
        self.close()
        return None

    def _read_lines(self, file: InputFile, at: Position, block: Block, budget: int | None) -> Position:
        want = self.block_bytes - block.taken
        stream = self._stream_at(file, at.offset)
        before = self._raw.tell() if at.offset else 0
        data, damage = _whole_lines(stream, want if budget is None else min(want, budget), self.line_limit)
        over_budget = budget is not None and (len(data) > budget or budget <= 0)
        if over_budget:
            # The last line does not fit; the one before it does, because reading stopped inside the last.
            data = data[: data.rfind(b"\n", 0, max(0, len(data) - 1)) + 1] if budget > 0 else b""
        if data:
            block.pieces.append(LinesPiece(file.path, at.line, data))
            block.taken += len(data)
        line, taken = at.line + data.count(b"\n"), at.taken + len(data)
        if over_budget:
            return Position(len(self.files), taken=taken, disk=at.disk)
        if damage is not None:
            block.damaged.append(
                Rejected(
                    file.path, line, f"damaged {kind(file.path)} stream, the rest of the file is lost: {damage}", ""
                )
            )
        if damage is not None or not data:
            self.close()
            return Position(at.file + 1, taken=taken, disk=self._disk_after[at.file])
        return Position(at.file, stream.tell(), line, taken, at.disk + max(0, self._raw.tell() - before))

    def _stream_at(self, file: InputFile, offset: int):
        if self._open_path != file.path:
            self.close()
            self._raw = open(file.path, "rb")
            self._stream = unpacked(file.path, self._raw)
            self._open_path = file.path
        if self._stream.tell() != offset:
            self._stream.seek(offset)
        return self._stream

    def _read_rows(self, file: InputFile, at: Position, block: Block, budget: int | None) -> Position:
        piece, taken, damage, ended, over_budget = RowsPiece(file.path, at.offset + 1, [], []), 0, None, False, False
        try:
            if self._rows_at != (file.path, at.offset):
                self.close()
                self._raw = ParquetRows(file.path, *self.fields)
                self._rows = self._raw.begin(at.offset)
            while block.taken + taken < self.block_bytes and not ended:
                row = next(self._rows, None)
                size = len(row[0].encode("utf-8")) if row is not None and row[0] is not None else 0
                over_budget = row is not None and budget is not None and taken + size > budget
                ended = row is None or over_budget
                if not ended:
                    piece.texts.append(row[0])
                    piece.ids.append(row[1])
                    taken += size
        except EOFError as error:
            damage = error
        offset = at.offset + len(piece.texts)
        if piece.texts:
            block.pieces.append(piece)
            block.taken += taken
        if damage is not None:
            block.damaged.append(Rejected(file.path, offset + 1, f"{damage}; the rest of the file is lost", ""))
        if over_budget:
            return Position(len(self.files), taken=at.taken + taken, disk=at.disk)
        if ended or damage is not None:
            self.close()
            return Position(at.file + 1, taken=at.taken + taken, disk=self._disk_after[at.file])
        self._rows_at = file.path, offset
        share = file.size * offset // max(self._raw.file.metadata.num_rows, 1)
        return Position(at.file, offset, offset + 1, at.taken + taken, self._disk_after[at.file] - file.size + share)

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
        self._open_path, self._raw, self._stream = None, None, None
        self._rows, self._rows_at = None, None


def _whole_lines(stream, want: int, line_limit: int) -> tuple[bytes, Exception | None]:
    """About `want` bytes ending with a line, of a line longer than `line_limit` only its beginning; and what ended it early."""
    data = bytearray()
    try:
        # In small steps, because a read that meets damage loses what the same call had already unpacked.
        while len(data) < want and (piece := stream.read1(min(want - len(data), 1 << 16))):
            data += piece
        if data and not data.endswith(b"\n"):
            tail = stream.readline(line_limit)
            data += tail
            if len(tail) == line_limit and not tail.endswith(b"\n"):
                while (rest := stream.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                data += b"\n"
    except DAMAGE as damage:
        del data[data.rfind(b"\n") + 1 :]
        return bytes(data), damage
    return bytes(data), None

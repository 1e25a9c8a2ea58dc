# SPDX-License-Identifier: Apache-2.0
"""From a block of input to the texts in it. Whatever cannot become a text is yielded as `Rejected`, never dropped."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from zaya_plugin.corpus.streams import DAMAGE, unpacked

BOM = b"\xef\xbb\xbf"
EXCERPT = 200  # characters of a rejected line that are kept


@dataclass(frozen=True)
class Rejected:
    """Why the document at `file`, `line` (from 1) is not in the dataset."""

    file: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class Document(NamedTuple):
    """A text, and its id as text where ids are asked for."""

    text: str
    id: str | None = None


@dataclass(frozen=True)
class TextPiece:
    """A file that is one document; the worker opens it."""

    path: str


@dataclass(frozen=True)
class LinesPiece:
    """Whole lines of a jsonl file."""

    path: str
    first_line: int
    data: bytes


@dataclass(frozen=True)
class RowsPiece:
    """Rows of a Parquet file; a text or an id may be None."""

    path: str
    first_row: int
    texts: list[str | None]
    ids: list


@dataclass
class Block:
    """What one worker tokenises at a time; `damaged` is what the reader could not even cut into lines."""

    pieces: list[TextPiece | LinesPiece | RowsPiece] = field(default_factory=list)
    damaged: list[Rejected] = field(default_factory=list)
    taken: int = 0


def documents(
    block: Block, text_field: str, max_document_bytes: int, counts: Counter, id_field: str | None = None
) -> Iterator[Document | Rejected]:
    """Documents and rejects of a block, in order of the input.

    Args:
        counts: increased here: "read" documents, of them "empty" (white space alone; not yielded) and "rejected";
            "blank_lines" of jsonl files, which are no documents.
        id_field: of jsonl lines and rows; a document without it is rejected. A text file's id is its path.
    """
    for piece in block.pieces:
        if isinstance(piece, LinesPiece):
            found = _lines(piece, text_field, id_field, max_document_bytes, counts)
        elif isinstance(piece, RowsPiece):
            found = _rows(piece, text_field, id_field, max_document_bytes)
        else:
            found = _file(piece, max_document_bytes)
        for document in found:
            counts["read"] += 1
            if isinstance(document, Rejected):
                counts["rejected"] += 1
                yield document
            elif not document.text or document.text.isspace():
                counts["empty"] += 1
            else:
                yield document
    for damage in block.damaged:
        counts["read"] += 1
        counts["rejected"] += 1
        yield damage


def _file(piece: TextPiece, max_document_bytes: int) -> Iterator[Document | Rejected]:
    try:
        with open(piece.path, "rb") as raw:
            data = unpacked(piece.path, raw).read(max_document_bytes + 1)
    except (OSError, *DAMAGE) as error:
        yield Rejected(piece.path, 1, f"cannot be read: {error}", "")
        return
    if len(data) > max_document_bytes:
        yield Rejected(piece.path, 1, f"longer than --max-document-bytes {max_document_bytes}", _excerpt(data))
        return
    try:
        yield Document(data.removeprefix(BOM).decode("utf-8"), piece.path)
    except UnicodeDecodeError as error:
        line_begin = data.rfind(b"\n", 0, error.start) + 1
        yield Rejected(piece.path, 1 + data.count(b"\n", 0, error.start), _not_utf8(error), _excerpt(data[line_begin:]))


def _lines(
    piece: LinesPiece, text_field: str, id_field: str | None, max_document_bytes: int, counts: Counter
) -> Iterator[Document | Rejected]:
    lines = piece.data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last newline is no line
    for number, line in enumerate(lines, piece.first_line):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            counts["blank_lines"] += 1
            continue
        document, reason = _document_of(line, text_field, id_field, max_document_bytes)
        yield document if reason is None else Rejected(piece.path, number, reason, _excerpt(line))


def _rows(
    piece: RowsPiece, text_field: str, id_field: str | None, max_document_bytes: int
) -> Iterator[Document | Rejected]:
    for number, (text, name) in enumerate(zip(piece.texts, piece.ids, strict=True), piece.first_row):
        reason = None
        if text is None:
            reason = f"field {text_field!r} is null"
        elif id_field is not None and name is None:
            reason = f"field {id_field!r}, which --id-field names, is null"
        elif len(text.encode("utf-8")) > max_document_bytes:
            reason = f"longer than --max-document-bytes {max_document_bytes}"
        yield (
            Document(text, str(name))
            if reason is None
            else Rejected(piece.path, number, reason, (text or "")[:EXCERPT])
        )


def _document_of(
    line: bytes, text_field: str, id_field: str | None, max_document_bytes: int
) -> tuple[Document | None, str | None]:
    if len(line) > max_document_bytes:
        return None, f"longer than --max-document-bytes {max_document_bytes}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return None, _not_utf8(error)
    except (ValueError, RecursionError) as error:
        return None, f"not JSON: {error}"
    if not isinstance(record, dict):
        return None, f"not a JSON object but {type(record).__name__}"
    if text_field not in record:
        return None, f"no field {text_field!r}; it has {', '.join(map(repr, list(record)[:8])) or 'none'}"
    text = record[text_field]
    if not isinstance(text, str):
        return None, f"field {text_field!r} is not a string but {type(text).__name__}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return None, f"field {text_field!r} holds a lone surrogate at character {error.start}"
    if id_field is None:
        return Document(text), None
    name = record.get(id_field)
    if not isinstance(name, str | int) or isinstance(name, bool):
        return (
            None,
            f"field {id_field!r}, which --id-field names, is not a string or whole number but {type(name).__name__}",
        )
    return Document(text, str(name)), None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _excerpt(data: bytes) -> str:
    return data[: 4 * EXCERPT].split(b"\n", 1)[0].decode("utf-8", "backslashreplace")[:EXCERPT]

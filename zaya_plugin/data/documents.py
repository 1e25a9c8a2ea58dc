# SPDX-License-Identifier: Apache-2.0
"""From a block of input to the texts in it. Whatever cannot become a text is yielded as `Rejected`, never dropped."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

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


@dataclass
class Block:
    """What one worker tokenises at a time; `damaged` is what the reader could not even cut into lines."""

    pieces: list[TextPiece | LinesPiece] = field(default_factory=list)
    damaged: list[Rejected] = field(default_factory=list)
    taken: int = 0


def documents(block: Block, text_field: str, max_document_bytes: int, counts: Counter) -> Iterator[str | Rejected]:
    """Texts and rejects of a block, in order of the input.

    Args:
        counts: increased here: "read" documents, of them "empty" (white space alone; not yielded) and "rejected";
            "blank_lines" of jsonl files, which are no documents.
    """
    for piece in block.pieces:
        if isinstance(piece, LinesPiece):
            found = _lines(piece, text_field, max_document_bytes, counts)
        else:
            found = _file(piece, max_document_bytes)
        for document in found:
            counts["read"] += 1
            if isinstance(document, Rejected):
                counts["rejected"] += 1
                yield document
            elif not document or document.isspace():
                counts["empty"] += 1
            else:
                yield document
    for damage in block.damaged:
        counts["read"] += 1
        counts["rejected"] += 1
        yield damage


def _file(piece: TextPiece, max_document_bytes: int) -> Iterator[str | Rejected]:
    try:
        with gzip.open(piece.path) if piece.path.endswith(".gz") else open(piece.path, "rb") as stream:
            data = stream.read(max_document_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        yield Rejected(piece.path, 1, f"cannot be read: {error}", "")
        return
    if len(data) > max_document_bytes:
        yield Rejected(piece.path, 1, f"longer than --max-document-bytes {max_document_bytes}", _excerpt(data))
        return
    try:
        yield data.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        line_begin = data.rfind(b"\n", 0, error.start) + 1
        yield Rejected(piece.path, 1 + data.count(b"\n", 0, error.start), _not_utf8(error), _excerpt(data[line_begin:]))


def _lines(piece: LinesPiece, text_field: str, max_document_bytes: int, counts: Counter) -> Iterator[str | Rejected]:
    lines = piece.data.split(b"\n")
    if not lines[-1]:
        lines.pop()  # what follows the last newline is no line
    for number, line in enumerate(lines, piece.first_line):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            counts["blank_lines"] += 1
            continue
        text, reason = _text_of(line, text_field, max_document_bytes)
        yield text if reason is None else Rejected(piece.path, number, reason, _excerpt(line))


def _text_of(line: bytes, text_field: str, max_document_bytes: int) -> tuple[str, str | None]:
    if len(line) > max_document_bytes:
        return "", f"longer than --max-document-bytes {max_document_bytes}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return "", _not_utf8(error)
    except (ValueError, RecursionError) as error:
        return "", f"not JSON: {error}"
    if not isinstance(record, dict):
        return "", f"not a JSON object but {type(record).__name__}"
    if text_field not in record:
        return "", f"no field {text_field!r}; it has {', '.join(map(repr, list(record)[:8])) or 'none'}"
    text = record[text_field]
    if not isinstance(text, str):
        return "", f"field {text_field!r} is not a string but {type(text).__name__}"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return "", f"field {text_field!r} holds a lone surrogate at character {error.start}"
    return text, None


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _excerpt(data: bytes) -> str:
    return data[: 4 * EXCERPT].split(b"\n", 1)[0].decode("utf-8", "backslashreplace")[:EXCERPT]

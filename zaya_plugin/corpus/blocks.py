# SPDX-License-Identifier: Apache-2.0
"""Cut the input into blocks, and a block into documents. A block is what one worker tokenises and what a resumed run
skips.

The cut depends on the input and the options alone, never on the number of workers. Reading can begin at the end of any
block; the finished part stores that end. A record that cannot become a document is yielded as `Rejected`, never
dropped.
"""

import ast
import contextlib
import json
import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from zaya_plugin.corpus.chats import chat_text
from zaya_plugin.corpus.inputs import DAMAGE, PACKINGS, InputFile, Record, endings, lines, rows, unpacked
from zaya_plugin.ground.errors import message

BOM = b"\xef\xbb\xbf"
DOCUMENTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
EXCERPT = 200  # characters of a rejected record that are kept


@dataclass(frozen=True)
class Rejected:
    """Why the document at `file`, `line` (from 1; of a Parquet file the row) is not in the dataset."""

    file: str
    line: int
    reason: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


class LostFileError(ValueError):
    """A file cannot be read, from the place on where that was noticed. A dataset without it is never made."""

    def __init__(self, file: str, line: int, error: Exception):
        packing = PACKINGS.get(endings(file)[1])
        damaged = packing and not getattr(error, "errno", None)
        reason = f"damaged {packing} stream: {error}" if damaged else str(error)
        super().__init__(file, line, error)  # for the way from a worker
        self.file, self.reason = file, f"{file}:{line}: {reason}"

    def __str__(self) -> str:
        return message(
            "--input",
            self.reason,
            problem="this file cannot be read to its end, and no dataset is made without it",
            allowed="files that can be read whole",
            fix="restore it and give the same command again; with --overwrite if it has changed, or is left out of "
            "--input",
        )


class Document(NamedTuple):
    """A text, and its id as text where ids are asked for; of a chat `chats.chat_text`. file, line: as of Rejected."""

    text: str
    id: str | None = None
    file: str = ""
    line: int = 1

    def rejected(self, reason: str) -> Rejected:
        """Return the record of this document's rejection."""
        return Rejected(self.file, self.line, reason, self.text[:EXCERPT])


@dataclass(frozen=True)
class Format:
    """How a record becomes a document: fields of text and id, and the bytes above which it is rejected.

    id_field None asks for no ids. A record without the field is rejected; the id of a text file is its path.
    chat: whether a record is a chat, which has no field of text.
    """

    text_field: str = "text"
    id_field: str | None = None
    max_document_bytes: int = 8_000_000
    chat: bool = False


@dataclass(frozen=True)
class Piece:
    """Records of one file: lines as bytes, rows as (text, id); None: the file is one document, which the worker opens.

    first: number of the first record, from 1.
    """

    path: str
    first: int = 1
    records: list | None = None


@dataclass
class Block:
    """The texts that one worker tokenises at a time. taken: bytes."""

    pieces: list[Piece] = field(default_factory=list)
    taken: int = 0


@dataclass(frozen=True)
class Position:
    """A place in the input.

    offset: unpacked bytes, or rows of a Parquet file; line: number of the next record in its file; taken: bytes of
    documents so far (lines after unpacking, texts of rows); disk: bytes of files read.
    """

    file: int = 0
    offset: int = 0
    line: int = 1
    taken: int = 0
    disk: int = 0


class BlockReader:
    """Reads blocks of about `block_bytes` from `files`, in order.

    Args:
        max_bytes: stop before the first document that would take the total past this; None for everything.
        form: fields to read; of a line longer than its limit only the beginning is read, enough to reject it.
    """

    def __init__(self, files: list[InputFile], block_bytes: int, max_bytes: int | None, form: Format):
        self.files, self.block_bytes, self.max_bytes, self.form = files, block_bytes, max_bytes, form
        self._disk_before = [0, *accumulate(file.size for file in files)]
        self._records, self._next = iter(()), None

    def read(self, at: Position) -> tuple[Block, Position] | None:
        """Return the block that begins at a position and the position after it; None at the end.

        Raises:
            LostFileError: a file cannot be read.
        """
        block = Block()
        while block.taken < self.block_bytes and at.file < len(self.files):
            file = self.files[at.file]
            budget = float("inf") if self.max_bytes is None else self.max_bytes - at.taken
            if file.is_jsonl or file.is_parquet:
                at = self._read_records(file, at, block, budget)
            elif file.size > budget:
                at = replace(at, file=len(self.files))
            else:
                block.pieces.append(Piece(file.path))
                block.taken += file.size
                at = Position(at.file + 1, taken=at.taken + file.size, disk=self._disk_before[at.file + 1])
        return (block, at) if block.pieces else None

    def _read_records(self, file: InputFile, at: Position, block: Block, budget: float) -> Position:
        piece, taken, ended, over = Piece(file.path, at.line, []), 0, False, False
        try:
            records = self._records_at(file, at.offset)
            while block.taken + taken < self.block_bytes and not ended:
                record = next(records, None)
                over = record is not None and taken + record[1] > budget
                ended = record is None or over
                if not ended:
                    piece.records.append(record[0])
                    taken += record[1]
        except DAMAGE as error:
            raise LostFileError(file.path, at.line + len(piece.records), error) from error
        if piece.records:
            block.pieces.append(piece)
            block.taken += taken
        if over:
            return Position(len(self.files), taken=at.taken + taken, disk=at.disk)
        if ended:
            return Position(at.file + 1, taken=at.taken + taken, disk=self._disk_before[at.file + 1])
        _, _, offset, read = record
        self._next = file.path, offset
        disk = self._disk_before[at.file] + read
        return Position(at.file, offset, at.line + len(piece.records), at.taken + taken, disk)

    def _records_at(self, file: InputFile, offset: int) -> Iterator[Record]:
        if self._next != (file.path, offset):
            form = self.form
            if file.is_parquet:
                self._records = rows(file, offset, form.text_field, form.id_field)
            else:
                self._records = lines(file, offset, form.max_document_bytes + 1)
        return self._records


def documents(block: Block, form: Format, counts: Counter) -> Iterator[Document | Rejected]:
    """Yield the documents and rejects of a block, in order of the input.

    Args:
        counts: increased: "read" documents, of them "empty" (white space alone; not yielded) and "rejected";
            "blank_lines" of jsonl files, which are not documents.

    Raises:
        LostFileError: a file cannot be read.
    """
    for document in _outcomes(block, form):
        if document is None:
            counts["blank_lines"] += 1
            continue
        counts["read"] += 1
        if isinstance(document, Rejected):
            counts["rejected"] += 1
            yield document
        elif not document.text or document.text.isspace():
            counts["empty"] += 1
        else:
            yield document


def _outcomes(block: Block, form: Format) -> Iterator[Document | Rejected | None]:
    for piece in block.pieces:
        if piece.records is None:
            whole = _text_file(piece.path, form)
            yield from docstring_chats(whole) if form.chat and isinstance(whole, Document) else [whole]
        for number, record in enumerate(piece.records or (), piece.first):
            yield _record(piece.path, number, record, form)


def _text_file(path: str, form: Format) -> Document | Rejected:
    try:
        with open(path, "rb") as raw:
            data = unpacked(path, raw).read(form.max_document_bytes + 1)
    except DAMAGE as error:
        raise LostFileError(path, 1, error) from error
    if len(data) > form.max_document_bytes:
        return Rejected(path, 1, f"longer than --max-document-bytes {form.max_document_bytes}", _excerpt(data))
    try:
        return Document(data.removeprefix(BOM).decode("utf-8"), path)
    except UnicodeDecodeError as error:
        line_begin = data.rfind(b"\n", 0, error.start) + 1
        line = 1 + data.count(b"\n", 0, error.start)
        return Rejected(path, line, _not_utf8(error), _excerpt(data[line_begin:]))


def docstring_chats(source: Document) -> Iterator[Document]:
    """Yield a chat for each public function and class of a Python file at its top level: a question with its name, and
    the first paragraph of its docstring. None of a file that Python cannot parse.
    """
    module = os.path.splitext(os.path.relpath(source.id, sysconfig.get_paths()["stdlib"]))[0].replace(os.sep, ".")
    with contextlib.suppress(SyntaxError, ValueError, RecursionError), warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # of the parsed file
        for node in ast.parse(source.text).body:
            if isinstance(node, DOCUMENTED) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
                name = f"{module.removesuffix('.__init__')}.{node.name}"
                contents = ("user", f"What is {name}?"), ("assistant", " ".join(text.split("\n\n")[0].split()))
                chat = {"messages": [{"role": role, "content": content} for role, content in contents]}
                yield Document(chat_text(chat), name, source.id, node.lineno)


def _record(path: str, number: int, record: bytes | tuple, form: Format) -> Document | Rejected | None:
    """Return what becomes of a line or row; None for a blank line."""
    if isinstance(record, tuple):
        result = _of_row(*record, form)
    else:
        record = record.removeprefix(BOM) if number == 1 else record
        if not record.strip():
            return None
        result = _of_line(record, form)
    if isinstance(result, Document):
        return result._replace(file=path, line=number)
    return Rejected(
        path, number, result, _excerpt(record) if isinstance(record, bytes) else (record[0] or "")[:EXCERPT]
    )


def _of_row(text: str | None, name: object, form: Format) -> Document | str:
    """Return the document of a row, or why there is none."""
    if text is None:
        return f"field {form.text_field!r} is null"
    if form.id_field is not None and name is None:
        return f"field {form.id_field!r}, which --id-field names, is null"
    if len(text.encode("utf-8")) > form.max_document_bytes:
        return f"longer than --max-document-bytes {form.max_document_bytes}"
    return Document(text, str(name))


def _of_line(line: bytes, form: Format) -> Document | str:
    """Return the document of a line, or why there is none."""
    if len(line) > form.max_document_bytes:
        return f"longer than --max-document-bytes {form.max_document_bytes}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return _not_utf8(error)
    except (ValueError, RecursionError) as error:
        return f"not JSON: {error}"
    if not isinstance(record, dict):
        return f"not a JSON object but {type(record).__name__}"
    try:
        text = chat_text(record) if form.chat else _text_of(record, form.text_field)
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - 20) : error.start].encode("utf-8", "replace").decode()
        return f"holds a lone surrogate behind {before!r}"
    except ValueError as error:
        return str(error)
    name = record.get(form.id_field) if form.id_field is not None else ""
    if not isinstance(name, str | int) or isinstance(name, bool):
        kind = type(name).__name__
        return f"field {form.id_field!r}, which --id-field names, is not a string or whole number but {kind}"
    return Document(text, str(name))


def _text_of(record: dict, field: str) -> str:
    """Return the text of a field.

    Raises:
        ValueError: there is none.
    """
    if field not in record:
        raise ValueError(f"no field {field!r}; it has {', '.join(map(repr, list(record)[:8])) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is not a string but {type(text).__name__}")
    return text


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def _excerpt(data: bytes) -> str:
    return data[: 4 * EXCERPT].split(b"\n", 1)[0].decode("utf-8", "backslashreplace")[:EXCERPT]

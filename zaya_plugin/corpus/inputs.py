# SPDX-License-Identifier: Apache-2.0
"""Find the files of `--input`, and read their records from any place on: lines of .jsonl, rows of .parquet.

Files are plain or packed (PACKINGS). Damage raises one of `DAMAGE`, for any format.
"""

import bz2
import contextlib
import fnmatch
import glob
import hashlib
import importlib.util
import io
import json
import lzma
import os
import re
import shlex
import stat
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from zaya_plugin.ground.errors import mistake

STDLIB = "stdlib"
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
# Endings, in lower case; a name's capital letters make no difference.
LINES = (".jsonl", ".ndjson", ".ldjson", ".jsonlines", ".jl")
PARQUET, PARQUET_TOO = ".parquet", (".pq", ".parq")
# What is read of a directory. A file that is named is text if its ending is unknown.
DEFAULT_ENDINGS = (".txt", ".md", ".rst", ".py", *LINES, PARQUET)
PACKINGS = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd", ".bz2": "bzip2", ".xz": "xz"}
# Read as text each of these would be one wrong document, or a rejected one whose message does not name the cause.
REFUSED = {
    (".json",): ("holds one JSON value, not a document a line", "`jq -c '.[]' a.json > a.jsonl` for an array"),
    (".csv", ".tsv"): (
        "holds a table",
        "`python -c \"import pandas; pandas.read_csv('a.csv').to_json('a.jsonl', orient='records', lines=True)\"`",
    ),
    tuple(PARQUET + packing for packing in PACKINGS): ("is packed twice", "unpack it: Parquet is packed inside"),
    (".zip", ".tar", ".tgz", ".tbz2", ".txz", ".7z", ".rar"): ("is an archive", "unpack it, and give the folder"),
    (".lz4", ".br", ".lzma", ".z"): (
        "is packed in a way that is not read",
        "`lz4 -dc a.jsonl.lz4 | gzip > a.jsonl.gz`",
    ),
    (".arrow", ".feather", ".orc", ".avro"): ("is a table in a format that is not read", "write it as .parquet"),
}
# What a file may hold, by its first bytes. Other bytes are what the name says, or damaged.
FIRST_BYTES = {
    "Parquet": rb"PAR1",
    "gzip": rb"\x1f\x8b",
    "zstd": rb"\x28\xb5\x2f\xfd",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\0",
    "a zip archive": rb"PK\x03\x04",
    "text": rb"[\t\n\r -~]{8}",
}
PACKAGES = {"zstd": "zstandard", PARQUET: "pyarrow"}
# Of a file that cannot be read to its end.
DAMAGE = (EOFError, OSError)
BATCH_ROWS = 256
LISTED_KINDS = 10


def endings(path: str) -> tuple[str, str]:
    """Return the ending of a file's format and that of its packing, in lower case; of a plain file the second is "". A
    packed Parquet file is a format of its own, which is not read.
    """
    stem, last = os.path.splitext(os.path.basename(path).lower())
    last = PARQUET if last in PARQUET_TOO else last
    ending = os.path.splitext(stem)[1]
    return (ending, last) if last in PACKINGS and ending != PARQUET else (ending * (ending == PARQUET) + last, "")


@dataclass(frozen=True)
class InputFile:
    """A file of the input."""

    path: str
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        """Whether each of its lines is a document."""
        return endings(self.path)[0] in LINES

    @property
    def is_parquet(self) -> bool:
        """Whether each of its rows is a document."""
        return endings(self.path)[0] == PARQUET

    @property
    def is_packed(self) -> bool:
        """Whether its size says little about how much text is in it."""
        return self.is_parquet or bool(endings(self.path)[1])


def find_inputs(
    inputs: list[str],
    globs: list[str] | None = None,
    read: tuple[str, ...] = DEFAULT_ENDINGS,
    tell: Callable[[str], None] = lambda line: None,
) -> list[InputFile]:
    """List the files of all inputs: input by input as given, sorted by path within each.

    Links to files are followed. Of several names of one file in a directory or pattern one is read, a link last.

    Args:
        inputs: files, directories, shell patterns, or "stdlib" for the sources of the running Python.
        globs: patterns for the names of files in directories; one with a "/" is matched against the path below the
            directory. None: files whose formats have one of the endings `read`.
        tell: called with a line for each directory or pattern of which something is not read.

    Raises:
        ValueError: an input does not exist, holds no file that matches, is of a kind that cannot be read, or comes
            twice.
    """
    files: dict[tuple[int, int], InputFile] = {}
    for name in inputs:
        paths, left_out = _paths(name, globs, read)
        statuses = {path: _status(path) for path in sorted(paths, key=os.path.islink)}
        names = {(status.st_dev, status.st_ino): path for path, status in reversed(statuses.items())}
        for path in paths:
            status = statuses[path]
            identity = status.st_dev, status.st_ino
            if names[identity] != path:
                left_out["links to files that are read"] += 1
                continue
            if identity in files:
                raise mistake(
                    "--input",
                    path,
                    problem=f"is named twice, the second time by {name!r}; every document would count double",
                    fix="name it once",
                )
            files[identity] = InputFile(path, status.st_size, status.st_mtime_ns)
        if left_out and name != STDLIB:
            tell(f"left out of {name}: {_listed(left_out)}")
    return list(files.values())


def _status(path: str) -> os.stat_result:
    """Return the status of an input file.

    Raises:
        ValueError: it is of a kind that cannot be read.
    """
    ending, packing = endings(path)
    for kinds, (problem, fix) in REFUSED.items():
        if ending in kinds:
            raise _unreadable(path, f"cannot be read: it {problem}", fix)
    for package in (PACKAGES.get(PACKINGS.get(packing)), PACKAGES.get(ending)):
        if package and importlib.util.find_spec(package) is None:
            raise mistake(
                "--input",
                path,
                problem=f"needs the package {package}, which is not installed",
                fix=f"pip install {package}, or pip install 'zaya_plugin[data]'",
            )
    if not os.path.exists(path):
        raise _unreadable(path, "is a link to a file that does not exist", "restore the file, or remove the link")
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise _unreadable(
            path, "must be a regular file, since an input is read more than once", "write what it gives to a file first"
        )
    with contextlib.suppress(*DAMAGE):  # the reader tells where
        _refuse_other_content(path, ending, packing)
    return status


def _refuse_other_content(path: str, ending: str, packing: str) -> None:
    """Raise ValueError if a file holds something else than its name says, or lines of JSON where it says nothing."""
    with open(path, "rb") as raw:
        first, line = raw.read(16), b""
        expected = PACKINGS.get(packing) or ("Parquet" if ending == PARQUET else "text")
        content = next((kind for kind, bytes_ in FIRST_BYTES.items() if re.match(bytes_, first)), expected)
        if content == expected and ending not in DEFAULT_ENDINGS:
            raw.seek(0)
            line = unpacked(path, raw).readline(1 << 24)
    if content != expected:
        stem = path[: len(path) - len(packing)] if ending != PARQUET else os.path.splitext(path)[0]
        right = (
            PARQUET if content == "Parquet" else next((end for end, kind in PACKINGS.items() if kind == content), None)
        )
        fix = f"mv {shlex.quote(path)} {shlex.quote(stem + right)}" if right else "unpack it, and give the folder"
        fix = "a name that says what the text is, such as .jsonl or .txt" if content == "text" else fix
        raise _unreadable(path, f"its name says {expected}, and its first bytes are those of {content}", fix)
    try:
        json_lines = isinstance(json.loads(line.decode("utf-8-sig")), dict)
    except (ValueError, RecursionError):
        return
    if json_lines:
        stem = path[: len(path) - len(packing)]
        fix = f"mv {shlex.quote(path)} {shlex.quote(stem + LINES[0] + path[len(stem) :])}, or end its name with .txt"
        problem = "its first line is a JSON object, and its ending says nothing: it would be one document of text"
        raise _unreadable(path, problem, fix)


def _unreadable(path: str, problem: str, fix: str) -> ValueError:
    allowed = f"text and {' '.join(LINES)}, plain or as {' '.join(PACKINGS)}, and {' '.join((PARQUET, *PARQUET_TOO))}"
    return mistake("--input", path, problem=problem, allowed=allowed, fix=fix)


def _listed(left_out: Counter) -> str:
    more = len(left_out) - LISTED_KINDS
    kinds = sorted(left_out.items(), key=lambda item: (-item[1], item[0]))[:LISTED_KINDS]
    listed = ", ".join(f"{kind} ({count:,})" for kind, count in kinds)
    return listed + (f", and {more} further endings" if more > 0 else "")


def _paths(name: str, globs: list[str] | None, read: tuple[str, ...]) -> tuple[list[str], Counter]:
    """Return the files of an input in order, and how many of each kind are left out of it."""
    if name == STDLIB:
        return _walk(sysconfig.get_paths()["stdlib"], ["*.py"], (), STDLIB_SKIPPED)
    path = os.path.abspath(name)
    if os.path.isdir(path):
        files, left_out = _walk(path, globs, read, set())
        problem = f"no file in it matches {' '.join(globs or [f'*{ending}' for ending in read])}"
        problem += f"; it holds {_listed(left_out)}" if left_out else ""
    elif os.path.lexists(path):
        return [path], Counter()
    else:
        matches = sorted(glob.glob(path, recursive=True))
        files = [match for match in matches if not os.path.isdir(match)]
        left_out, problem = Counter({"folders": len(matches) - len(files)}), "does not exist"
        left_out += Counter()  # without zeros
    if not files:
        raise mistake(
            "--input",
            path,
            problem=problem,
            allowed=f"files, directories with files that --glob matches, quoted patterns, {STDLIB!r}",
            fix="correct the path or --glob",
        )
    return files, left_out


def _walk(root: str, globs: list[str] | None, read: tuple[str, ...], skipped: set[str]) -> tuple[list[str], Counter]:
    """Return matching files below root in path order, and how many of each kind do not match; hidden directories and
    links to directories are not entered.
    """

    def fail(error: OSError):
        raise error

    names, left_out = [], Counter()
    for folder, folders, files in os.walk(root, onerror=fail):
        left_out["hidden folders"] += sum(name.startswith(".") for name in folders)
        left_out["linked folders"] += sum(os.path.islink(os.path.join(folder, name)) for name in folders)
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for file in files:
            relative = os.path.relpath(os.path.join(folder, file), root)
            ending, packing = endings(file)
            if globs is None:
                included = ending in read
            else:
                included = any(fnmatch.fnmatchcase(relative if "/" in pattern else file, pattern) for pattern in globs)
            if included:
                names.append(relative)
            else:
                left_out[ending + packing or "files without an ending"] += 1
    return [os.path.join(root, name) for name in sorted(names)], +left_out


def fingerprint(files: list[InputFile], with_times: bool) -> str:
    """Return the sha256 over paths and sizes, and over modification times too if asked."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file.path) + f"\0{file.size}\0{file.mtime_ns if with_times else ''}\n".encode())
    return digest.hexdigest()


def unpacked(path: str, raw):
    """Return a stream of bytes over an open file; its reads raise one of DAMAGE where packed data are damaged or end
    early.
    """
    packing = PACKINGS.get(endings(path)[1])
    return io.BufferedReader(_Frames(raw, packing), 1 << 17) if packing else raw


class _Frames(io.RawIOBase):
    """Zstandard frames, or members of gzip, bzip2 or xz, one after the other.

    Libraries do not report all damage: zstandard's stream_reader takes a file that ends within a frame for a whole one,
    pyarrow's CompressedInputStream ends without an error at bytes that were overwritten with zeros, and bz2.open and
    lzma.open take a damaged member behind a whole one for the end.
    """

    def __init__(self, raw, packing: str):
        self.raw, self.pending, self.packed, self.frame = raw, memoryview(b""), b"", None
        self.most = (1 << 20,)  # bytes of one call; more output waits in the library
        if packing == "zstd":
            import zstandard

            self.most = ()  # its objects have no limit

            # The window of `zstd --long=31`, the longest there is.
            self.start = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj
        else:
            readers = {
                "gzip": lambda: zlib.decompressobj(31),
                "bzip2": bz2.BZ2Decompressor,
                "xz": lzma.LZMADecompressor,
            }
            self.start = readers[packing]
        self.between = b"\0" if packing in ("gzip", "xz") else b""  # fills the space between two members

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.pending:
            if self.frame is not None and self.frame.eof:
                self.packed, self.frame = self.frame.unused_data, None
            waits = self.frame is not None and not getattr(self.frame, "needs_input", True)  # of bz2 and lzma
            packed, self.packed = self.packed or (b"" if waits else self.raw.read(1 << 16)), b""
            if not packed and self.frame is None:
                return 0
            if not (packed or waits):
                raise EOFError("it ends within a frame")
            if self.frame is None:
                if not (packed := packed.lstrip(self.between)):
                    continue
                self.frame = self.start()
            try:
                self.pending = memoryview(self.frame.decompress(packed, *self.most))
            except MemoryError:
                raise
            except Exception as error:  # each library has its own
                raise EOFError(str(error)) from error
            self.packed = getattr(self.frame, "unconsumed_tail", b"")  # of zlib
        count = min(len(buffer), len(self.pending))
        buffer[:count], self.pending = self.pending[:count], self.pending[count:]
        return count


# A record, its bytes, where the next one begins (unpacked bytes or rows), and how much of the file was read.
Record = tuple[bytes | tuple[str | None, object], int, int, int]


def lines(file: InputFile, offset: int, limit: int) -> Iterator[Record]:
    """Yield the lines of a .jsonl file from an offset on, without their ends; of a line longer than `limit` only the
    beginning.
    """
    with open(file.path, "rb") as raw:
        stream = unpacked(file.path, raw)
        left = offset
        if stream is raw:
            left = raw.seek(offset) - offset
        while left and (skipped := stream.read(min(left, 1 << 20))):  # packed: only from the beginning on
            left -= len(skipped)
        while line := stream.readline(limit):
            taken, rest = len(line), line
            while len(rest) == limit and not rest.endswith(b"\n"):
                rest = stream.readline(limit)
                taken += len(rest)
            offset += taken
            yield line.removesuffix(b"\n"), taken, offset, raw.tell()


def rows(file: InputFile, offset: int, text_field: str, id_field: str | None) -> Iterator[Record]:
    """Yield (text, id) of the rows of a .parquet file from a row (from 0) on; id_field None gives ids of None. Needs
    pyarrow.

    Raises:
        EOFError: the file is damaged or has no such columns of a usable type; the message says which.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = list(dict.fromkeys([text_field, id_field or text_field]))
    try:
        with pq.ParquetFile(file.path) as opened:
            schema, metadata = opened.schema_arrow, opened.metadata
            for name in columns:
                if name not in schema.names:
                    raise EOFError(f"no column {name!r}; it has {', '.join(map(repr, schema.names[:8])) or 'none'}")
            kind = schema.field(text_field).type
            kind = kind.value_type if pa.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                raise EOFError(f"column {text_field!r} is not of strings but of {kind}")
            ends = list(accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))
            groups = [group for group, end in enumerate(ends) if end > offset]
            skipped = offset - max((end for end in ends if end <= offset), default=0)
            for batch in opened.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns) if groups else ():
                texts, ids = (batch.column(name).to_pylist() for name in (columns[0], columns[-1]))
                for text, name in list(zip(texts, ids, strict=True))[skipped:]:
                    offset += 1
                    size = len((text or "").encode("utf-8"))
                    yield (text, name if id_field else None), size, offset, file.size * offset // metadata.num_rows
                skipped = max(0, skipped - batch.num_rows)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise EOFError(f"damaged Parquet file: {error}") from error

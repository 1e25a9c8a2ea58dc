# SPDX-License-Identifier: Apache-2.0
"""Find the files of `--input`, and read their records from any place on: lines of .jsonl, rows of .parquet.

Files are plain, gzip or Zstandard. Damage raises one of `DAMAGE`, for any format.
"""

import fnmatch
import glob
import gzip
import hashlib
import importlib.util
import io
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from zaya_plugin.errors import mistake

STDLIB = "stdlib"
DEFAULT_GLOBS = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
# Read as text each of these would end as one rejected "invalid UTF-8", which does not name the cause.
UNREADABLE_SUFFIXES = (
    *(".xz", ".bz2", ".zip", ".tar", ".tgz", ".tar.gz", ".tar.zst"),
    *(".parquet.gz", ".arrow", ".json", ".json.gz", ".json.zst"),
)
# By ending: name of the format, and the package that reads it.
PACKAGES = {".zst": ("Zstandard", "zstandard"), ".parquet": ("Parquet", "pyarrow")}
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error)
BATCH_ROWS = 256


@dataclass(frozen=True)
class InputFile:
    """A file of the input."""

    path: str
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        """Whether each of its lines is a document."""
        return self.path.endswith(JSONL_SUFFIXES)

    @property
    def is_parquet(self) -> bool:
        """Whether each of its rows is a document."""
        return self.path.endswith(".parquet")

    @property
    def is_packed(self) -> bool:
        """Whether its size says little about how much text is in it."""
        return self.path.endswith((".gz", ".zst", ".parquet"))


def find_inputs(inputs: list[str], globs: list[str]) -> list[InputFile]:
    """List the files of all inputs: input by input as given, sorted by path within each.

    Args:
        inputs: files, directories, shell patterns, or "stdlib" for the sources of the running Python.
        globs: patterns for the names of files in directories; one with a "/" is matched against the path below the
            directory.

    Raises:
        ValueError: an input does not exist, holds no file that matches, is of a kind that cannot be read, or comes
            twice.
    """
    found: dict[str, InputFile] = {}
    for name in inputs:
        for path in _paths(name, globs):
            if path.endswith(UNREADABLE_SUFFIXES):
                raise mistake(
                    "--input",
                    path,
                    problem="cannot be read",
                    allowed="text files and .jsonl, plain or as .gz or .zst, and .parquet",
                    fix="convert it first, for example with `xz -dc file.jsonl.xz | gzip > file.jsonl.gz`",
                )
            for suffix, (format_name, package) in PACKAGES.items():
                if path.endswith(suffix) and importlib.util.find_spec(package) is None:
                    raise mistake(
                        "--input",
                        path,
                        problem=f"is a {format_name} file, and the package {package} is not installed",
                        fix=f"pip install {package}, or pip install 'zaya_plugin[data]'",
                    )
            if path in found:
                raise mistake(
                    "--input",
                    path,
                    problem=f"is named twice, the second time by {name!r}; every document would count double",
                )
            found_file = os.stat(path)
            if not stat.S_ISREG(found_file.st_mode):
                raise mistake(
                    "--input",
                    path,
                    problem="is no regular file, and an input is read more than once",
                    allowed="files",
                    fix="write what it gives to a file first",
                )
            found[path] = InputFile(path, found_file.st_size, found_file.st_mtime_ns)
    return list(found.values())


def _paths(name: str, globs: list[str]) -> list[str]:
    if name == STDLIB:
        return list(_walk(sysconfig.get_paths()["stdlib"], ["*.py"], STDLIB_SKIPPED))
    path = os.path.abspath(name)
    if os.path.isdir(path):
        files, problem = list(_walk(path, globs, set())), f"no file in it matches {' '.join(globs)}"
    elif os.path.exists(path):
        return [path]
    else:
        files = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
        problem = "does not exist"
    if not files:
        raise mistake(
            "--input",
            path,
            problem=problem,
            allowed=f"files, directories with files that --glob matches, quoted patterns, {STDLIB!r}",
        )
    return files


def _walk(root: str, globs: list[str], skipped: set[str]) -> Iterator[str]:
    """Return matching files below root in path order; hidden directories and links to directories are not entered."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for file in files:
            relative = os.path.relpath(os.path.join(folder, file), root)
            if any(fnmatch.fnmatchcase(relative if "/" in pattern else file, pattern) for pattern in globs):
                names.append(relative)
    return (os.path.join(root, name) for name in sorted(names))


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
    if path.endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    return io.BufferedReader(_ZstdStream(raw), 1 << 17) if path.endswith(".zst") else raw


class _ZstdStream(io.RawIOBase):
    """Zstandard frames one after the other.

    Libraries do not report all damage: zstandard's stream_reader takes a file that ends within a frame for a whole one,
    and pyarrow's CompressedInputStream ends without an error at bytes that were overwritten with zeros.
    """

    def __init__(self, raw):
        import zstandard

        self.raw, self.pending, self.frame = raw, b"", None
        self.error, self.start = zstandard.ZstdError, zstandard.ZstdDecompressor

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self.pending:
            between = self.frame is None or self.frame.eof
            packed = (self.frame.unused_data if self.frame and between else b"") or self.raw.read(1 << 16)
            if not packed:
                if between:
                    return 0
                raise EOFError("it ends within a frame")
            if between:
                self.frame = self.start().decompressobj()
            try:
                self.pending = self.frame.decompress(packed)
            except self.error as error:
                raise EOFError(str(error)) from error
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
            if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
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

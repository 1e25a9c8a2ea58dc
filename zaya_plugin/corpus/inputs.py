# SPDX-License-Identifier: Apache-2.0
"""The files that `--input` stands for, always in the same order, and a fingerprint to notice that they changed."""

import fnmatch
import glob
import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass

from zaya_plugin.corpus.streams import require_package

STDLIB = "stdlib"
DEFAULT_GLOBS = ("*.txt", "*.md", "*.rst", "*.py", "*.jsonl", "*.jsonl.gz", "*.jsonl.zst", "*.parquet")
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
# Read as text they would end as one rejected "invalid UTF-8" each, which tells the user too little.
UNREADABLE_SUFFIXES = (
    ".xz",
    ".bz2",
    ".zip",
    ".tar",
    ".tgz",
    ".tar.gz",
    ".tar.zst",
    ".parquet.gz",
    ".arrow",
    ".json",
    ".json.gz",
    ".json.zst",
)


@dataclass(frozen=True)
class InputFile:
    path: str
    size: int
    mtime_ns: int

    @property
    def is_jsonl(self) -> bool:
        return self.path.endswith(JSONL_SUFFIXES)

    @property
    def is_parquet(self) -> bool:
        return self.path.endswith(".parquet")

    @property
    def is_packed(self) -> bool:
        """Whether its size says little about how much text is in it."""
        return self.path.endswith((".gz", ".zst", ".parquet"))


def find_inputs(inputs: list[str], globs: list[str]) -> list[InputFile]:
    """Lists the files of all inputs: input by input as given, sorted by path within each.

    Args:
        inputs: files, directories, shell patterns, or "stdlib" for the sources of the running Python.
        globs: patterns for the names of files in directories; one with a "/" is matched against the path below the directory.

    Raises:
        ValueError: an input does not exist, holds no file that matches, is of a kind that cannot be read, or comes twice.
    """
    found: dict[str, InputFile] = {}
    for name in inputs:
        for path in _paths(name, globs):
            if path.endswith(UNREADABLE_SUFFIXES):
                raise ValueError(
                    f"--input: {path} cannot be read: text files and .jsonl, plain or as .gz or .zst, and .parquet are understood. "
                    f"Convert it first, for example with `xz -dc file.jsonl.xz | gzip > file.jsonl.gz`"
                )
            require_package(path)
            if path in found:
                raise ValueError(
                    f"--input: {path} is named twice, the second time by {name!r}; every document would count double"
                )
            stat = os.stat(path)
            found[path] = InputFile(path, stat.st_size, stat.st_mtime_ns)
    return list(found.values())


def _paths(name: str, globs: list[str]) -> list[str]:
    if name == STDLIB:
        return list(_walk(sysconfig.get_paths()["stdlib"], ["*.py"], STDLIB_SKIPPED))
    path = os.path.abspath(name)
    if os.path.isdir(path):
        files = list(_walk(path, globs, set()))
        if not files:
            raise ValueError(f"--input: no file in {path} matches {' '.join(globs)}; choose others with --glob")
        return files
    if os.path.exists(path):
        return [path]
    files = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
    if not files:
        raise ValueError(f"--input: {path} does not exist (allowed: files, directories, patterns, {STDLIB!r})")
    return files


def _walk(root: str, globs: list[str], skipped: set[str]) -> Iterator[str]:
    """Matching files below root in path order; hidden directories and links to directories are not entered."""
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        for file in files:
            relative = os.path.relpath(os.path.join(folder, file), root)
            if any(fnmatch.fnmatchcase(relative if "/" in pattern else file, pattern) for pattern in globs):
                names.append(relative)
    return (os.path.join(root, name) for name in sorted(names))


def fingerprint(files: list[InputFile], with_times: bool) -> str:
    """sha256 over paths and sizes, and over modification times too if asked."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(os.fsencode(file.path) + f"\0{file.size}\0{file.mtime_ns if with_times else ''}\n".encode())
    return digest.hexdigest()

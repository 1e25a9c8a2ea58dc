# SPDX-License-Identifier: Apache-2.0
"""Caches of sample orders: each file is read only if it is the file that was written, for the data that is there now.

A damaged index is no error for Megatron: the run reads other tokens and trains on them. `checksums.json` in the cache's
folder holds what the files were made from, and size and xxh3 of each. A file that is not recorded there, that differs
from its record, or that was made from other data is removed, and so is made again.
"""

import json
import os
import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zaya_plugin.data.fingerprint import file_xxh3
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.lock import Lock
from zaya_plugin.ground.whole_file import write_whole

RECORD_FILE, LOCK_NAME = "checksums.json", "lock"
WAIT_SECONDS = 0.5  # longest pause between two tries to take the lock


class CacheWarning(UserWarning):
    """A cache did not fit and is made again."""


class _BusyError(Exception):
    """Another process has the folder's lock."""


@contextmanager
def sealed(folder: str | os.PathLike, data_fingerprint: str, pattern: str) -> Iterator[None]:
    """Remove the folder's files that do not fit, let the caller read or make files, and record what it has made.

    Until the end the folder is locked: a second run waits, and does not remove a file that the first is writing.

    Args:
        data_fingerprint: of the data that the files are made from.
        pattern: of the names of the caller's files. Names that differ only behind their last "-" are one cache.

    Raises:
        ValueError: the folder cannot be written.
    """
    folder = Path(folder)
    while (lock := _lock(folder)) is None:
        _pause()
    with lock, _sealed(folder, data_fingerprint, pattern):
        yield


def make_once(path: Path, data_fingerprint: str, make: Callable[[], object]) -> None:
    """Call `make`, which writes `path`, unless the file fits its record: of all processes one does, the others wait.

    data_fingerprint, errors: as of `sealed`.
    """
    while not _fits(path, data_fingerprint):
        if (lock := _lock(path.parent)) is None:
            _pause()
            continue
        with lock, _sealed(path.parent, data_fingerprint, path.name):
            if not path.exists():
                make()
        return


@contextmanager
def _sealed(folder: Path, data_fingerprint: str, pattern: str) -> Iterator[None]:
    kept = _fitting(folder, data_fingerprint, pattern)
    yield
    seals = {path.name: _seal(path) for path in folder.glob(pattern) if path.name not in kept}
    if seals:
        others = {name: seal for name, seal in _recorded(folder, data_fingerprint).items() if (folder / name).exists()}
        content = {"made_from": data_fingerprint, "files": {**others, **seals}}
        write_whole(folder / RECORD_FILE, json.dumps(content, indent=1) + "\n")


def _fits(path: Path, data_fingerprint: str) -> bool:
    """Return whether a file is the one in the folder's record."""
    seal = _recorded(path.parent, data_fingerprint).get(path.name)
    with suppress(FileNotFoundError):
        return seal is not None and seal == _seal(path)
    return False


def _lock(folder: Path) -> Lock | None:
    """Return the folder's lock; None: another process has it."""
    try:
        return Lock.acquire([folder / LOCK_NAME], _BusyError)
    except _BusyError:
        return None
    except OSError as error:
        raise mistake(
            "data.cache_path",
            folder,
            problem=f"cannot be written ({error.strerror}), and the sample index is checked and kept there",
            fix="data.cache_path=<folder that this user can write>",
        ) from error


def _pause() -> None:
    time.sleep(random.uniform(0.1, 1.0) * WAIT_SECONDS)  # ranks that begin together do not try together


def _seal(path: Path) -> list:
    return [path.stat().st_size, file_xxh3(path)]


def _recorded(folder: Path, data_fingerprint: str) -> dict[str, list]:
    """Return size and xxh3 of each recorded file; none if the record is damaged or of other data."""
    try:
        record = json.loads((folder / RECORD_FILE).read_text())
        return record["files"] if record["made_from"] == data_fingerprint and isinstance(record["files"], dict) else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _fitting(folder: Path, data_fingerprint: str, pattern: str) -> set[str]:
    """Remove the caches of which a file does not fit its record; return the names of the files that stay."""
    recorded, files = _recorded(folder, data_fingerprint), sorted(folder.glob(pattern))
    bad = {path for path in files if recorded.get(path.name) != _seal(path)}
    caches = {_cache(path.name) for path in bad}
    for path in files:
        if _cache(path.name) in caches:
            path.unlink(missing_ok=True)
    if bad:
        names = ", ".join(sorted(path.name for path in bad)[:3])
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        warnings.warn(
            f"{folder}: {names}{more} did not fit {RECORD_FILE} or the data, and the sample index is made again",
            CacheWarning,
            stacklevel=6,
        )
    return {path.name for path in files if _cache(path.name) not in caches}


def _cache(name: str) -> str:
    return name.rpartition("-")[0] or name

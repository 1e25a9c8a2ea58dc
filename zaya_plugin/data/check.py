# SPDX-License-Identifier: Apache-2.0
"""Checks of a dataset before training starts: cheap enough for every start, and without torch.

Works on what `zaya data prepare` wrote and on bare Megatron `.bin`/`.idx` files of other origin; what cannot be checked
there is said in a `DatasetWarning`.
"""

import os
import warnings

from zaya_plugin.data.indexed_format import IndexedFile, largest_token, read_index
from zaya_plugin.data.manifest import NAME as MANIFEST_NAME
from zaya_plugin.data.manifest import Manifest, SplitRecord, file_sha256, load_manifest

# Of a bare .bin this much is looked through for its largest token: well under a second.
SCANNED_BYTES = 256_000_000


class DatasetWarning(UserWarning):
    """Something about a dataset could not be checked."""


def locate(path: str) -> tuple[Manifest | None, dict[str, str]]:
    """Finds the datasets that a path stands for.

    Args:
        path: directory of a prepared dataset, or a prefix of .bin/.idx files, with or without one of these suffixes.

    Returns:
        The manifest, None for bare files, and the prefix of each split; bare files count as split "text".

    Raises:
        ValueError: there is nothing there, or a directory without manifest.
    """
    path = os.fspath(path)
    if path.endswith((".bin", ".idx")):
        path = path[:-4]
    path = path.rstrip("/") or path
    is_prefix = os.path.exists(path + ".idx") or os.path.exists(path + ".bin")
    if os.path.isdir(path) and not is_prefix:
        if os.path.isfile(os.path.join(path, MANIFEST_NAME)):
            manifest = load_manifest(path)
            return manifest, {name: os.path.join(path, name) for name in manifest.splits}
        prefixes = sorted(name[:-4] for name in os.listdir(path) if name.endswith(".idx"))
        hint = (
            f"; give one of its prefixes: {', '.join(os.path.join(path, name) for name in prefixes)}"
            if prefixes
            else ""
        )
        raise ValueError(f"{path} is a directory without {MANIFEST_NAME}, so no dataset of `zaya data prepare`{hint}")
    directory, name = os.path.split(path)
    if os.path.isfile(os.path.join(directory, MANIFEST_NAME)):
        manifest = load_manifest(directory)
        if name in manifest.splits:
            return manifest, {name: path}
    if not is_prefix:
        unfinished = (
            " (an unfinished one is there: give the same `zaya data prepare` command again)"
            if os.path.isdir(path + ".partial")
            else ""
        )
        raise ValueError(
            f"there is no dataset at {path}{unfinished}. Make one with `zaya data prepare --output {path}`, "
            f"or name the prefix of a Megatron dataset ({path}.bin and {path}.idx)"
        )
    return None, {"text": path}


def check_dataset(
    path: str, vocab_size: int | None = None, *, eod_id: int | None = None, full: bool = False
) -> dict[str, IndexedFile]:
    """Proves that a dataset can be trained on.

    Args:
        path: as for `locate`.
        vocab_size: of the tokenizer or model; every token id must be below. None leaves that out.
        eod_id: of the tokenizer; must be the one that the documents were ended with. None leaves that out.
        full: also compare checksums with the manifest, or without one look through all tokens. Reads everything.

    Returns:
        What the index of each split says.

    Raises:
        ValueError: the path is missing, a file is cut short or damaged, the manifest is of another version, there are no
            tokens, or the tokenizer does not fit.
    """
    manifest, prefixes = locate(path)
    checked = {}
    for name, prefix in prefixes.items():
        indexed = checked[name] = read_index(prefix)
        if indexed.tokens == 0:
            raise ValueError(f"{prefix}.bin holds no tokens")
        if manifest is not None:
            _compare(indexed, manifest, manifest.splits[name], full)
        else:
            _warn_about_bare(indexed, vocab_size, full)
    if manifest is not None:
        largest = max(manifest.splits[name].max_token_id for name in prefixes)
        _check_vocabulary(
            path,
            largest,
            vocab_size,
            f" It was made with a tokenizer of {manifest.tokenizer.vocab_size} entries, in {_home(prefixes)}/tokenizer",
        )
        made_with = manifest.tokenizer.eod_id if manifest.arguments["append eod"] else None
        if None not in (eod_id, made_with) and eod_id != made_with:
            raise ValueError(
                f"{path} ends its documents with token {made_with}, and the tokenizer's end of document is {eod_id}: "
                f"it is not the tokenizer that the dataset was made with; use the one in {_home(prefixes)}/tokenizer"
            )
    return checked


def _home(prefixes: dict[str, str]) -> str:
    return os.path.dirname(next(iter(prefixes.values())))


def _compare(indexed: IndexedFile, manifest: Manifest, record: SplitRecord, full: bool) -> None:
    again = "prepare the dataset again with `zaya data prepare ... --overwrite`, or copy it again"
    if (indexed.documents, indexed.tokens, indexed.dtype.name) != (record.documents, record.tokens, manifest.dtype):
        raise ValueError(
            f"{indexed.prefix}.idx describes {indexed.documents} documents and {indexed.tokens} tokens of "
            f"{indexed.dtype.name}, and the manifest {record.documents} and {record.tokens} of {manifest.dtype}: they are not of the same run; {again}"
        )
    for suffix, sha256 in ((".bin", record.bin_sha256), (".idx", record.idx_sha256)) if full else ():
        if file_sha256(indexed.prefix + suffix) != sha256:
            raise ValueError(f"{indexed.prefix}{suffix} is damaged: its sha256 is not the one in the manifest; {again}")


def _warn_about_bare(indexed: IndexedFile, vocab_size: int | None, full: bool) -> None:
    unknown = [
        f"{indexed.prefix} has no {MANIFEST_NAME}: its contents cannot be compared with checksums, "
        f"nor its tokenizer and end-of-document token with yours"
    ]
    if vocab_size is None:
        unknown.append("its token ids were not compared with a vocabulary")
    else:
        largest, whole = largest_token(indexed, None if full else SCANNED_BYTES)
        _check_vocabulary(indexed.prefix, largest, vocab_size, "")
        if not whole:
            size = indexed.tokens * indexed.dtype.itemsize
            unknown.append(
                f"token ids were compared with the vocabulary in {SCANNED_BYTES / 1e6:.0f} MB of {size / 1e6:.0f}"
            )
    warnings.warn("; ".join(unknown), DatasetWarning, stacklevel=3)


def _check_vocabulary(path: str, largest: int, vocab_size: int | None, made_with: str) -> None:
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{path} holds token id {largest}, and the vocabulary has {vocab_size} entries "
            f"(0 to {vocab_size - 1}).{made_with}"
        )

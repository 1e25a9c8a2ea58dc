# SPDX-License-Identifier: Apache-2.0
"""Datasets on disk: find one by its path, read its manifest.json, and check that a run can train on it. No torch
import.

Both what `zaya data prepare` wrote and bare Megatron `.bin`/`.idx` files are accepted. The checks are cheap enough for
every start; a `DatasetWarning` names what cannot be checked of bare files.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import xxhash

from zaya_plugin import __version__
from zaya_plugin.config.train_help import DEMO_DATA, DEMO_PATH
from zaya_plugin.data.fingerprint import MARKS, fingerprint
from zaya_plugin.data.indexed_dataset import IndexedFile, largest_token, read_index
from zaya_plugin.data.tokenizer import TokenizerRecord
from zaya_plugin.ground.errors import mistake

MANIFEST = "manifest.json"
FORMAT = "zaya_plugin.data"
FORMAT_VERSION = 1
# Of a bare .bin this much is searched for its largest token: well under a second.
SCANNED_BYTES = 256_000_000
# A dataset of chats has one byte a token in <split>.marks (MARKS), with these bits. ANSWER: the token is part of an
# answer. END: it is the last of its document; the tokenizer's end of document cannot tell, because most chat templates
# end each turn with it. Tokens of filling are documents of their own.
ANSWER, END = 1, 2
NO_DATASET = "there is no dataset at this path"
REPAIR = "prepare the dataset again with `zaya data prepare ... --overwrite`, or copy it again"


class DatasetWarning(UserWarning):
    """A property of a dataset could not be checked."""


@dataclass(frozen=True)
class SplitRecord:
    """One indexed dataset. unigram_entropy is in nats/token; marks_sha256: of the .marks, None if it holds no chats;
    fingerprint: see zaya_plugin.data.fingerprint, None in datasets of earlier versions.
    """

    documents: int
    tokens: int
    max_token_id: int
    unigram_entropy: float
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str
    marks_sha256: str | None = None
    fingerprint: str | None = None


@dataclass(frozen=True)
class PackingRecord:
    """A dataset of `zaya data pack`: each of its documents is a bin of exactly `sequence_length` tokens.

    counts: for each split, see zaya_plugin.corpus.pack.COUNTS.
    """

    sequence_length: int
    counts: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Manifest:
    """Content of manifest.json: what a prepared dataset holds and how it was made.

    arguments: the options that decide the content, by option name, and the fingerprint of the input files.
    documents: read = empty + rejected + duplicates (with --deduplicate) + documents of all splits; blank_lines of jsonl
        files are no documents.
    written_at: UTC, ISO 8601; the only field that differs between two runs with the same arguments and versions.
    packing: None unless `zaya data pack` made the dataset.
    special_tokens: whether the tokens that the tokenizer's post-processor adds to a text, such as bos, are in each
        document; datasets of earlier versions have none. Of chats False: their template decides.
    """

    arguments: dict
    tokenizer: TokenizerRecord
    dtype: str
    splits: dict[str, SplitRecord]
    documents: dict[str, int]
    input_files: int
    input_bytes: int
    written_at: str = ""
    zaya_plugin_version: str = ""
    tokenizers_version: str = ""
    packing: PackingRecord | None = None
    special_tokens: bool = False

    def write(self, directory: str) -> None:
        """Write manifest.json, with the present time and version."""
        record = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        record["written_at"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        record["zaya_plugin_version"] = __version__
        if self.packing is None:
            del record["packing"]
        for split in record["splits"].values():
            if split["marks_sha256"] is None:
                del split["marks_sha256"]
        record["checksum"] = _checksum(record)
        Path(directory, MANIFEST).write_text(json.dumps(record, indent=2) + "\n", "utf-8")


def _checksum(record: dict) -> str:
    """Return the checksum of a manifest's content; two equal runs differ in written_at alone."""
    content = {key: value for key, value in record.items() if key not in ("checksum", "written_at")}
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


def load_manifest(path: str) -> Manifest:
    """Read the manifest of a prepared dataset.

    Args:
        path: the dataset's directory or its manifest.json.

    Raises:
        ValueError: there is none, it is not a manifest, or it was written in another format version.
    """
    path = os.fspath(path)
    file = path if os.path.basename(path) == MANIFEST else os.path.join(path, MANIFEST)
    if not os.path.isfile(file):
        raise mistake(
            file,
            problem="does not exist, so its directory is not a prepared dataset",
            allowed="a directory of `zaya data prepare`, `pack` or `bundle`",
            fix=f"`zaya data prepare --output {os.path.dirname(file)}` makes one",
        )
    try:
        with open(file, encoding="utf-8") as stream:
            record = json.load(stream)
    except (ValueError, RecursionError) as error:
        raise mistake(file, problem=f"is damaged: {error}", fix=REPAIR) from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise mistake(
            file,
            problem="is not the manifest of a dataset of `zaya data`",
            allowed="what `zaya data prepare`, `pack` and `bundle` write",
            fix="give the directory of such a dataset",
        )
    version = record.get("format_version")
    if version != FORMAT_VERSION:
        raise mistake(
            file,
            problem=f"format version {version} cannot be read by this zaya_plugin",
            allowed=f"version {FORMAT_VERSION}",
            fix=f"use zaya_plugin {record.get('zaya_plugin_version')}, which wrote it, or prepare the dataset again",
        )
    checksum = _checksum(record)
    if record.pop("checksum", checksum) != checksum:  # absent in datasets of earlier versions
        raise mistake(file, problem="is damaged: it was changed after the dataset was made", fix=REPAIR)
    del record["format"], record["format_version"]
    try:
        record["tokenizer"] = TokenizerRecord(**record["tokenizer"])
        record["splits"] = {name: SplitRecord(**split) for name, split in record["splits"].items()}
        if "packing" in record:
            record["packing"] = PackingRecord(**record["packing"])
        return Manifest(**record)
    except (KeyError, TypeError, AttributeError) as error:
        raise mistake(file, problem=f"is damaged: {error}", fix=REPAIR) from error


def file_sha256(path: str, progress: Callable[[int], object] = lambda count: None) -> str:
    """Return the sha256 of a file, as hexadecimal digits. progress: is called with the number of bytes just read."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
            progress(len(piece))
    return digest.hexdigest()


def locate(path: str | os.PathLike, key: str = "") -> tuple[Manifest | None, dict[str, str]]:
    """Find the datasets at a path.

    Args:
        path: directory of a prepared dataset, or a prefix of .bin/.idx files, with or without one of these suffixes.
        key: of the recipe, that the path is given by.

    Returns:
        The manifest, None for bare files, and the prefix of each split; bare files count as split "text".

    Raises:
        ValueError: there is no dataset, or a directory without manifest.
    """
    path = os.fspath(path)
    if path.endswith((".bin", ".idx")):
        path = path[:-4]
    path = path.rstrip("/") or path
    subject = (key, path) if key else (path,)
    allowed = f"a directory of `zaya data prepare`, or the prefix of a Megatron dataset ({path}.bin and {path}.idx)"
    is_prefix = os.path.exists(path + ".idx") or os.path.exists(path + ".bin")
    if os.path.isdir(path) and not is_prefix:
        if os.path.isfile(os.path.join(path, MANIFEST)):
            manifest = load_manifest(path)
            return manifest, {name: os.path.join(path, name) for name in manifest.splits}
        prefixes = sorted(os.path.join(path, name[:-4]) for name in os.listdir(path) if name.endswith(".idx"))
        raise mistake(
            *subject,
            problem=f"is a directory without {MANIFEST}, so not a dataset of `zaya data prepare`",
            allowed=allowed,
            fix=f"give one of its prefixes: {', '.join(prefixes)}"
            if prefixes
            else f"zaya data prepare --output {path} --input FILES; or correct the path",
        )
    directory, name = os.path.split(path)
    if os.path.isfile(os.path.join(directory, MANIFEST)):
        manifest = load_manifest(directory)
        if name in manifest.splits:
            return manifest, {name: path}
    if not is_prefix:
        command = f"zaya data prepare --output {path} --input FILES"
        if name == os.path.basename(DEMO_PATH):
            command = DEMO_DATA.replace(DEMO_PATH, path)
        raise mistake(
            *subject,
            problem=NO_DATASET
            + (", but an unfinished one of `zaya data prepare`" if os.path.isdir(path + ".partial") else ""),
            allowed=allowed,
            fix=f"{command} (the same command continues an unfinished one)",
        )
    return None, {"text": path}


def prefix_of(path: str | os.PathLike, split: str, key: str = "") -> str:
    """Return the prefix of one split of a prepared directory; of a prefix, itself.

    Args:
        split: "train" or "valid". A dataset prepared without split is all "train".
        key: see `locate`.

    Raises:
        ValueError: the path is no dataset or lacks the split.
    """
    _, prefixes = locate(path, key)
    if not os.path.isfile(os.path.join(path, MANIFEST)):
        return next(iter(prefixes.values()))  # a prefix names one split
    if split == "train" and "text" in prefixes:
        return prefixes["text"]
    if split not in prefixes:
        raise mistake(
            os.fspath(path),
            problem=f"has no {split} split",
            allowed=f"a dataset with one (it has {', '.join(prefixes)})",
            fix="prepare it with --valid-fraction, or name a prefix",
        )
    return prefixes[split]


def tokenizer_of(path: str | os.PathLike, key: str = "") -> tuple[str, TokenizerRecord] | None:
    """Return directory and record of a prepared dataset's tokenizer; None for bare files. key: see `locate`."""
    manifest, prefixes = locate(path, key)
    home = os.path.dirname(next(iter(prefixes.values())))
    return None if manifest is None else (os.path.join(home, "tokenizer"), manifest.tokenizer)


def packed_length(path: str | os.PathLike) -> int | None:
    """Return the tokens of a bin of a dataset made by `zaya data pack`; None for any other dataset."""
    manifest, _ = locate(path)
    return manifest.packing.sequence_length if manifest is not None and manifest.packing is not None else None


def refuse_other_length(path: str | os.PathLike, sequence_length: int) -> None:
    """Raise ValueError if a packed dataset has bins of another length than the run's sequences, which would cut its
    bins.
    """
    length = packed_length(path)
    if length not in (None, sequence_length):
        raise mistake(
            "stage.seq_length",
            sequence_length,
            problem=f"{path} is packed into bins of {length} tokens",
            allowed=str(length),
            fix=f"stage.seq_length={length}, or `zaya data pack --sequence-length {sequence_length}`",
        )


def holds_chats(path: str | os.PathLike) -> bool:
    """Return whether a dataset was made by `zaya data prepare --chat`, packed or not."""
    manifest, splits = locate(path)
    return manifest is not None and manifest.splits[next(iter(splits))].marks_sha256 is not None


def marks_of(prefix: str) -> np.ndarray | None:
    """Return the marks uint8 [tokens] of one split of chats, mapped from its file; None for any other dataset."""
    return np.memmap(prefix + MARKS, np.uint8, "r") if holds_chats(prefix) else None


def document_ends(tokens: np.ndarray, eod: int, marks: np.ndarray | None = None) -> np.ndarray:
    """Return where documents end, bool, in the shape of `tokens`. marks: of chats, uint8 in the same shape."""
    return tokens == eod if marks is None else (marks & END) > 0


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the stretches of true positions as (first, one past the last)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def packed_loss_mask(tokens: np.ndarray, eod: int, marks: np.ndarray | None = None) -> np.ndarray:
    """Return the positions of bins whose next token is in the loss, bool [..., s]: of chats the tokens of answers
    alone.

    An end of document is followed by another document or filling, and the last position by another bin: neither can be
    predicted from the tokens before it.

    Args:
        tokens: the bins, int [..., s]; documents end with `eod`, and the end of a bin is filled with it.
        marks: of chats, uint8 [..., s].
    """
    mask = ~document_ends(tokens, eod, marks)
    if marks is not None:
        mask[..., :-1] &= (marks[..., 1:] & ANSWER) > 0
    mask[..., -1] = False
    return mask


def check_dataset(
    path: str | os.PathLike,
    vocab_size: int | None = None,
    *,
    eod_id: int | None = None,
    full: bool = False,
    progress: Callable[[int], object] = lambda count: None,
) -> dict[str, IndexedFile]:
    """Check that a dataset can be trained on.

    Args:
        path: as for `locate`.
        vocab_size: of the tokenizer or model; every token id must be below. None skips this check.
        eod_id: of the tokenizer; must be the one that ends the documents. None skips this check.
        full: also compare checksums with the manifest, and search all tokens for the largest id. Reads every byte.
        progress: is called with the number of bytes just compared.

    Returns:
        The index of each split.

    Raises:
        ValueError: the path is missing, a file is cut short or damaged, the manifest is of another version, there are
            no tokens, the contents are not those that the manifest describes, or the tokenizer does not fit.
    """
    manifest, prefixes = locate(path)
    checked = {}
    for name, prefix in prefixes.items():
        indexed = checked[name] = read_index(prefix)
        if indexed.tokens == 0:
            raise mistake(
                prefix + ".bin",
                problem="holds no tokens",
                allowed="at least one token",
                fix="prepare it with more text",
            )
        if manifest is not None:
            _compare(indexed, manifest, manifest.splits[name], full, progress)
        else:
            _warn_about_bare(indexed, vocab_size, full, progress)
    if manifest is not None:
        directory, _ = tokenizer_of(path)
        _check_tokenizer(directory, manifest.tokenizer)
        largest = max(manifest.splits[name].max_token_id for name in prefixes)
        use = f"use the tokenizer that the dataset was made with: {directory}"
        _check_vocabulary(path, largest, vocab_size, f"{use} ({manifest.tokenizer.vocab_size} entries)")
        appended_eod = manifest.tokenizer.eod_id if manifest.arguments["append eod"] else None
        if None not in (eod_id, appended_eod) and eod_id != appended_eod:
            raise mistake(
                os.fspath(path),
                problem=f"ends its documents with token {appended_eod}; the tokenizer's end of document is {eod_id}",
                fix=use,
            )
    return checked


def _compare(indexed: IndexedFile, manifest: Manifest, record: SplitRecord, full: bool, progress) -> None:
    sizes = (os.path.getsize(indexed.prefix + suffix) for suffix in (".bin", ".idx"))
    measured = (indexed.documents, indexed.tokens, indexed.dtype.name, *sizes)
    recorded = (record.documents, record.tokens, manifest.dtype, record.bin_bytes, record.idx_bytes)
    if measured != recorded:
        words = "{} documents and {} tokens of {}, {} and {} bytes"
        one, other = (words.format(*facts) for facts in (measured, recorded))
        raise mistake(
            indexed.prefix + ".idx",
            problem=f"describes {one}; the manifest describes {other}: they are not of the same run",
            fix=REPAIR,
        )
    checksums = {".bin": record.bin_sha256, ".idx": record.idx_sha256}
    if record.marks_sha256 is not None:
        checksums[MARKS], path = record.marks_sha256, indexed.prefix + MARKS
        size = os.path.getsize(path) if os.path.isfile(path) else -1
        if size != indexed.tokens:
            how = "does not exist" if size < 0 else f"has {size} bytes"
            raise mistake(path, problem=f"{how}; it marks the answers of {indexed.tokens} tokens", fix=REPAIR)
    for suffix, sha256 in checksums.items() if full else ():
        if file_sha256(indexed.prefix + suffix, progress) != sha256:
            raise mistake(
                indexed.prefix + suffix, problem="is damaged: its sha256 is not the one in the manifest", fix=REPAIR
            )
    if record.fingerprint is not None and fingerprint(indexed.prefix) != record.fingerprint:
        raise mistake(
            indexed.prefix,
            problem="was changed after it was prepared: the fingerprint of its files is not the one in the manifest",
            fix=REPAIR,
        )
    if full or record.fingerprint is None:
        largest, _ = largest_token(indexed, None if full else SCANNED_BYTES)
        _check_vocabulary(indexed.prefix, largest, manifest.tokenizer.vocab_size, REPAIR)


def _check_tokenizer(directory: str, record: TokenizerRecord) -> None:
    """Raise ValueError if the tokenizer next to a dataset is not the one that it was made with; it may be missing."""
    file = os.path.join(directory, "tokenizer.json")
    if os.path.isfile(file) and file_sha256(file) != record.sha256:
        raise mistake(file, problem="is not the tokenizer of the dataset: its sha256 differs", fix=REPAIR)


def _warn_about_bare(indexed: IndexedFile, vocab_size: int | None, full: bool, progress) -> None:
    unknown = [
        f"{indexed.prefix} has no {MANIFEST}: its contents cannot be compared with checksums, "
        f"nor its tokenizer and end-of-document token with yours"
    ]
    if vocab_size is None:
        unknown.append("its token ids were not compared with a vocabulary")
    else:
        largest, whole = largest_token(indexed, None if full else SCANNED_BYTES, progress)
        _check_vocabulary(indexed.prefix, largest, vocab_size, "use the tokenizer that the dataset was made with")
        if not whole:
            megabytes = indexed.tokens * indexed.dtype.itemsize / 1e6
            scanned = f"{SCANNED_BYTES / 1e6:.0f} MB of {megabytes:.0f}"
            unknown.append(f"token ids were compared with the vocabulary in {scanned}")
    warnings.warn("; ".join(unknown), DatasetWarning, stacklevel=3)


def _check_vocabulary(path: str | os.PathLike, largest: int, vocab_size: int | None, fix: str) -> None:
    if vocab_size is not None and largest >= vocab_size:
        raise mistake(
            os.fspath(path),
            problem=f"holds token id {largest}, and the vocabulary has {vocab_size} entries",
            allowed=f"ids from 0 to {vocab_size - 1}",
            fix=fix,
        )

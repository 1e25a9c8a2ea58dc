# SPDX-License-Identifier: Apache-2.0
"""manifest.json: what a prepared dataset holds and how it was made."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass

from zaya_plugin.data.tokenizer import TokenizerRecord

NAME = "manifest.json"
FORMAT = "zaya_plugin.data"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class SplitRecord:
    """One indexed dataset. unigram_entropy is in nats/token."""

    documents: int
    tokens: int
    max_token_id: int
    unigram_entropy: float
    bin_bytes: int
    bin_sha256: str
    idx_bytes: int
    idx_sha256: str


@dataclass(frozen=True)
class PackingRecord:
    """A set of `zaya data pack`: each of its documents is a bin of exactly `sequence_length` tokens.

    counts: per split, see zaya_plugin.corpus.pack.COUNTS.
    """

    sequence_length: int
    counts: dict[str, dict[str, int]]


@dataclass(frozen=True)
class Manifest:
    """arguments: the options that decide the content, by option name, and the fingerprint of the input files.

    packing: None unless `zaya data pack` made it.
    documents: read = empty + rejected + duplicates (where looked for) + those of all splits; blank_lines of jsonl files are no documents.
    written_at is UTC, ISO 8601, and the only field that differs between two runs with the same arguments and versions.
    """

    arguments: dict
    tokenizer: TokenizerRecord
    dtype: str
    splits: dict[str, SplitRecord]
    documents: dict[str, int]
    input_files: int
    input_bytes: int
    written_at: str
    zaya_plugin_version: str
    tokenizers_version: str
    packing: PackingRecord | None = None

    def write(self, directory: str) -> None:
        record = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        if self.packing is None:
            del record["packing"]
        with open(os.path.join(directory, NAME), "w", encoding="utf-8") as out:
            json.dump(record, out, indent=2)
            out.write("\n")
            out.flush()
            os.fsync(out.fileno())


def load_manifest(path: str) -> Manifest:
    """Reads the manifest of a prepared dataset.

    Args:
        path: the dataset's directory or its manifest.json.

    Raises:
        ValueError: there is none, it is not a manifest, or it was written in another format version.
    """
    path = os.fspath(path)
    file = path if os.path.basename(path) == NAME else os.path.join(path, NAME)
    if not os.path.isfile(file):
        raise ValueError(
            f"{file} does not exist, so {os.path.dirname(file)} is no prepared dataset. Make one with `zaya data prepare --output ...`"
        )
    try:
        with open(file, encoding="utf-8") as stream:
            record = json.load(stream)
    except ValueError as error:
        raise ValueError(
            f"{file} is damaged: {error}. Prepare the dataset again with `zaya data prepare ... --overwrite`"
        ) from error
    if not isinstance(record, dict) or record.pop("format", None) != FORMAT:
        raise ValueError(f"{file} is not the manifest of a dataset prepared by `zaya data prepare`")
    version = record.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{file} has format version {version}, and this zaya_plugin reads version {FORMAT_VERSION}. "
            f"Use the zaya_plugin that wrote it ({record.get('zaya_plugin_version')}) or prepare the dataset again"
        )
    try:
        record["tokenizer"] = TokenizerRecord(**record["tokenizer"])
        record["splits"] = {name: SplitRecord(**split) for name, split in record["splits"].items()}
        if "packing" in record:
            record["packing"] = PackingRecord(**record["packing"])
        return Manifest(**record)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{file} is damaged: {error}. Prepare the dataset again with `zaya data prepare ... --overwrite`"
        ) from error


def file_sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()

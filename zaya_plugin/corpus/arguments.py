# SPDX-License-Identifier: Apache-2.0
"""The command line of `zaya data prepare`, and which of its options decide the content of the dataset."""

import argparse
import os

from zaya_plugin.corpus.inputs import DEFAULT_GLOBS, STDLIB
from zaya_plugin.data.manifest import file_sha256
from zaya_plugin.data.tokenizer import SMALLEST_BPE

DEFAULT_BPE = 4096
# Enough for a demo that trains for minutes, and prepared in seconds.
STDLIB_BYTES = 4_000_000

DESCRIPTION = """\
Turn text into a Megatron indexed dataset: train.bin/.idx and valid.bin/.idx, with its tokenizer and a manifest.

A run that was interrupted continues when the same command is given again; a run that is complete does nothing.
Documents that cannot be used are listed in <output>/rejected.jsonl with file, line and reason.
"""

EXAMPLES = """\
examples:
  # the demo: sources of this Python's standard library, a tokenizer trained on them, a few seconds
  zaya data prepare --output data/demo

  # your own text files, with a tokenizer trained on them
  zaya data prepare --input ~/notes --glob '*.md' --glob '*.txt' --train-bpe 8192 --output data/notes

  # jsonl shards with a Hugging Face tokenizer (a name on the hub, or a directory that holds tokenizer.json)
  zaya data prepare --input 'shards/*.jsonl.gz' --field content --tokenizer Zyphra/ZAYA1-base --workers 8 --output data/web

  # fail rather than lose a document, and keep everything for training
  zaya data prepare --input corpus.jsonl --max-rejects 0 --valid-fraction 0 --output data/corpus
"""


def size(text: str) -> int:
    """Bytes from 4000000, 4M or 1.5G (powers of ten)."""
    factor = {"K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}.get(text[-1:].upper(), 1)
    try:
        value = int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except (ValueError, OverflowError):
        value = 0
    if value <= 0:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; write a number of bytes, or one with K, M, G or T, such as 4M"
        )
    return value


def whole_number(least: int):
    """For argparse: a whole number from `least` up."""

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} up")
        return int(text)

    return parse


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 (no split) to below 1")
    return value


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        "zaya data prepare",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    out.add_argument(
        "--output",
        required=True,
        metavar="DIR",
        help="directory of the dataset; must not exist yet, or be an unfinished one",
    )
    text = out.add_argument_group("text")
    text.add_argument(
        "--input",
        nargs="+",
        default=[STDLIB],
        metavar="PATH",
        help="files, directories, quoted patterns, or stdlib (default) for the sources of this Python's standard library; "
        ".jsonl holds a document a line, .parquet one a row, any other file is a document; .jsonl and text also as .gz or .zst",
    )
    text.add_argument(
        "--glob",
        action="append",
        metavar="PATTERN",
        help=f"which files of a directory; repeat for several (default: {' '.join(DEFAULT_GLOBS)})".replace("%", "%%"),
    )
    text.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field of a jsonl line, or column, that holds the text (default: text)",
    )
    text.add_argument(
        "--max-bytes",
        type=size,
        metavar="SIZE",
        help="stop before the document that would take the input past this "
        f"(default: everything; {STDLIB_BYTES // 10**6}M for stdlib alone)",
    )
    text.add_argument(
        "--max-document-bytes",
        type=size,
        default=8_000_000,
        metavar="SIZE",
        help="reject longer documents; a worker needs about 130 times this in memory for one that long (default: 8M)",
    )
    text.add_argument(
        "--deduplicate",
        choices=("text", "id"),
        help="of documents with the same text, or the same --id-field, keep the first (default: keep all)",
    )
    text.add_argument(
        "--id-field",
        default="id",
        metavar="NAME",
        help="field of a jsonl line, or column, that holds its id (default: id)",
    )
    tokens = out.add_argument_group("tokenizer")
    choice = tokens.add_mutually_exclusive_group()
    choice.add_argument("--tokenizer", metavar="NAME", help="Hugging Face tokenizer: a directory or a name on the hub")
    choice.add_argument(
        "--train-bpe",
        type=whole_number(SMALLEST_BPE),
        metavar="VOCAB_SIZE",
        help=f"train a byte-level BPE on the training documents (default, with {DEFAULT_BPE})",
    )
    tokens.add_argument(
        "--train-bpe-bytes",
        type=size,
        default=64_000_000,
        metavar="SIZE",
        help="train the BPE on no more than this much input, from its beginning (default: 64M)",
    )
    tokens.add_argument(
        "--no-append-eod",
        dest="append_eod",
        action="store_false",
        help="do not end each document with the tokenizer's eos token",
    )
    run = out.add_argument_group("output and run")
    run.add_argument(
        "--valid-fraction",
        type=_fraction,
        default=0.05,
        metavar="F",
        help="documents held out for validation, chosen by a hash of their text; "
        "0 writes a single text.bin/.idx (default: 0.05)",
    )
    run.add_argument(
        "--workers",
        type=whole_number(1),
        default=min(os.cpu_count() or 1, 8),
        metavar="N",
        help="processes; 1 starts none and works in this one (default: number of cores, at most 8)",
    )
    run.add_argument(
        "--part-bytes",
        type=size,
        metavar="SIZE",
        help="input tokenised at a time and redone after an interruption (default: 16M, less for a small input)",
    )
    run.add_argument(
        "--max-rejects",
        type=whole_number(0),
        metavar="N",
        help="fail when more documents than this are rejected (default: no limit)",
    )
    run.add_argument(
        "--overwrite",
        action="store_true",
        help="replace a dataset, or drop an unfinished one, made with other arguments; "
        "the old one stays until the new one is whole",
    )
    run.add_argument("--quiet", action="store_true", help="no progress bar and no summary; problems are still reported")
    return out


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fills in the defaults that depend on other options."""
    args.glob = args.glob or list(DEFAULT_GLOBS)
    if args.max_bytes is None and args.input == [STDLIB]:
        args.max_bytes = STDLIB_BYTES
    if args.tokenizer is None and args.train_bpe is None:
        args.train_bpe = DEFAULT_BPE
    return args


def deciding(args: argparse.Namespace) -> dict:
    """The options that decide what is written, by option name; paths are absolute, so the working directory is no part."""
    local = args.tokenizer is not None and os.path.isdir(args.tokenizer)
    file = os.path.join(args.tokenizer, "tokenizer.json") if local else None
    return {
        "--input": [name if name == STDLIB else os.path.abspath(name) for name in args.input],
        "--glob": args.glob,
        "--field": args.field,
        "--max-bytes": args.max_bytes,
        "--max-document-bytes": args.max_document_bytes,
        "--tokenizer": os.path.abspath(args.tokenizer) if local else args.tokenizer,
        "sha256 of its tokenizer.json": file_sha256(file) if file and os.path.isfile(file) else None,
        "--deduplicate": args.deduplicate,
        "--id-field": args.id_field if args.deduplicate == "id" else None,
        "--train-bpe": args.train_bpe,
        "--train-bpe-bytes": args.train_bpe_bytes if args.train_bpe else None,
        "append eod": args.append_eod,
        "--valid-fraction": args.valid_fraction,
    }


def differences(old: dict, new: dict) -> list[str]:
    """One line for each entry that differs, in words."""
    return [f"{key}: it was made with {old.get(key)!r}, now {new[key]!r}" for key in new if old.get(key) != new[key]]

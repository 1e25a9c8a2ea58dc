# SPDX-License-Identifier: Apache-2.0
"""`zaya data inspect`: what is in a dataset, or what a run draws from a blend, as text with source, length and loss mask.

Documents and bins are read as they are stored, without torch. With --sequence-length the samples are the ones that training
sees, through the same datasets.
"""

import argparse
import os
import tempfile
from collections.abc import Iterator

import numpy as np

from zaya_plugin.corpus.arguments import whole_number
from zaya_plugin.corpus.command import command_parser, run_command
from zaya_plugin.data.blend import parse_entry
from zaya_plugin.data.check import locate
from zaya_plugin.data.dataset import build_gpt_datasets, build_stream
from zaya_plugin.data.indexed_reader import IndexedReader
from zaya_plugin.data.packing import packed_loss_mask
from zaya_plugin.data.prefixes import packed_length, prefix_of, resolve_blend
from zaya_plugin.data.samples import Sample, as_json, render
from zaya_plugin.data.tokenizer import open_tokenizer

DESCRIPTION = """\
Show decoded samples with their source, length and loss mask: the documents of a dataset, the bins of a packed one, or, with
--sequence-length, the samples that a run with this seed draws from one dataset or a blend of several.
"""
EXAMPLES = """\
examples:
  zaya data inspect data/web                                  # the first documents
  zaya data inspect data/web --split valid --start 40 --count 1 --characters 0
  zaya data inspect data/web-4k                               # a packed set: its bins
  zaya data inspect '0.7 data/web' '0.3 data/code' --sequence-length 4096 --seed 1234 --start 16384 --json
"""


def parser() -> argparse.ArgumentParser:
    out = command_parser("inspect", DESCRIPTION, EXAMPLES)
    out.add_argument(
        "sources", nargs="+", metavar="DATASET", help="a dataset, or 'WEIGHT DATASET' entries as in data.blend"
    )
    out.add_argument(
        "--split", choices=("train", "valid"), default="train", help="of a prepared directory (default: train)"
    )
    out.add_argument(
        "--start", type=whole_number(0), default=0, metavar="N", help="number of the first sample (default: 0)"
    )
    out.add_argument("--count", type=whole_number(1), default=3, metavar="N", help="how many (default: 3)")
    out.add_argument(
        "--characters", type=whole_number(0), default=800, metavar="N", help="of each text, 0 for all (default: 800)"
    )
    out.add_argument("--tokenizer", metavar="DIR", help="directory with tokenizer.json, for data without manifest")
    run = out.add_argument_group("samples of a run")
    run.add_argument(
        "--sequence-length", type=whole_number(1), metavar="N", help="show training samples of this length"
    )
    run.add_argument("--seed", type=whole_number(0), default=1234, metavar="N", help="of the run (default: 1234)")
    run.add_argument(
        "--total-samples",
        type=whole_number(1),
        metavar="N",
        help="train_iters x global_batch_size of the run, on which Megatron's order of samples depends "
        "(default: as many as are shown)",
    )
    run.add_argument(
        "--order",
        choices=("megatron", "continuing"),
        default="megatron",
        help="the run's data.order (default: megatron)",
    )
    run.add_argument(
        "--consumed", action="append", default=[], metavar="ENTRY", help="the run's data.consumed; repeat for several"
    )
    out.add_argument("--json", action="store_true", help="a JSON object a line, with the whole text")
    return out


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    return run_command("inspect", lambda: inspect(args))


def inspect(args: argparse.Namespace) -> None:
    """Prints the samples.

    Raises:
        ValueError: a dataset is missing, lacks the split, has fewer samples, or no tokenizer is known.
    """
    entries = [parse_entry(source) for source in args.sources]
    directory, eod = _tokenizer(args, entries[0][1])
    tokenizer = open_tokenizer(directory)
    if args.sequence_length is None:
        if len(entries) > 1:
            raise ValueError("several datasets are a blend, and its samples have a length: give --sequence-length")
        samples = stored(entries[0][1], args.split, args.start, args.count, eod)
    else:
        samples = drawn(args, entries, directory)
    for number, sample in enumerate(samples):
        print(
            as_json(sample, tokenizer, eod)
            if args.json
            else ("\n" if number else "") + render(sample, tokenizer, eod, args.characters)
        )


def _tokenizer(args: argparse.Namespace, path: str) -> tuple[str, int | None]:
    """Directory of the tokenizer and its end-of-document token."""
    manifest, prefixes = locate(path)
    if args.tokenizer:
        from zaya_plugin.data.tokenizer import describe

        return args.tokenizer, describe(args.tokenizer, args.tokenizer).eod_id
    if manifest is None:
        raise ValueError(f"{path} has no manifest that names its tokenizer: give --tokenizer")
    return os.path.join(os.path.dirname(next(iter(prefixes.values()))), "tokenizer"), manifest.tokenizer.eod_id


def stored(path: str, split: str, start: int, count: int, eod: int | None) -> Iterator[Sample]:
    """Documents, or bins of a packed set, in the order of the file."""
    prefix, packed = prefix_of(path, split), packed_length(path) is not None
    reader = IndexedReader(prefix)
    if start >= len(reader):
        raise ValueError(
            f"--start {start}: {prefix} has {len(reader)} {'bins' if packed else 'documents'}, numbered from 0"
        )
    for number in range(start, min(start + count, len(reader))):
        tokens = np.asarray(reader.document(number)).astype(np.int64)
        mask = packed_loss_mask(tokens, eod) if packed else np.arange(len(tokens)) < len(tokens) - 1
        yield Sample(prefix, f"{'bin' if packed else 'document'} {number:,} of {len(reader):,}", tokens, mask)


def drawn(args: argparse.Namespace, entries: list[tuple[float | None, str]], tokenizer: str) -> Iterator[Sample]:
    """Samples through the datasets of a run; the index is built in a temporary folder."""
    from megatron.core.tokenizers import MegatronTokenizer

    from zaya_plugin.data.ledger import parse_ledger

    blend = [path if weight is None else (weight, path) for weight, path in entries]
    total = max(args.total_samples or 0, args.start + args.count)
    prefixes, _ = resolve_blend(blend, args.split)
    with tempfile.TemporaryDirectory() as cache:
        opened = MegatronTokenizer.from_pretrained(tokenizer, metadata_path={"library": "huggingface"})
        if args.order == "continuing" and args.split == "train":
            ledger = parse_ledger(args.consumed)
            dataset = build_stream(blend, total, args.sequence_length, args.seed, opened, cache, ledger)
        else:
            train, valid, _ = build_gpt_datasets(
                blend,
                blend if args.split == "valid" else None,
                (total, 0, 0) if args.split == "train" else (0, total, 0),
                sequence_length=args.sequence_length,
                seed=args.seed,
                tokenizer=opened,
                cache_path=cache,
            )
            dataset = train if args.split == "train" else valid
        for number in range(args.start, min(args.start + args.count, len(dataset))):
            item = dataset[number]
            source = prefixes[int(item["dataset_id"])] if "dataset_id" in item else prefixes[0]
            name = f"{args.split} sample {number:,} of {len(dataset):,}"
            yield Sample(source, name, item["tokens"].numpy(), item["loss_mask"].numpy() > 0)

# SPDX-License-Identifier: Apache-2.0
"""`zaya data warm`: reads what a run needs next, so that it lies in the page cache of this node before it is asked for.

Without --sequence-length whole files are read, front to back. With it only what the samples of the next steps hold: ranges
of the data files are sorted and joined, so that the disk sees few long reads however the samples are shuffled. With --node
only the samples of that node's ranks, which Megatron deals out a micro-batch at a time.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from zaya_plugin.corpus.arguments import size, whole_number
from zaya_plugin.corpus.command import command_parser, run_command
from zaya_plugin.data.blend import parse_entry
from zaya_plugin.data.check import locate
from zaya_plugin.data.dataset import build_gpt_datasets, build_stream
from zaya_plugin.data.prefixes import prefix_of

READ_BYTES = 16 << 20
PAGE = 4096
# Ranges nearer to each other than this are read as one: skipping it costs as much as reading it.
GAP = 256 << 10

DESCRIPTION = """\
Read data into the page cache of this node: all of the given datasets, or what a run needs from a given step on.
"""
EXAMPLES = """\
examples:
  zaya data warm data/web                                                     # all of its training data
  # what steps 20,000 to 22,000 of a run draw from its blend
  zaya data warm '0.7 data/web' '0.3 data/code' --sequence-length 4096 --global-batch-size 4096 --total-samples 2000000000 \\
      --from-step 20000 --steps 2000 --cache-path data/web/cache
  # of these what node 5 of 128 reads, 8 ranks a node; under SLURM: srun --ntasks-per-node=1 sh -c 'zaya data warm ... --node $SLURM_NODEID'
  zaya data warm data/web --sequence-length 4096 --global-batch-size 4096 --total-samples 2000000000 --from-step 20000 --steps 2000 \\
      --cache-path data/web/cache --nodes 128 --node 5
"""


def parser() -> argparse.ArgumentParser:
    out = command_parser("warm", DESCRIPTION, EXAMPLES)
    out.add_argument(
        "sources", nargs="+", metavar="DATASET", help="datasets, or 'WEIGHT DATASET' entries as in data.blend"
    )
    out.add_argument(
        "--max-bytes", type=size, metavar="SIZE", help="read no more than this (default: 80 %% of the free memory)"
    )
    out.add_argument("--dry-run", action="store_true", help="say what would be read")
    run = out.add_argument_group("the run")
    run.add_argument("--sequence-length", type=whole_number(1), metavar="N", help="tokens of its samples")
    run.add_argument("--global-batch-size", type=whole_number(1), metavar="N", help="samples of a step")
    run.add_argument(
        "--total-samples", type=whole_number(1), metavar="N", help="of the whole run: train_iters x global_batch_size"
    )
    run.add_argument("--seed", type=whole_number(0), default=1234, metavar="N", help="(default: 1234)")
    run.add_argument(
        "--from-step", type=whole_number(0), default=0, metavar="N", help="steps already done (default: 0)"
    )
    run.add_argument("--steps", type=whole_number(1), default=1, metavar="N", help="how many from there (default: 1)")
    run.add_argument(
        "--order",
        choices=("megatron", "continuing"),
        default="megatron",
        help="the run's data.order (default: megatron)",
    )
    run.add_argument(
        "--consumed", action="append", default=[], metavar="ENTRY", help="the run's data.consumed; repeat for several"
    )
    run.add_argument("--cache-path", metavar="DIR", help="the run's data.cache_path, where its sample index is kept")
    node = out.add_argument_group("one node of several")
    node.add_argument(
        "--node",
        type=whole_number(0),
        metavar="N",
        help="this node's number, from 0; without it the samples of all nodes",
    )
    node.add_argument("--nodes", type=whole_number(1), metavar="N", help="nodes of the run")
    node.add_argument("--ranks-per-node", type=whole_number(1), default=8, metavar="N", help="(default: 8)")
    node.add_argument(
        "--micro-batch-size", type=whole_number(1), default=1, metavar="N", help="stage.micro_batch_size (default: 1)"
    )
    node.add_argument(
        "--ranks-per-sample",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="tensor x context parallelism, whose ranks read alike (default: 1)",
    )
    node.add_argument(
        "--pipeline-stages", type=whole_number(1), default=1, metavar="N", help="pipeline parallelism (default: 1)"
    )
    return out


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    args = parser().parse_args(argv)
    return run_command("warm", lambda: warm(args))


def warm(args: argparse.Namespace) -> None:
    """Reads, and prints what was read and how fast.

    Raises:
        ValueError: a dataset is missing, or a step asks for more than a run's options say.
    """
    entries = [parse_entry(source) for source in args.sources]
    if args.node is not None and args.sequence_length is None:
        raise ValueError(
            "--node asks for the samples of a node's ranks: give --sequence-length and the run's other options too"
        )
    if args.sequence_length is None:
        ranges = whole_files([path for _, path in entries])
    elif args.global_batch_size is None or args.total_samples is None:
        raise ValueError(
            "--sequence-length asks for the samples of a run: give --global-batch-size and --total-samples too"
        )
    else:
        ranges = needed(args, entries, data_parallel_ranks(args))
    wanted = sum(end - begin for found in ranges.values() for begin, end in found)
    limit = args.max_bytes or int(0.8 * free_memory())
    ranges, dropped = within(ranges, limit)
    pieces = sum(len(found) for found in ranges.values())
    said = f"{(wanted - dropped) / 1e6:,.1f} MB of {len(ranges)} files in {pieces:,} reads"
    if dropped:
        said += f"; {dropped / 1e6:,.1f} MB more do not fit into {limit / 1e6:,.1f} MB (--max-bytes)"
    if args.dry_run:
        print(f"would read {said}")
        return
    begin = time.monotonic()
    for path, found in ranges.items():
        read(path, found)
    seconds = max(time.monotonic() - begin, 1e-9)
    print(f"read {said}: {seconds:.1f} s, {(wanted - dropped) / 1e6 / seconds:,.0f} MB/s")


def whole_files(paths: list[str]) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges that cover the data and index of every training split."""
    prefixes = [prefix_of(path, "train") for path in paths if locate(path)]
    return {
        prefix + suffix: [(0, os.path.getsize(prefix + suffix))] for prefix in prefixes for suffix in (".idx", ".bin")
    }


def data_parallel_ranks(args: argparse.Namespace) -> tuple[set[int], int] | None:
    """Data-parallel ranks on the node, and how many there are in the run; None without --node.

    Megatron numbers ranks in the order tp-cp-ep-dp-pp: those of one sample are neighbours, pipeline stages far apart.

    Raises:
        ValueError: the numbers contradict each other.
    """
    if args.node is None:
        return None
    if args.nodes is None or args.node >= args.nodes:
        raise ValueError(f"--node {args.node}: give --nodes, a number above it")
    ranks = args.nodes * args.ranks_per_node
    if ranks % (args.ranks_per_sample * args.pipeline_stages):
        raise ValueError(
            f"{args.nodes} nodes of {args.ranks_per_node} ranks are no multiple of --ranks-per-sample {args.ranks_per_sample} x "
            f"--pipeline-stages {args.pipeline_stages}"
        )
    size = ranks // args.ranks_per_sample // args.pipeline_stages
    if args.global_batch_size is not None and args.global_batch_size % (size * args.micro_batch_size):
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} is no multiple of {size} data-parallel ranks x --micro-batch-size "
            f"{args.micro_batch_size}"
        )
    here = range(args.node * args.ranks_per_node, (args.node + 1) * args.ranks_per_node)
    return {rank // args.ranks_per_sample % size for rank in here}, size


def samples_of(first: int, last: int, micro_batch_size: int, dealt: tuple[set[int], int] | None) -> Iterator[int]:
    """Samples from first to before last that the given ranks read, as MegatronPretrainingSampler deals them out."""
    for number in range(first, last):
        if dealt is None or number // micro_batch_size % dealt[1] in dealt[0]:
            yield number


def needed(
    args: argparse.Namespace, entries: list[tuple[float | None, str]], dealt: tuple[set[int], int] | None
) -> dict[str, list[tuple[int, int]]]:
    """Byte ranges of the samples of the steps, through the datasets of the run; dealt: see `data_parallel_ranks`."""
    from megatron.core.tokenizers import MegatronTokenizer

    from zaya_plugin.data.ledger import parse_ledger

    first = args.from_step * args.global_batch_size
    last = min(first + args.steps * args.global_batch_size, args.total_samples)
    if first >= args.total_samples:
        raise ValueError(f"--from-step {args.from_step} is past the end of a run of {args.total_samples} samples")
    manifest, prefixes = locate(entries[0][1])
    if manifest is None:
        raise ValueError(
            f"{entries[0][1]} has no manifest that names its tokenizer; warm it whole, without --sequence-length"
        )
    tokenizer = os.path.join(os.path.dirname(next(iter(prefixes.values()))), "tokenizer")
    with tempfile.TemporaryDirectory() as temporary:
        blend = [path if weight is None else (weight, path) for weight, path in entries]
        opened = MegatronTokenizer.from_pretrained(tokenizer, metadata_path={"library": "huggingface"})
        cache = args.cache_path or temporary
        if args.order == "continuing":
            ledger = parse_ledger(args.consumed)
            dataset = build_stream(blend, args.total_samples, args.sequence_length, args.seed, opened, cache, ledger)
        else:
            dataset, _, _ = build_gpt_datasets(
                blend,
                None,
                (args.total_samples, 0, 0),
                sequence_length=args.sequence_length,
                seed=args.seed,
                tokenizer=opened,
                cache_path=cache,
            )
        found: dict[str, list[tuple[int, int]]] = {}
        for number in samples_of(first, last, args.micro_batch_size, dealt):
            for path, begin, end in sample_ranges(dataset, number):
                found.setdefault(path, []).append((begin, end))
    return {path: joined(ranges) for path, ranges in sorted(found.items())}


def sample_ranges(dataset, number: int) -> list[tuple[str, int, int]]:
    """Files and byte ranges that one sample of a GPTDataset, a blend of them or a StreamDataset is read from."""
    if hasattr(dataset, "byte_ranges"):
        return dataset.byte_ranges(number)
    if hasattr(dataset, "dataset_index"):
        number, dataset = (
            int(dataset.dataset_sample_index[number]),
            dataset.datasets[int(dataset.dataset_index[number])],
        )
    at = int(dataset.shuffle_index[number])
    (first, skip), (last, past) = (tuple(map(int, dataset.sample_index[at + step])) for step in (0, 1))
    indexed = dataset.dataset
    ranges = []
    for position in range(first, last + 1):
        pointer, length, *_ = indexed.index[int(dataset.document_index[position])]
        begin = skip if position == first else 0
        end = min(past + 1, int(length)) if position == last else int(length)
        width = np.dtype(indexed.index.dtype).itemsize
        ranges.append((indexed.path_prefix + ".bin", int(pointer) + begin * width, int(pointer) + end * width))
    return ranges


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted ranges on page boundaries, near ones joined."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        begin, end = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
        if out and begin <= out[-1][1] + GAP:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def within(ranges: dict[str, list[tuple[int, int]]], limit: int) -> tuple[dict[str, list[tuple[int, int]]], int]:
    """As many bytes as the limit allows, from the front; and how many are left out."""
    kept, left, dropped = {}, limit, 0
    for path, found in ranges.items():
        for begin, end in found:
            take = min(end - begin, left)
            if take:
                kept.setdefault(path, []).append((begin, begin + take))
            left -= take
            dropped += end - begin - take
    return kept, dropped


def read(path: str, ranges: list[tuple[int, int]]) -> None:
    """Reads ranges of a file, in order, ahead of itself."""
    buffer = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for begin, end in ranges:
            os.posix_fadvise(stream.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
            stream.seek(begin)
            while begin < end and (count := stream.readinto(memoryview(buffer)[: min(READ_BYTES, end - begin)])):
                begin += count


def free_memory() -> int:
    """Bytes that the kernel can give to the page cache."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemAvailable; give --max-bytes")

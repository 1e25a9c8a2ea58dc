# SPDX-License-Identifier: Apache-2.0
"""`zaya data warm`: read into the page cache of this node what a run needs next.

Datasets are read whole, front to back. Of a recipe with --steps only the samples of these steps are read: their ranges
of the data files are sorted and joined, so that the disk gets few long reads however the samples are shuffled. With
--node only the samples of that node's ranks, which Megatron deals out a micro-batch at a time.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from zaya_plugin.config.entries import parse_blend
from zaya_plugin.config.schedule import samples_until, step_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.prepared import prefix_of
from zaya_plugin.data.sources import find_sources, training_samples
from zaya_plugin.ground.errors import free_memory, mistake
from zaya_plugin.ground.progress import bar
from zaya_plugin.handover.predecessor import saved_step

READ_BYTES = 16 << 20
PAGE = 4096
# Ranges nearer to each other than this are read as one: skipping the gap takes as long as reading it.
GAP = 256 << 10


def warm(args: argparse.Namespace, recipe: Recipe | None) -> None:
    """Read the data of `recipe`, or args.datasets, and print how much and how fast.

    Raises:
        ValueError: a dataset is missing, the recipe is wrong, or it has no such node or step.
    """
    options = {"--steps": args.steps, "--from-step": args.from_step, "--node": args.node}
    limits = {option: value for option, value in options.items() if value is not None}
    if limits and (recipe is None or args.steps is None):
        raise mistake(
            *next(iter(limits.items())),
            problem="the samples of steps follow from a recipe and --steps",
            allowed="with both of them",
            fix="zaya data warm experiment=<name> data.path=<dataset> --steps <n>",
        )
    if limits:
        ranges = needed(recipe, args.from_step, args.steps, args.node)
    else:
        ranges = whole_files(args.datasets if recipe is None else find_sources(recipe).train)
    total = sum(end - begin for spans in ranges.values() for begin, end in spans)
    limit = args.max_bytes or int(0.8 * free_memory())
    ranges, dropped = within(ranges, limit)
    text = f"{(total - dropped) / 1e6:,.1f} MB of {len(ranges)} files in {sum(map(len, ranges.values())):,} reads"
    if dropped:
        text += f"; {dropped / 1e6:,.1f} MB more do not fit into {limit / 1e6:,.1f} MB (--max-bytes)"
    if args.dry_run:
        print(f"would read {text}")
        return
    begin = time.monotonic()
    with bar("read", total - dropped) as shown:
        for path, spans in ranges.items():
            read(path, spans, shown.update)
    seconds = max(time.monotonic() - begin, 1e-9)
    print(f"read {text}: {seconds:.1f} s, {(total - dropped) / 1e6 / seconds:,.0f} MB/s")


def whole_files(blend) -> dict[str, list[tuple[int, int]]]:
    """Return byte ranges that cover the data and index of every training split; blend: see
    zaya_plugin.data.blend.Blend.
    """
    prefixes = [prefix_of(entry.path, "train") for entry in parse_blend(blend)]
    files = [prefix + suffix for prefix in prefixes for suffix in (".idx", ".bin")]
    return {path: [(0, os.path.getsize(path))] for path in files}


def data_parallel_ranks(recipe: Recipe, node: int) -> tuple[set[int], int]:
    """Return the data-parallel ranks on a node, and how many there are in the run.

    Megatron numbers ranks in the order tp-cp-ep-dp-pp: those of one sample are neighbours, pipeline stages far apart.

    Raises:
        ValueError: the recipe has no such node, or its layout does not fit its ranks.
    """
    nodes, per_node, parallel = recipe.cluster.num_nodes, recipe.nproc or recipe.cluster.gpus_per_node, recipe.parallel
    if node >= nodes:
        raise mistake(
            "--node", node, problem="the run has no such node", allowed=f"0 to {nodes - 1} (cluster.num_nodes={nodes})"
        )
    alike = parallel.tensor_model_parallel_size * parallel.context_parallel_size
    count, left = divmod(nodes * per_node, alike * parallel.pipeline_model_parallel_size)
    unit = count * recipe.stage.micro_batch_size
    if left or recipe.stage.global_batch_size % unit:
        raise mistake(
            "stage.global_batch_size",
            recipe.stage.global_batch_size,
            problem=f"{nodes} nodes of {per_node} ranks give {count} data-parallel ranks and {left} ranks are left "
            "over",
            allowed=f"a multiple of stage.micro_batch_size x data-parallel ranks = {unit}, and no ranks left over",
        )
    return {rank // alike % count for rank in range(node * per_node, (node + 1) * per_node)}, count


def samples_of(first: int, last: int, micro_batch_size: int, dealt: tuple[set[int], int] | None) -> Iterator[int]:
    """Yield the samples from first to before last that the given ranks read, as MegatronPretrainingSampler deals them
    out.
    """
    for number in range(first, last):
        if dealt is None or number // micro_batch_size % dealt[1] in dealt[0]:
            yield number


def needed(recipe: Recipe, from_step: int | None, steps: int, node: int | None) -> dict[str, list[tuple[int, int]]]:
    """Return the byte ranges of the samples of the steps, through the datasets of the run."""
    dealt = None if node is None else data_parallel_ranks(recipe, node)
    if from_step is None:
        from_step = saved_step(Path(recipe.run_dir)) or 0
    end = step_count(recipe)
    if from_step >= end:
        raise mistake("--from-step", from_step, problem="is past the end of the run", allowed=f"0 to {end - 1}")
    first, last = samples_until(recipe, from_step), samples_until(recipe, min(from_step + steps, end))
    dataset, reads = training_samples(recipe), {}
    for number in samples_of(first, last, recipe.stage.micro_batch_size, dealt):
        for path, begin, end in sample_ranges(dataset, recipe.handover.first_sample + number):
            reads.setdefault(path, []).append((begin, end))
    return {path: joined(ranges) for path, ranges in sorted(reads.items())}


def sample_ranges(dataset, number: int) -> list[tuple[str, int, int]]:
    """Return the files and byte ranges that one sample of a GPTDataset, a blend of them or a StreamDataset is read
    from.
    """
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
    """Return the ranges sorted, on page boundaries, with near ones joined."""
    out: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        begin, end = begin // PAGE * PAGE, -(-end // PAGE) * PAGE
        if out and begin <= out[-1][1] + GAP:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((begin, end))
    return out


def within(ranges: dict[str, list[tuple[int, int]]], limit: int) -> tuple[dict[str, list[tuple[int, int]]], int]:
    """Return the ranges up to `limit` bytes, from the front, and how many bytes are left out."""
    kept, left, dropped = {}, limit, 0
    for path, spans in ranges.items():
        for begin, end in spans:
            take = min(end - begin, left)
            if take:
                kept.setdefault(path, []).append((begin, begin + take))
            left -= take
            dropped += end - begin - take
    return kept, dropped


def read(path: str, ranges: list[tuple[int, int]], progress: Callable[[int], object] = lambda count: None) -> None:
    """Read ranges of a file in order, each with readahead. progress: is called with the number of bytes just read."""
    buffer = bytearray(READ_BYTES)
    with open(path, "rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        for begin, end in ranges:
            os.posix_fadvise(stream.fileno(), begin, end - begin, os.POSIX_FADV_WILLNEED)
            stream.seek(begin)
            while begin < end and (count := stream.readinto(memoryview(buffer)[: min(READ_BYTES, end - begin)])):
                begin += count
                progress(count)

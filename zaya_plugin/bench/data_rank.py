# SPDX-License-Identifier: Apache-2.0
"""The work of a rank of `zaya bench data` (zaya_plugin.bench.rank): it reads micro-batches with the loader of the
training, without a model.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

from zaya_plugin.bench.results import Column, Line, finish

TRAINS = True
COLUMNS = (
    Column("rank", "rank"),
    Column("batches_per_s", "micro-batches/s", ",.1f"),
    Column("tokens_per_s", "tokens/s", ",.0f"),
    Column("first_ms", "first ms", ",.0f"),
    Column("p50_ms", "p50 ms", ".2f"),
    Column("max_ms", "max ms", ",.1f"),
    Column("batches_of_a_step", "a step"),
    Column("step_ms", "ms for a step", ",.1f"),
)


def measure(options, recipe, rank: int, world_size: int, console, say: Callable[[str], None]) -> Callable[[], None]:
    """Read micro-batches on every rank at the same time. options: batches, command, commit."""
    from torch import distributed

    from zaya_plugin.hosts import worker

    worker.prepare(recipe)
    from zaya_plugin.hosts import loader_processes
    from zaya_plugin.hosts.stage_handover import loader_alone

    loader, of_step = loader_alone(recipe)
    distributed.barrier()
    moments = [time.perf_counter()]
    for number, _ in zip(range(options.batches + 1), loader, strict=False):
        moments.append(time.perf_counter())
        if number % max(1, options.batches // 10) == 0:
            say(f"{number} of {options.batches} micro-batches")
    gathered: list = [None] * world_size
    distributed.all_gather_object(gathered, moments)
    loader_processes.end()
    return partial(report, gathered, of_step, options, recipe)


def row_of(rank: int, moments: list[float], of_step: int, tokens: int) -> dict:
    """Return the row of a rank. moments: seconds of its start and behind every micro-batch, the first of which waits for
    the workers. of_step: micro-batches of a step. tokens: of a micro-batch.
    """
    times = [after - before for before, after in itertools.pairwise(moments[1:])]
    mean = statistics.fmean(times)
    return {
        "rank": rank,
        "batches": len(times),
        "batches_per_s": 1 / mean,
        "tokens_per_s": tokens / mean,
        "first_ms": 1e3 * (moments[1] - moments[0]),
        "p50_ms": 1e3 * statistics.median(times),
        "max_ms": 1e3 * max(times),
        "batches_of_a_step": of_step,
        "step_ms": 1e3 * of_step * mean,
    }


def report(gathered: list[list[float]], of_step: int, options, recipe) -> None:
    """Print and write the results. gathered: moments of every rank."""
    import torch

    tokens = recipe.stage.micro_batch_size * recipe.stage.seq_length
    rows = [row_of(rank, moments, of_step, tokens) for rank, moments in enumerate(gathered)]
    slowest = min(rows, key=lambda row: row["batches_per_s"])
    first, *since = gathered[slowest["rank"]][1:]
    rates = [number / (moment - first) for number, moment in enumerate(since, 1)]
    finish(
        "data",
        options,
        torch.device("cpu"),
        rows,
        COLUMNS,
        title=f"Loader of {recipe.name}, {recipe.data.num_workers} workers on each of {len(rows)} ranks",
        lines=[Line(f"rank {slowest['rank']}, the slowest", list(range(1, len(rates) + 1)), rates)],
        x="micro-batches read",
        y="micro-batches a second",
        more={"data_path": recipe.data.path, "num_workers": recipe.data.num_workers},
    )
    print(
        f"The data of a step takes {slowest['step_ms']:,.1f} ms on the slowest rank: a step that takes longer does "
        "not wait for it (data.num_workers sets the workers; a second run may read from the page cache)."
    )

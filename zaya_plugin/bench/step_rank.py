# SPDX-License-Identifier: Apache-2.0
"""The work of a rank of `zaya bench step` (zaya_plugin.bench.rank)."""

import tempfile
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from zaya_plugin.bench import probes, results, step_record, step_report
from zaya_plugin.bench.options import PICTURE, RECORD, TRACE
from zaya_plugin.bench.random_tokens import RandomTokens
from zaya_plugin.bench.session import Session

TRAINS = True


def measure(
    options: Namespace, recipe, rank: int, world_size: int, console: TextIO, say: Callable[[str], None]
) -> Callable[[], None]:
    """Run the steps; rank 0 reads its trace before this returns."""
    from zaya_plugin.hosts import worker

    worker.prepare(recipe)
    from zaya_plugin.data.sources import find_sources
    from zaya_plugin.hosts import pretrain
    from zaya_plugin.hosts.measured_steps import NoOptimizer, before_steps
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    device = results.rank_device(recipe)
    say("measuring the device's rates of a matrix product and of a copy")
    rates = probes.measure(device, results.dtype_of(recipe))

    class StepLines(Reporter):
        """A run's metrics, without the summary at its end."""

        def close(self) -> None:
            self.losses = []
            super().close()

    sources = RandomTokens(options.random_tokens) if options.random_tokens else find_sources(recipe)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = options.output / TRACE if options.trace else folder / TRACE
        session = Session(options, rank, device.type, trace, folder / "reference.json.gz", say)
        stack.enter_context(before_steps(session.before_step))
        say(f"building the model; {options.warmup} steps of warm-up")
        reporter = StepLines(recipe, rank, world_size, console)
        pretrain.run(recipe, sources, Lifecycle(recipe), reporter, None if options.optimizer else NoOptimizer)
        record = step_record.of_rank(session, recipe, options, rates, device)
        if rank == 0:
            say("reading the trace")
            record = step_record.with_breakdown(record, session, recipe, trace if options.trace else None)
    return partial(report, record, options.output, [TRACE] if options.trace else [])


def report(record: dict, folder: Path, names: list[str]) -> None:
    """Print the breakdown and write it into `folder`. names: of the files that are there."""
    results.write(folder / RECORD, record)
    with suppress(ImportError):
        from zaya_plugin.pictures.still import png

        (folder / PICTURE).write_bytes(png(step_report.picture(record)))
        names = [*names, PICTURE]
    print(step_report.text(record))
    print(f"written to {folder}: {', '.join((RECORD, *names))}")

# SPDX-License-Identifier: Apache-2.0
"""One rank of `zaya bench step`: `python -m zaya_plugin.bench.step_rank <recipe.yaml> <options as JSON>`, started like
a rank of training.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path

from zaya_plugin.bench import probes, results, step_record, step_report
from zaya_plugin.bench.options import PICTURE, RECORD, TRACE, Options
from zaya_plugin.bench.random_tokens import RandomTokens
from zaya_plugin.bench.session import Session


def main(argv: list[str]) -> int:
    """Return the exit status, as zaya_plugin.hosts.worker.main does."""
    from zaya_plugin.hosts import worker

    options = Options.from_json(argv[1])
    return worker.main(argv[:1], lambda *of_rank: measure(options, *of_rank))


def measure(options: Options, recipe, rank: int, world_size: int, console) -> None:
    """Run the steps; on rank 0 print the breakdown to `console` and write it to the run directory."""
    import torch

    from zaya_plugin.hosts import worker

    def say(line: str) -> None:
        if rank == 0:
            print(f"bench: {line}", file=console, flush=True)

    worker.prepare(recipe)
    from zaya_plugin.data.sources import find_sources
    from zaya_plugin.hosts import pretrain
    from zaya_plugin.hosts.measured_steps import NoOptimizer, before_steps
    from zaya_plugin.training.lifecycle import Lifecycle
    from zaya_plugin.training.metrics import Reporter

    device = results.rank_device(recipe)
    say("measuring the device's rates of a matrix product and of a copy")
    rates = probes.measure(device, results.dtype_of(recipe))
    run_dir = Path(recipe.run_dir)

    class StepLines(Reporter):
        """A run's metrics, without the summary at its end."""

        def close(self) -> None:
            self.losses = []
            super().close()

    sources = RandomTokens(options.random_tokens) if options.random_tokens else find_sources(recipe)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trace = run_dir / TRACE if options.trace else folder / TRACE
        session = Session(options, rank, device.type, trace, folder / "reference.json.gz", say)
        stack.enter_context(before_steps(session.before_step))
        say(f"building the model; {options.warmup} steps of warm-up")
        reporter = StepLines(recipe, rank, world_size, console)
        pretrain.run(recipe, sources, Lifecycle(recipe), reporter, None if options.optimizer else NoOptimizer)
        result = step_record.of_rank(session, recipe, options, rates, device)
        if rank == 0:
            say("reading the trace")
            result = step_record.with_breakdown(result, session, recipe, trace if options.trace else None)
            results.write(run_dir / RECORD, result)
            names = [RECORD, *([TRACE] if options.trace else [])]
            with suppress(ImportError):
                from zaya_plugin.pictures.still import png

                (run_dir / PICTURE).write_bytes(png(step_report.picture(result)))
                names.append(PICTURE)
            print(step_report.text(result), file=console, flush=True)
            print(f"written to {run_dir}: {', '.join(names)}", file=console, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()  # all ranks read the files of rank 0 afterwards
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

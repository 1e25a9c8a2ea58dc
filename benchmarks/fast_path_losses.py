# SPDX-License-Identifier: Apache-2.0
"""Compare the training losses of the fast path and of the reference path: whole runs of `zaya train` with the same
weights and data, and a plot.

    python benchmarks/fast_path_losses.py --results benchmarks/results data.path=data/corpus experiment=zaya1_base ...

All runs continue one first step, so that weights and data are the same. reference: torch's operators alone, not
compiled, fp32 residual stream, no graphs. again: the same with the sequences of a step in other micro-batches, which
changes only the order of sums; its distance from the reference is the noise. fast: the best version of every operator,
and graphs (--fast). The fast path follows the reference if its distance, as the mean over a window of steps, is at most
--times the largest noise. Writes <name>.json and <name>.png. A run that is already in --work is not repeated.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from result_record import described, write
from training_runs import losses, smooth, train

REFERENCE = [
    "cluster.kernels=reference",
    "cluster.kernel_overrides.grouped_product=grouped_mm",  # the reference waits for the host in every call
    "cluster.graphs=none",
    "model.residual_in_fp32=true",
]
FAST = ["cluster.kernels=auto", "cluster.graphs=full_iteration"]


def distances(of: list[float], reference: list[float], window: int) -> list[float]:
    """Return |difference| of the running means for each step from the first full window on."""
    return [abs(a - b) for a, b in zip(smooth(of, window), smooth(reference, window), strict=True)][window - 1 :]


def plot(path: Path, curves: dict[str, list[float]], window: int) -> None:
    """Plot the losses above, and their distances from the reference below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(2, 1))
    for name, curve in curves.items():
        above.plot(range(1, len(curve) + 1), curve, label=name, linewidth=1)
        if name != "reference":
            found = distances(curve, curves["reference"], window)
            below.plot(range(window, len(curve) + 1), found, label=f"|{name} - reference|", linewidth=1)
    above.set(ylabel="training loss")
    below.set(xlabel="step", ylabel=f"mean of {window} steps", yscale="log")
    above.legend(), below.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", help="Hydra overrides of all runs")
    parser.add_argument(
        "--micro-batch-size",
        type=int,
        default=4,
        help="micro-batch size of reference and fast, even; the run for the noise has half",
    )
    parser.add_argument("--fast", nargs="*", default=FAST, help="overrides of the fast run; default: %(default)s")
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--times", type=float, default=2.0, help="allowed distance, in multiples of the noise")
    parser.add_argument("--work", type=Path, default=Path("runs/fast_path_losses"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="fast_path_losses")
    parser.add_argument(
        "--together", action="store_true", help="run all three at once; one device must have memory for them"
    )
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    arguments = parser.parse_args()
    size = arguments.micro_batch_size
    runs = {
        "reference": [*REFERENCE, f"stage.micro_batch_size={size}"],
        "again": [*REFERENCE, f"stage.micro_batch_size={size // 2}"],
        "fast": [*arguments.fast, f"stage.micro_batch_size={size}"],
    }
    # Megatron's warm-up draws from the stream of the initial weights, more for larger micro-batches; and random states
    # need not fit.
    start = train(arguments.work / "start", [*arguments.overrides, *runs["reference"], "exit_interval=1"])

    def run(name: str) -> list[float]:
        directory = arguments.work / name
        if not directory.exists():
            shutil.copytree(start, directory)
            (directory / "done").unlink()
        return losses(train(directory, [*arguments.overrides, *runs[name], "resume=must", "megatron.no_load_rng=true"]))

    with ThreadPoolExecutor(len(runs) if arguments.together else 1) as pool:
        curves = dict(zip(runs, pool.map(run, runs), strict=True))
    found = {name: distances(curves[name], curves["reference"], arguments.window) for name in ("again", "fast")}
    noise, distance = max(found["again"]), max(found["fast"])
    record = described(arguments.commit) | {
        "overrides": arguments.overrides,
        "fast": arguments.fast,
        "window": arguments.window,
        "steps": len(curves["fast"]),
        "noise": noise,
        "distance": distance,
        "allowed": arguments.times * noise,
        "follows": distance <= arguments.times * noise,
        "losses": curves,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    plot(arguments.results / f"{arguments.name}.png", curves, arguments.window)
    write(record, arguments.name, arguments.results)
    return 0 if record["follows"] else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Count the steps that Muon and AdamW need to reach a given loss, each over a range of learning rates: whole runs of
`zaya train`.

    python benchmarks/muon_vs_adamw.py --experiment cpu_demo --lrs 1e-3 2e-3 4e-3 8e-3 --results benchmarks/results

Writes <name>.json and <name>.png. A run that is already in --work is not repeated. Loss is the training loss averaged
over the last `--window` steps; the target is AdamW's loss at the end of its best run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from result_record import commit_of
from training_runs import losses, rows, smooth, train

OPTIMIZERS = ("adamw", "muon")


def run(arguments: argparse.Namespace, optimizer: str, lr: float) -> Path:
    """Run one training and return its directory."""
    overrides = [
        f"experiment={arguments.experiment}",
        f"optim={optimizer}",
        f"optim.lr={lr}",
        f"optim.min_lr={lr / 10}",
        *arguments.overrides,
    ]
    return train(arguments.work / f"{optimizer}-{lr:g}", overrides)


def steps_to(curve: list[float], target: float) -> int | None:
    """Return the first step at which the curve is at most `target`."""
    return next((i + 1 for i, value in enumerate(curve) if value <= target), None)


def plot(path: Path, curves: dict[tuple[str, float], list[float]], best: dict[str, float], target: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for (optimizer, lr), curve in curves.items():
        chosen = best[optimizer] == lr
        axes.plot(
            range(1, len(curve) + 1),
            curve,
            color="tab:blue" if optimizer == "adamw" else "tab:red",
            alpha=1.0 if chosen else 0.25,
            linewidth=2 if chosen else 1,
            label=f"{optimizer}, lr {lr:g}" if chosen else None,
        )
    axes.axhline(target, color="gray", linestyle=":", label="AdamW's best end")
    axes.set(xlabel="step", ylabel="training loss (running mean)")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="cpu_demo")
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--overrides", nargs="*", default=[], help="more Hydra overrides for every run")
    parser.add_argument("--at-once", type=int, default=1, help="runs at the same time; steps are compared, not times")
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--work", type=Path, default=Path("runs/muon_vs_adamw"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="muon_vs_adamw-cpu")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    parser.add_argument("--device", default=platform.processor() or platform.machine())
    arguments = parser.parse_args()

    curves, validation = {}, {}
    runs = list(itertools.product(OPTIMIZERS, arguments.lrs))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        directories = list(pool.map(lambda one: run(arguments, *one), runs))
    for one, directory in zip(runs, directories, strict=True):
        curves[one] = smooth(losses(directory), arguments.window)
        validation[one] = [row["valid_loss"] for row in rows(directory) if "valid_loss" in row][-1]
    best = {o: min(arguments.lrs, key=lambda lr, o=o: curves[o, lr][-1]) for o in OPTIMIZERS}
    target = curves["adamw", best["adamw"]][-1]
    table = [
        {
            "optimizer": optimizer,
            "lr": lr,
            "final_loss": round(curve[-1], 4),
            "validation": round(validation[optimizer, lr], 4),
            "steps_to_target": steps_to(curve, target),
            "best_of_its_optimizer": best[optimizer] == lr,
        }
        for (optimizer, lr), curve in curves.items()
    ]
    result = {
        "date": str(date.today()),
        "commit": commit_of(arguments.commit),
        "device": arguments.device,
        "command": "python benchmarks/muon_vs_adamw.py " + " ".join(sys.argv[1:]),
        "experiment": arguments.experiment,
        "window": arguments.window,
        "target": round(target, 4),
        "table": table,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    (arguments.results / f"{arguments.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    plot(arguments.results / f"{arguments.name}.png", curves, best, target)
    for row in table:
        print(row)
    print(f"target {target:.4f}")


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measure the steps and the seconds that optimizers need to AdamW's best loss: whole runs of `zaya train`.

    python benchmarks/muon_vs_adamw.py --lrs 1e-3 2e-3 4e-3 8e-3 --optimizers adamw muon torch_muon --at-once 8

Each optimizer is swept over the learning rates, but torch_muon (benchmarks/torch_muon.py), which computes Muon's update
and takes its best rate. The best run of each is then made again alone, where the sweep has run several at once. Seconds
are sums of the alone run's own times of steps. The first WARM steps, which compile, count as the median of the others.
Loss is the training loss averaged over the last `--window` steps; the target is AdamW's loss at the end of its best run.

Writes <name>.json, and <name>.png: loss over seconds. A run that is already in --work is not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

from result_record import commit_of
from training_runs import losses, rows, smooth, train

NAMES = {"adamw": "AdamW", "muon": "Muon", "torch_muon": "torch.optim.Muon"}
WARM = 20  # steps


def run(arguments: argparse.Namespace, optimizer: str, lr: float, suffix: str = "") -> Path:
    """Run one training and return its directory."""
    overrides = [
        f"experiment={arguments.experiment}",
        f"optim={'muon' if optimizer == 'torch_muon' else optimizer}",
        f"optim.lr={lr}",
        f"optim.min_lr={lr / 10}",
        *arguments.overrides,
    ]
    program = ("-m", "zaya_plugin.cli", "train")
    if optimizer == "torch_muon":
        program = ("-m", "torch.distributed.run", "--standalone", str(Path(__file__).with_name("torch_muon.py")))
    return train(arguments.work / f"{optimizer}-{lr:g}{suffix}", overrides, program)


def steps_to(curve: list[float], target: float) -> int | None:
    """Return the first step at which the curve is at most `target`."""
    return next((i + 1 for i, value in enumerate(curve) if value <= target), None)


def seconds_of(step_seconds: list[float]) -> list[float]:
    """Return the seconds from the start of the first step to the end of each; the first WARM as the others' median."""
    steady = step_seconds[WARM:]
    return list(itertools.accumulate([statistics.median(steady)] * WARM + steady))


def described(directory: Path, lr: float, window: int, target: float) -> dict:
    """Return the row of an optimizer's best run: what a step takes, when it reaches `target`, and its curve."""
    curve = smooth(losses(directory), window)
    step_seconds = [row["step_s"] for row in rows(directory) if "loss" in row]
    seconds, reached = seconds_of(step_seconds), steps_to(curve, target)
    return {
        "lr": lr,
        "step_ms": round(1e3 * statistics.median(step_seconds[WARM:]), 2),
        "final_loss": round(curve[-1], 4),
        "steps_to_target": reached,
        "seconds_to_target": None if reached is None else round(seconds[reached - 1], 2),
        "curve": [[round(seconds[i], 2), round(curve[i], 4)] for i in range(window - 1, len(curve), 5)],
    }


def plot(path: Path, alone: dict[str, dict], target: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.axhline(target, color="gray", linestyle=":")
    for optimizer, color in zip(NAMES, ("tab:blue", "tab:red", "tab:orange"), strict=True):
        if (row := alone.get(optimizer)) is not None:
            when = row["seconds_to_target"]
            label = NAMES[optimizer] + (f": {when:.1f} s to AdamW's best" if when is not None else "")
            axes.plot(*zip(*row["curve"], strict=True), color=color, linewidth=2, label=label)
            if when is not None:
                axes.plot(when, target, "o", color=color)
    axes.set_xlabel("seconds of training", fontsize=13)
    axes.set_ylabel("training loss (running mean)", fontsize=13)
    axes.tick_params(labelsize=12)
    axes.legend(fontsize=12)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", default="cpu_demo")
    parser.add_argument("--optimizers", nargs="+", choices=tuple(NAMES), default=["adamw", "muon"])
    parser.add_argument("--lrs", type=float, nargs="+", default=[1e-3, 2e-3, 4e-3, 8e-3])
    parser.add_argument("--overrides", nargs="*", default=[], help="more Hydra overrides for every run")
    parser.add_argument("--at-once", type=int, default=1, help="runs of the sweep at the same time")
    parser.add_argument("--window", type=int, default=10)
    parser.add_argument("--work", type=Path, default=Path("runs/muon_vs_adamw"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--name", default="muon_vs_adamw-cpu")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    parser.add_argument("--device", default=platform.processor() or platform.machine())
    arguments = parser.parse_args()
    if not {"adamw", "muon"} <= {*arguments.optimizers}:
        parser.error("--optimizers needs adamw, whose loss is the target, and muon, whose rate torch_muon takes")

    swept = list(itertools.product([o for o in arguments.optimizers if o != "torch_muon"], arguments.lrs))
    with ThreadPoolExecutor(arguments.at_once) as pool:
        directories = dict(zip(swept, pool.map(lambda one: run(arguments, *one), swept), strict=True))
    curves = {one: smooth(losses(directory), arguments.window) for one, directory in directories.items()}
    best = {o: min(arguments.lrs, key=lambda lr, o=o: curves[o, lr][-1]) for o, _ in swept}
    best |= {"torch_muon": best["muon"]} if "torch_muon" in arguments.optimizers else {}
    target = curves["adamw", best["adamw"]][-1]
    alone: dict[str, dict] = {}
    for optimizer, lr in sorted(best.items(), key=lambda pair: [*NAMES].index(pair[0])):  # AdamW first
        directory = run(arguments, optimizer, lr, "-alone" if arguments.at_once > 1 else "")
        target = smooth(losses(directory), arguments.window)[-1] if optimizer == "adamw" else target
        alone[optimizer] = described(directory, lr, arguments.window, target)
        table = [
            {
                "optimizer": one[0],
                "lr": one[1],
                "final_loss": round(curve[-1], 4),
                "validation": round(
                    [row["valid_loss"] for row in rows(directories[one]) if "valid_loss" in row][-1], 4
                ),
                "steps_to_target": steps_to(curve, target),
                "best_of_its_optimizer": best[one[0]] == one[1],
            }
            for one, curve in curves.items()
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
            "alone": alone,
        }
        # after every run, so that a time limit loses one
        arguments.results.mkdir(parents=True, exist_ok=True)
        (arguments.results / f"{arguments.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        plot(arguments.results / f"{arguments.name}.png", alone, target)
        print({name: value for name, value in alone[optimizer].items() if name != "curve"}, flush=True)
    for row in table:
        print(row)
    print(f"target {target:.4f}")


if __name__ == "__main__":
    main()

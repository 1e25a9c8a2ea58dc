# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis report`: what a run's time was spent on, in the terminal, as JSON, or as one HTML page."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from zaya_plugin.aegis.account import Account, account_of, figures, length
from zaya_plugin.aegis.page import page


def main(argv: list[str]) -> int:
    """Run `zaya aegis report DIR`. Return 0, or 2 for a mistake."""
    parser = argparse.ArgumentParser(
        "zaya aegis report",
        description="Sum up a supervised run from its journal: effective training time, failures and their cost.",
        epilog="example: zaya aegis report runs/zaya1_base --html report.html",
    )
    parser.add_argument("directory", metavar="DIR", help="the run_dir, or the folder of the journal")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="also write one page with a timeline; it needs no network"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    options = parser.parse_args(argv)
    found = account_of(options.directory)
    if options.html is not None:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(page(found))
    print(json.dumps(as_json(found)) if options.json else text(found))
    return 0


def as_json(found: Account) -> dict:
    """Return every figure of the report."""
    detect, recover = found.mean_seconds()
    return {
        **asdict(found),
        "wall_seconds": found.wall,
        "effective_training_time": found.effective,
        "goodput": found.goodput,
        "lost_gpu_hours": found.lost_hours(),
        "mean_seconds_to_detect": detect,
        "mean_seconds_to_recover": recover,
    }


def text(found: Account) -> str:
    """Return the report for a terminal."""
    lines = [f"{name:24} {value}" for name, value in figures(found)]
    lines += ["", f"{'GPU hours without a new step':30} {'hours':>10}"]
    lines += [f"  {cause:28} {hours:10.2f}" for cause, hours in found.lost_hours().items()]
    if found.failures:
        lines += ["", f"{'at':>9}  {'cause':22} {'where':16} {'detected':>9} {'cost':>9} {'steps':>6}  action"]
    for each in found.failures:
        where = " ".join(filter(None, (each.node, None if each.rank is None else f"rank {each.rank}"))) or "-"
        lines.append(
            f"{length(each.happened - found.begin):>9}  {each.cause:22} {where:16} "
            f"{length(each.detected - each.happened):>9} {length(found.cost(each)):>9} {each.lost_steps:6}  {each.action}"
        )
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis status`: how a supervised run is, from its journal, once or live."""

from __future__ import annotations

import argparse
import sys
import time

from zaya_plugin.aegis.account import Account, account, journal_of, length
from zaya_plugin.aegis.journal import read

SILENT_SECONDS = 600.0  # progress is written about once a minute


def main(argv: list[str]) -> int:
    """Run `zaya aegis status DIR`. Return 0: running, or ended well; 1: in trouble, or ended badly."""
    parser = argparse.ArgumentParser(
        "zaya aegis status",
        description="Show step, nodes, the last failure and what was decided. Reads the journal only.",
        epilog="exit codes: 0 running or ended well, 1 in trouble or ended badly. "
        "example: zaya aegis status runs/zaya1_base --watch",
    )
    parser.add_argument("directory", metavar="DIR", help="the run_dir, or the folder of the journal")
    parser.add_argument("--watch", action="store_true", help="show it again every 2 s until the run ends")
    options = parser.parse_args(argv)
    path = journal_of(options.directory)
    while True:
        rows = list(read(path))
        lines, code = status(account(rows), rows, time.time())
        if options.watch and sys.stdout.isatty():
            print("\x1b[2J\x1b[H", end="")
        print("\n".join(lines), flush=True)
        if not options.watch or any(row["kind"] == "end" for row in rows):
            return code
        time.sleep(2)


def status(found: Account, rows: list[dict], now: float) -> tuple[list[str], int]:
    """Return the lines to show, and the exit code."""
    moved = max((row["time"] for row in rows if row["kind"] in ("first_step", "progress")), default=None)
    quiet = now - (moved if moved is not None else found.begin)
    waiting = bool(found.attempts) and found.attempts[-1]["first"] is None
    if found.code is not None:
        state, trouble = f"ended with exit code {found.code}: {found.reason}", found.code != 0
    elif not found.attempts:
        state, trouble = "waiting for nodes", False
    elif waiting:
        state, trouble = f"starting, for {length(now - found.attempts[-1]['begin'])}", len(found.attempts) > 1
    else:
        trouble = quiet > SILENT_SECONDS
        state = f"training; last news of a step {length(quiet)} ago"
    lines = [
        f"state       {state}",
        f"step        {found.step:,}" + (f", {found.step_seconds:.3g} s each" if found.step_seconds else ""),
        f"attempt     {len(found.attempts)}, running for {length(found.wall)} in all",
    ]
    if found.attempts:
        last = found.attempts[-1]
        others = [f"{node} ({state})" for node, state in found.nodes.items() if node not in last["nodes"]]
        lines.append(f"nodes       {', '.join(last['nodes'])}" + (f"; besides {', '.join(others)}" if others else ""))
    if found.checkpoints:
        at, step = found.checkpoints[-1]
        lines.append(f"checkpoint  step {step:,}, {length(now - at)} ago")
    if found.failures:
        last = found.failures[-1]
        where = f" on {last.node}" if last.node else ""
        lines.append(
            f"failure     {last.cause}{where}, {length(now - last.happened)} ago: {last.action}. {last.reason}"
        )
    lines.append(
        f"effective   {100 * found.effective:.2f} % of the time made new steps, {len(found.failures)} failures"
    )
    return lines, int(trouble)

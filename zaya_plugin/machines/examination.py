# SPDX-License-Identifier: Apache-2.0
"""Run checks on this machine, print each result as a line of the page, and keep all of them as one record (JSON)."""

import datetime
import platform
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zaya_plugin import __version__
from zaya_plugin.bench.results import commit, write
from zaya_plugin.ground import secrets
from zaya_plugin.machines.check_process import CheckProcess
from zaya_plugin.machines.checks import STATES, Check

SCHEMA = "zaya verify/2"
# Those of the environment that a record keeps.
VARIABLES = re.compile(r"^(HSA|HIP|ROC|GPU|NCCL|RCCL|TORCH|PYTORCH|CUDA|TRITON|MIOPEN|NVTE|LD_|OMP|PRIMUS|ZAYA)")
WIDTH = 100  # of a reason on the page; the record has all of it


def header(command: str) -> dict[str, Any]:
    """Return the beginning of a record."""
    return {
        "schema": SCHEMA,
        "zaya_plugin": __version__,
        "python": secrets.cleaned(f"{platform.python_version()} {sys.executable}"),
        "platform": platform.platform(),
        "commit": commit(),
        "command": secrets.cleaned(command),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def examine(
    checks: Sequence[Check], command: str, device: str = "auto", storage: Path = Path("."), output: Path | None = None
) -> dict[str, Any]:
    """Run `checks` and return the record. output: its file, written before each check; with it each result is printed."""
    from tqdm import tqdm

    record: dict[str, Any] = header(command) | {"running": "", "machine": {}, "checks": []}

    def keep(running: str) -> None:
        record["running"] = running
        if output is not None:
            write(output, record)

    with (
        # a process that waits in the driver may still write there
        tempfile.TemporaryDirectory(prefix="zaya-verify-", ignore_cleanup_errors=True) as folder,
        # on a terminal alone
        tqdm(total=len(checks), bar_format="{l_bar}{bar:20}| {elapsed}{postfix}", leave=False, disable=None) as bar,
    ):

        def tick(text: str | None) -> None:
            if text is not None:
                bar.set_postfix_str(f"{check.name}: {text}", refresh=False)
            bar.update(0)  # drawn at most ten times a second
            if text is None:
                bar.refresh()

        process = CheckProcess(device, Path(folder), storage, tick)
        try:
            for check in checks:
                bar.set_postfix_str(check.name)
                keep(running=check.name)
                start = time.monotonic()
                outcome = process.run(check)
                seconds = round(time.monotonic() - start, 1)
                record["machine"] = process.machine or record["machine"]
                entry = {"check": check.name, "seconds": seconds, **secrets.of_data(asdict(outcome))}
                record["checks"].append(entry)
                if output is not None:
                    tqdm.write(row(entry))
                bar.update()
        finally:
            process.close()
    keep(running="")
    return record


def is_wrong(record: dict[str, Any]) -> bool:
    return any(entry["state"] == "wrong" for entry in record["checks"])


def row(entry: dict[str, Any]) -> str:
    """Return a line of the page."""
    reason = " ".join(entry["reason"].split())
    if len(reason) > WIDTH and entry["state"] == "pass":
        reason = reason[: WIDTH - 3] + "..."
    return f"{entry['state']:12}{entry['check']:22}{entry['seconds']:6.1f} s  {reason}"


def summary(record: dict[str, Any], output: Path) -> str:
    """Return the end of the page: counts, and the recipe keys that follow."""
    states = [entry["state"] for entry in record["checks"]]
    seconds = sum(entry["seconds"] for entry in record["checks"])
    machine = record["machine"]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    devices = f"{machine['devices']} x " if machine.get("devices") else ""
    lines = [f"\n{counts}, in {seconds:.0f} s on {devices}{machine.get('name', 'an unknown device')}"]
    overrides = {key: value for entry in record["checks"] for key, value in entry["overrides"].items()}
    if overrides:
        lines += ["For this machine:", "  zaya train ... " + " ".join(f"{k}={v}" for k, v in overrides.items())]
    return "\n".join([*lines, f"written: {output}, without passwords, tokens and user names; send it with a question"])


def doctor_page(record: dict[str, Any]) -> str:
    """Return the verdict, and the checks with their details."""
    count = len(problems_of(record))
    entries = (
        entry for entry in record["checks"] if entry["state"] == "wrong" and not entry["figures"].get("problems")
    )
    wrong = ", ".join(entry["check"] for entry in entries)
    known = f"{count} known problem{'s' * (count > 1)}, below" if count else "no known problem"
    known += f"; wrong: {wrong}" if wrong else ""
    lines = [
        f"training {'cannot' if is_wrong(record) else 'can'} start: {known}",
        f"zaya_plugin {record['zaya_plugin']}, Python {record['python']}, {record['platform']}",
    ]
    for entry in record["checks"]:
        lines += ["", row(entry), *(f"  {line}" for line in entry["details"])]
    return "\n".join(lines)


def problems_of(record: dict[str, Any]) -> list[dict[str, str]]:
    """Return the known problems in a record."""
    return [problem for entry in record["checks"] for problem in entry["figures"].get("problems", ())]

# SPDX-License-Identifier: Apache-2.0
"""`zaya verify`: the command line, the page and the record. No torch import."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shlex
import signal
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zaya_plugin import __version__
from zaya_plugin.ground import secrets
from zaya_plugin.ground.errors import mistake
from zaya_plugin.verify.line import STATES, Line
from zaya_plugin.verify.lines import LINES
from zaya_plugin.verify.worker import Worker

SCHEMA = "zaya verify/1"
OUT = "verify.json"
WIDTH = 100  # of a reason on the page; the record has all of it
DESCRIPTION = """\
The first hour on a new machine: examines the environment, the kernels and a short training on this machine, and says
pass, slow or wrong for each line. Every line has a size for a GPU and a small one for a CPU.

  pass     as expected
  slow     right, and slower than expected; the reason names both figures
  wrong    a wrong result, a crash or a hang; do not train before it is understood
  skipped  not possible here; the reason says what is missing

A line runs in a process of its own with a time limit, so no line can end the command. Expected rates are those of the
cluster recipes (machine.*); those of the MI300X are predictions. It examines one machine: on a cluster start it once
on every node. docs/mi300x.md says what to do with each result."""
EXAMPLES = """\
examples:
  zaya verify                                    all lines; writes verify.json, the file to send with a question
  zaya verify --list                             the lines, with their sizes
  zaya verify --only environment,rates,rms_norm --out rates.json
  srun --ntasks-per-node=1 --gpus-per-node=8 sh -c 'zaya verify --out verify-$(hostname).json'
  zaya verify --bundle runs/mine                 support-mine.tar.gz: the run's recipe, logs and metrics, verify.json,
                                                 doctor's report. Secrets are removed by patterns; look through
                                                 it before you send it. Runs no line

Exit codes: 0 no line is wrong (slow lines do not count), 1 at least one line is wrong, 2 a mistake on the command
line."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        raise mistake("zaya verify", problem=message, fix="zaya verify --help")


def main(argv: list[str]) -> int:
    """Run `zaya verify` and return its exit code; raises ValueError for a user's mistake."""
    parser = Parser(
        "zaya verify",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, default=Path(OUT), metavar="FILE", help=f"the record as JSON ({OUT})")
    parser.add_argument("--only", metavar="LINE,LINE", help="run these lines alone")
    parser.add_argument("--list", action="store_true", help="print the lines and stop")
    parser.add_argument(
        "--bundle", type=Path, metavar="RUN_DIR", help="pack a run for a question, with the record of --out, and stop"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu"),
        default="auto",
        help="cpu: examine the CPU; auto: all devices that torch finds",
    )
    options = parser.parse_args(argv)
    lines = chosen(options.only)
    if options.list:
        print("\n".join(listed(lines)))
        return 0
    check_out(options.out)
    if options.bundle is not None:
        from zaya_plugin.verify.bundle import bundle

        written = bundle(options.bundle, options.out)
        print(f"written: {written}. Secrets were removed by patterns; look through it before you send it")
        return 0
    with ended_by_signals():
        record = run(lines, options.device, options.out, shlex.join(["zaya", "verify", *argv]))
    print("\n".join(summary(record, options.out)))
    return int(any(line["state"] == "wrong" for line in record["lines"]))


def check_out(out: Path) -> None:
    """Raise ValueError where no record can be put. The record is renamed to `out`, also over /dev/null."""
    if out.exists() and not out.is_file():
        problem = "is a folder" if out.is_dir() else "is no regular file, and would be replaced by one"
        raise mistake("--out", out, problem=problem, allowed="a file, new or written before", fix=f"--out {OUT}")
    if not out.resolve().parent.is_dir():
        raise mistake("--out", out, problem="its folder does not exist", fix=f"--out {OUT}")


def chosen(only: str | None) -> list[Line]:
    """Return the lines in `only`, in the order of the page; raises ValueError for an unknown one."""
    names = list(LINES) if only is None else [name.strip() for name in only.split(",")]
    for name in names:
        if name not in LINES:
            raise mistake("--only", name, problem="no such line", allowed=", ".join(LINES), fix="zaya verify --list")
    return [line for name, line in LINES.items() if name in names]


def listed(lines: list[Line]) -> list[str]:
    return [
        f"{line.name:22}{line.does}\n{'':22}on a CPU: {line.on_cpu}; on a GPU: {line.on_gpu}; at most {line.limit_s} s"
        for line in lines
    ]


def run(lines: list[Line], device: str, out: Path, command: str) -> dict[str, Any]:
    """Run `lines`, print each result, and write the record after each; return it."""
    from tqdm import tqdm

    began = datetime.datetime.now(datetime.timezone.utc)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "zaya_plugin": __version__,
        "commit": commit(),
        "command": secrets.cleaned(command),
        "date": began.isoformat(timespec="seconds"),
        "complete": False,
        "machine": {},
        "lines": [],
    }
    with (
        # a process that waits in the driver may still write there
        tempfile.TemporaryDirectory(prefix="zaya-verify-", ignore_cleanup_errors=True) as folder,
        # on a terminal alone
        tqdm(total=len(lines), bar_format="{l_bar}{bar:20}| {elapsed}{postfix}", leave=False, disable=None) as bar,
    ):

        def tick(text: str | None) -> None:
            if text is not None:
                bar.set_postfix_str(f"{line.name}: {text}", refresh=False)
            bar.update(0)  # drawn at most ten times a second
            if text is None:
                bar.refresh()

        worker = Worker(device, Path(folder), tick)
        try:
            for line in lines:
                bar.set_postfix_str(line.name)
                start = time.monotonic()
                outcome = worker.run(line)
                seconds = time.monotonic() - start
                record["machine"] = worker.machine or record["machine"]
                result = secrets.of_data(asdict(outcome))
                record["lines"].append({"line": line.name, "seconds": round(seconds, 1), **result})
                write(out, record)
                tqdm.write(row(record["lines"][-1]))
                bar.update()
        finally:
            worker.close()
    record["complete"] = True
    write(out, record)
    return record


@contextlib.contextmanager
def ended_by_signals():
    """Leave by an exception on SIGTERM and on SIGHUP (a lost terminal), as Python does on SIGINT, so that `run` closes
    its worker and its folder. Guards (guard.py) are for signals that no program can handle.
    """

    def leave(number: int, frame) -> None:
        raise SystemExit(128 + number)

    handled = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) == signal.SIG_DFL]
    for number in handled:  # not one that nohup ignores
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def row(line: dict[str, Any]) -> str:
    """Return a line of the page."""
    reason = " ".join(line["reason"].split())
    if len(reason) > WIDTH and line["state"] == "pass":
        reason = reason[: WIDTH - 3] + "..."
    return f"{line['state']:8}{line['line']:22}{line['seconds']:6.1f} s  {reason}"


def summary(record: dict[str, Any], out: Path) -> list[str]:
    """Return the end of the page: counts, and the recipe keys that follow."""
    states = [line["state"] for line in record["lines"]]
    seconds = sum(line["seconds"] for line in record["lines"])
    machine = record["machine"]
    counts = ", ".join(f"{states.count(state)} {state}" for state in STATES)
    devices = f"{machine['devices']} x " if machine.get("devices") else ""
    lines = [f"\n{counts}, in {seconds:.0f} s on {devices}{machine.get('name', 'an unknown device')}"]
    overrides = {key: value for line in record["lines"] for key, value in line["overrides"].items()}
    if overrides:
        lines += ["For this machine:", "  zaya train ... " + " ".join(f"{k}={v}" for k, v in overrides.items())]
    return [*lines, f"written: {out}, without passwords, tokens and user names; send it with a question"]


def commit() -> str | None:
    from zaya_plugin.bench import step_record

    return step_record.commit()


def write(out: Path, record: dict[str, Any]) -> None:
    from zaya_plugin.bench import step_record

    step_record.write(out, record)

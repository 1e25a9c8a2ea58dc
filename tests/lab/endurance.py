# SPDX-License-Identifier: Apache-2.0
"""Long runs of the lab: one without a fault, in which nothing may be decided, and one with a fault every three minutes.

Effective training time is the share of the time from the first step to the end in which new steps were made. A restart
of this tiny model takes as long as Python's imports, a start of a real run as long as its load; so the median time from
an attempt's start to its first step of ten fault-free starts is subtracted for each restart, and nothing else. The raw
ratio stands beside it.
"""

from __future__ import annotations

import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.faults import hit
from tests.lab.machine import Machine
from tests.lab.stand import Stand
from tests.lab.supervised_run import Run, make_data
from zaya_plugin.aegis.account import account

NODES = ("n1", "n2", "n3")
MANY = (*NODES, "n4", "n5", "n6")
EVERY = 180.0  # seconds between two faults
STARTS = 10
SAVE = 10
FOR_EVER = 1_000_000  # steps
FIRST_SECONDS, END_SECONDS = 120.0, 120.0
UE = "amdgpu 0000:dd:00.0: amdgpu: socket: 4, die: 0, 1 new uncorrectable hardware errors detected in umc block"


def soak(machine: Machine, output: Path, minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run for `minutes` without a fault; return what was decided, which must be nothing."""
    folder = _fresh(output / "soak")
    with Stand(folder, NODES, machine.why["network"] is None) as stand:
        log = Path("/dev/kmsg") if machine.why["kernel_log"] is None else None
        run = _begin(stand, folder, machine, kernel_log=log)
        time.sleep(60 * minutes)
        asked = time.time()
        run.agents["n1"].send_signal(signal.SIGTERM)
        code = run.finish(END_SECONDS)
        journal = run.journal()
    alarms = [row for row in journal if row["kind"] in ("symptom", "diagnosis", "decision") and row["time"] < asked]
    attempts = sum(row["kind"] == "attempt" for row in journal)
    for row in alarms:
        say(f"false alarm: {row}")
    ok = not alarms and attempts == 1 and code == 75
    return {
        "ok": ok,
        "minutes": minutes,
        "steps": run.step(),
        "false_alarms": len(alarms),
        "attempts": attempts,
        "code": code,
    }


def hour(machine: Machine, output: Path, minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run for `minutes` with a fault every three; return the effective training time."""
    starts = fault_free_starts(machine, output, say)
    median = statistics.median(starts)
    folder = _fresh(output / "hour")
    with Stand(folder, MANY, machine.why["network"] is None) as stand:
        run = _begin(stand, folder, machine)
        begin, made = time.monotonic(), []
        kinds = [kind for kind in KINDS if kind is not flap or stand.network]
        while (at := EVERY * (len(made) + 0.5)) < 60 * minutes:
            time.sleep(max(0.0, begin + at - time.monotonic()))
            kind = kinds[len(made) % len(kinds)]
            node = [row for row in run.journal() if row["kind"] == "attempt"][-1]["nodes"][1]
            say(f"{(time.monotonic() - begin) / 60:5.1f} min, step {run.step()}: {kind.__name__} on {node}")
            try:
                kind(run, node)
                made.append(kind.__name__)
            except (TimeoutError, ProcessLookupError) as error:  # still starting, say
                made.append(f"{kind.__name__} failed: {error}")
        time.sleep(max(0.0, begin + 60 * minutes - time.monotonic()))
        run.agents["n1"].send_signal(signal.SIGTERM)
        code = run.finish(END_SECONDS)
        journal = run.journal()
    return {"faults": made, "starts": starts, **ratios(journal, median), "code": code} | _verdict(
        journal, made, median, code
    )


def ratios(journal: list[dict[str, Any]], start: float) -> dict[str, float]:
    """Return the effective training time from the first step on, raw and with `start` subtracted for each restart."""
    found = account(journal)
    first = next(row["time"] for row in journal if row["kind"] == "first_step")
    wall = found.begin + found.seconds - first
    restarts = sum(row["kind"] == "attempt" for row in journal) - 1
    # a start is measured up to the end of its first step, which the account counts as training
    lost = sum(failure.seconds for failure in found.failures) + restarts * (found.step_seconds or 0.0)
    return {
        "wall_seconds": round(wall, 1),
        "lost_seconds": round(lost, 1),
        "restarts": restarts,
        "median_start_seconds": round(start, 2),
        "effective_raw": round(1 - lost / wall, 4),
        "effective": round(1 - (lost - restarts * start) / (wall - restarts * start), 4),
    }


def _verdict(journal: list[dict[str, Any]], made: list[str], start: float, code: int | None) -> dict[str, Any]:
    stops = sum(row["kind"] == "decision" and row["action"] == "stop" for row in journal)
    return {"wrong_stops": stops, "ok": ratios(journal, start)["effective"] >= 0.97 and not stops and code == 75}


def fault_free_starts(machine: Machine, output: Path, say: Callable[[str], None]) -> list[float]:
    """Return the seconds from an attempt's start to its first step, of STARTS runs."""
    found = []
    for number in range(STARTS):
        folder = _fresh(output / "start")
        with Stand(folder, NODES[:2], machine.why["network"] is None) as stand:
            run = Run(stand, folder / "trial", make_data(machine.cache), steps=3)  # the warm-up takes two
            run.start()
            run.finish(FIRST_SECONDS + END_SECONDS)
            at = {row["kind"]: row["time"] for row in reversed(run.journal())}
        found.append(round(at["first_step"] - at["attempt"], 2))
        say(f"start {number + 1} of {STARTS}: {found[-1]:.1f} s")
    return found


def _begin(stand: Stand, folder: Path, machine: Machine, **options: Any) -> Run:
    # the checkpoints of an hour would fill a small disk
    words = ["checkpoint.keep_last=3"]
    run = Run(stand, folder / "trial", make_data(machine.cache), words, steps=FOR_EVER, save=SAVE, **options)
    run.start()
    run.wait_step(1, FIRST_SECONDS)
    return run


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def kill_rank(run: Run, node: str) -> None:
    hit(run.rank_pid(node))


def flap(run: Run, node: str) -> None:
    run.stand.link(node, up=False)
    time.sleep(2.0)
    run.stand.link(node, up=True)


def memory_error(run: Run, node: str) -> None:
    run.kernel(node, UE)


def kill_decider(run: Run, node: str) -> None:
    hit(run.decider_pid())


def stop_rank(run: Run, node: str) -> None:
    hit(run.rank_pid(node), signal.SIGSTOP)


def kill_agent(run: Run, node: str) -> None:
    hit(run.agent_pid(node))


def kill_node(run: Run, node: str) -> None:
    """The node is repaired: its agent is started again a minute later."""
    run.kill_node(node)
    run.agents[node].wait()
    time.sleep(60.0)
    run.again(node)


KINDS = (kill_rank, flap, memory_error, kill_decider, stop_rank, kill_agent, kill_node)

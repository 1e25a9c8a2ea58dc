# SPDX-License-Identifier: Apache-2.0
"""Long runs of the lab: one without a fault, in which nothing may be decided, and one with a fault every three minutes.

Effective training time is the share of the time from the first step to the end in which new steps were made. A restart
of this tiny model takes as long as Python's imports, a start of a real run as long as its load; so the median time from
an attempt's start to its first step of ten fault-free starts is subtracted for each restart, and nothing else. The raw
ratio is printed too.
"""

from __future__ import annotations

import signal
import statistics
import time
from pathlib import Path
from typing import Any

from tests.aegis.journals import account_of
from tests.lab.faults import send_signal
from tests.lab.machine import Machine
from tests.lab.stand import NODES, Stand, new_folder
from tests.lab.supervised_run import Run, make_data, seconds_to_first_step
from zaya_plugin.ground.exit_codes import ENDED_EARLY

NODES_OF_AN_HOUR = (*NODES, "n4", "n5", "n6")
FAULT_SECONDS = 180.0  # between two faults
STARTS = 10
SAVE_INTERVAL = 10
MAX_STEPS = 1_000_000
FIRST_SECONDS, END_SECONDS = 120.0, 120.0
UNCORRECTABLE_ERROR = (
    "amdgpu 0000:dd:00.0: amdgpu: socket: 4, die: 0, 1 new uncorrectable hardware errors detected in umc block"
)


def soak(machine: Machine, output: Path, minutes: float) -> dict[str, Any]:
    """Run for `minutes` without a fault; return the number of decisions and notices, which must be 0."""
    folder = new_folder(output / "soak")
    with Stand(folder, NODES, machine.network) as stand:
        log = Path("/dev/kmsg") if machine.reasons["kernel_log"] is None else None
        run = _begin(stand, folder, machine, kernel_log=log)
        time.sleep(60 * minutes)
        end_time = time.time()
        run.agents["n1"].send_signal(signal.SIGTERM)
        code = run.finish(END_SECONDS)
        journal = run.journal()
    alarms = [row for row in journal if row["kind"] in ("symptom", "diagnosis", "decision") and row["time"] < end_time]
    attempts = sum(row["kind"] == "attempt" for row in journal)
    for row in alarms:
        print(f"false alarm: {row}", flush=True)
    return {
        "ok": not alarms and attempts == 1 and code == ENDED_EARLY,
        "minutes": minutes,
        "steps": run.step(),
        "false_alarms": len(alarms),
        "attempts": attempts,
        "code": code,
    }


def endure(machine: Machine, output: Path, minutes: float) -> dict[str, Any]:
    """Run for `minutes` with a fault every three; return the effective training time."""
    starts = fault_free_starts(machine, output)
    median = statistics.median(starts)
    folder = new_folder(output / "hour")
    with Stand(folder, NODES_OF_AN_HOUR, machine.network) as stand:
        run = _begin(stand, folder, machine)
        begin, names = time.monotonic(), []
        faults = [fault for fault in FAULTS if fault is not flap or stand.network]
        while (seconds := FAULT_SECONDS * (len(names) + 0.5)) < 60 * minutes:
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            fault = faults[len(names) % len(faults)]
            node = [row for row in run.journal() if row["kind"] == "attempt"][-1]["nodes"][1]
            minute = (time.monotonic() - begin) / 60
            print(f"{minute:5.1f} min, step {run.step()}: {fault.__name__} on {node}", flush=True)
            try:
                fault(run, node)
                names.append(fault.__name__)
            except (TimeoutError, ProcessLookupError) as error:  # such as: the node is still starting
                names.append(f"{fault.__name__} failed: {error}")
        time.sleep(max(0.0, begin + 60 * minutes - time.monotonic()))
        run.agents["n1"].send_signal(signal.SIGTERM)
        code = run.finish(END_SECONDS)
        journal = run.journal()
    figures = ratios(journal, median)
    stops = sum(row["kind"] == "decision" and row["action"] == "stop" for row in journal)
    ok = figures["effective"] >= 0.97 and not stops and code == ENDED_EARLY
    return {"faults": names, "starts": starts, **figures, "code": code, "wrong_stops": stops, "ok": ok}


def ratios(journal: list[dict[str, Any]], start: float) -> dict[str, float]:
    """Return the effective training time from the first step on, raw and with `start` subtracted for each restart."""
    summary = account_of(journal)
    first = next(row["time"] for row in journal if row["kind"] == "first_step")
    wall = summary.begin + summary.seconds - first
    restarts = sum(row["kind"] == "attempt" for row in journal) - 1
    # a start is measured up to the end of its first step, which the account counts as training
    lost = sum(failure.seconds for failure in summary.failures) + restarts * (summary.step_seconds or 0.0)
    return {
        "wall_seconds": round(wall, 1),
        "lost_seconds": round(lost, 1),
        "restarts": restarts,
        "median_start_seconds": round(start, 2),
        "effective_raw": round(1 - lost / wall, 4),
        "effective": round(1 - (lost - restarts * start) / (wall - restarts * start), 4),
    }


def fault_free_starts(machine: Machine, output: Path) -> list[float]:
    """Return the seconds from an attempt's start to its first step, of STARTS runs."""
    starts = []
    for number in range(STARTS):
        folder = new_folder(output / "start")
        with Stand(folder, NODES[:2], machine.network) as stand:
            run = Run(stand, folder / "trial", make_data(machine.cache), steps=3)  # the warm-up takes two
            run.start()
            run.finish(FIRST_SECONDS + END_SECONDS)
            starts.append(round(seconds_to_first_step(run.journal()), 2))
        print(f"start {number + 1} of {STARTS}: {starts[-1]:.1f} s", flush=True)
    return starts


def _begin(stand: Stand, folder: Path, machine: Machine, **options: Any) -> Run:
    # the checkpoints of an hour would fill a small disk
    words = ["checkpoint.keep_last=3"]
    data = make_data(machine.cache)
    run = Run(stand, folder / "trial", data, words, steps=MAX_STEPS, save=SAVE_INTERVAL, **options)
    run.start()
    run.wait_step(1, FIRST_SECONDS)
    return run


def kill_rank(run: Run, node: str) -> None:
    send_signal(run.rank_pid(node))


def flap(run: Run, node: str) -> None:
    run.stand.link(node, up=False)
    time.sleep(2.0)
    run.stand.link(node, up=True)


def memory_error(run: Run, node: str) -> None:
    run.kernel(node, UNCORRECTABLE_ERROR)


def kill_decider(run: Run, node: str) -> None:
    send_signal(run.decider_pid())


def stop_rank(run: Run, node: str) -> None:
    send_signal(run.rank_pid(node), signal.SIGSTOP)


def kill_agent(run: Run, node: str) -> None:
    send_signal(run.agent_pid(node))


def kill_node(run: Run, node: str) -> None:
    """Kill everything of a node, and start its agent a minute later, as after a repair."""
    run.kill_node(node)
    run.agents[node].wait()
    time.sleep(60.0)
    run.start_agent(node)


FAULTS = (kill_rank, flap, memory_error, kill_decider, stop_rank, kill_agent, kill_node)

# SPDX-License-Identifier: Apache-2.0
"""The checks `graph_capture` and `all_reduce`: ranks of their own, which are killed at a time limit.
No torch import.
"""

import json
import os
import re
import signal
import sys
from typing import Any

from zaya_plugin.compat import distribution_version
from zaya_plugin.machines.check_process import run_all
from zaya_plugin.machines.checks import Outcome, Setting, end_of, last_line
from zaya_plugin.machines.expected import SLOW_BELOW, described
from zaya_plugin.machines.facts import before
from zaya_plugin.plan.expected_step import link_rate
from zaya_plugin.plan.known_machine import CPU, machine_of, recipe_of

RANK = "zaya_plugin.machines.collective_rank"
RESULT = "result.json"
CAPTURE_S, SWEEP_S = 30, 120  # from the ranks' first line of Python to their end; START_S more for torch's import
START_S = 60
GRAPHS = "cluster.graphs"
# The errors of the runtime about a capture. All have this form in HIP and CUDA; the second is their names.
REFUSED = re.compile(r"error: (operation \w[^\n]*captur[^\n]*)|((?:hip|cuda)Error(?:StreamCapture|CapturedEvent)\w*)")
REPAIRED = "2.11"  # torch, whose watchdog before that ended the process by SIGABRT where HIP refused its query


class RanksFailed(RuntimeError):
    """The ranks have failed or were killed.

    log: of the first failing rank. code: its exit code, negative for a signal; None: it was killed at the time limit.
    """

    def __init__(self, text: str, log: str, code: int | None = None):
        super().__init__(text)
        self.log, self.code = log, code


def run_ranks(part: str, setting: Setting, ranks: int, limit_s: float) -> dict[str, Any]:
    """Run `part` of collective_rank on `ranks` ranks and return rank 0's result; raises RanksFailed."""
    folder = setting.folder / part
    folder.mkdir(exist_ok=True)
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    words = [sys.executable, "-m", RANK, part, setting.device]
    commands = [[*words, str(rank), str(ranks), str(folder)] for rank in range(ranks)]
    codes = run_all(commands, logs, limit_s, together=True, environment=variables(setting))
    killed = [rank for rank, code in enumerate(codes) if code is None]
    if failed := [rank for rank, code in enumerate(codes) if code] or killed:
        rank, code = failed[0], codes[failed[0]]
        log = logs[rank].read_text(errors="replace")
        if code is None:
            raise RanksFailed(f"not done in {limit_s:.0f} s; ranks {killed} were killed", log, code)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise RanksFailed(f"rank {rank} {how}: {last_line(log)}", log, code)
    return json.loads((folder / RESULT).read_text())


def variables(setting: Setting) -> dict[str, str]:
    """Return the environment of a rank: that of the machine's cluster recipe, as in training."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONUNBUFFERED="1")
    return environment if setting.on_cpu else environment | recipe_of(setting.name).cluster.environment


def graph_capture(setting: Setting) -> Outcome:
    """Capture a graph with a collective. Where it fails, recipes run kernel by kernel: cluster.graphs=none. Where the
    machine's recipe has that, a capture that the runtime refuses with an error is "unsupported"; a hang, another signal
    and wrong sums stay wrong.

    Known problem: torch's watchdog of NCCL queries events during a capture, which HIP refuses; before torch 2.11 the
    watchdog then aborts the process (pytorch/pytorch#175377, #176942, ROCm/rccl#2022).
    """
    ranks = 2 if setting.on_cpu else min(2, setting.devices)
    expected = {"known_problem": "pytorch/pytorch#175377, #176942; ROCm/rccl#2022"}
    refused, log = None, ""
    try:
        result = run_ranks("graph_capture", setting, ranks, START_S + CAPTURE_S)
    except RanksFailed as error:
        result, log, refused = {"wrong": [str(error)]}, end_of(error.log), refusal(error)
    if result["wrong"]:
        state, overrides, advice = without_graphs(setting, refused)
        return Outcome(state, f"{result['wrong'][0]}{advice}", result, expected, overrides, log)
    text = "a CPU has no graphs; the same calls without one" if setting.on_cpu else "captured and replayed"
    return Outcome("pass", f"{text}, {ranks} rank{'s' if ranks > 1 else ''}", result, expected)


def refusal(error: RanksFailed) -> str | None:
    """Return the error by which the runtime refused the capture, with torch's version; None for another failure.

    A signal is another failure, except for the abort by the watchdog of a torch before REPAIRED.
    """
    torch = distribution_version("torch")
    aborted = error.code == -signal.SIGABRT and before(torch, REPAIRED)
    match = REFUSED.search(error.log) if aborted or (error.code or 0) > 0 else None
    return f"torch {torch}: {match[1] or match[2]}" if match else None


def without_graphs(setting: Setting, refused: str | None) -> tuple[str, dict[str, str], str]:
    """Return state, overrides and the end of the reason for a machine on which a capture fails. refused: the error by
    which it was refused, None where it failed otherwise.
    """
    if setting.on_cpu:
        return "wrong", {}, ""
    cluster = recipe_of(setting.name).cluster
    if cluster.graphs != "none":
        return "wrong", {GRAPHS: "none"}, f"; train kernel by kernel, with {GRAPHS}=none"
    recipe = f"cluster={cluster.name} has {GRAPHS}=none"
    if refused:
        return "unsupported", {}, f" ({refused}); not used: {recipe}"
    return "wrong", {}, f"; no refused capture, so it is wrong although {recipe}"


def all_reduce(setting: Setting) -> Outcome:
    """Sweep all-reduces over all devices of this machine, over two processes on a CPU."""
    ranks = 2 if setting.on_cpu else setting.devices
    try:
        result = run_ranks("all_reduce", setting, ranks, START_S + SWEEP_S)
    except RanksFailed as error:
        return Outcome("wrong", str(error), traceback=end_of(error.log))
    return judged(result, machine_of(setting.name), ranks)


def judged(measured: dict[str, Any], machine, ranks: int) -> Outcome:
    """Judge the sweep: exact sums, and the rate of the largest size."""
    wrong = [row["bytes"] for row in measured["sizes"] if not row["right"]]
    if wrong:
        return Outcome("wrong", f"wrong sums at {', '.join(f'{size:,}' for size in wrong)} bytes", measured)
    rate = measured["sizes"][-1]["gb_per_s"]
    compared = {"all_reduce_gb_per_s": {"": rate}}
    text = f"{rate:.3g} GB/s a device at {measured['sizes'][-1]['bytes'] / 2**20:.0f} MiB, "
    text += f"{1e3 * measured['sizes'][0]['ms']:.0f} us at {measured['sizes'][0]['bytes']} bytes, {ranks} ranks"
    if machine is None:
        return Outcome("pass", f"{text}; no expectation for this device", measured, described(None), compared=compared)
    required = link_rate(machine, ranks)
    slow = rate < SLOW_BELOW * required
    text += f"; expected {required:.3g} GB/s" if slow else ""
    expected = described(machine, link_gb_per_s=required, latency_us=None if machine is CPU else machine.latency_us)
    return Outcome("slow" if slow else "pass", text, measured, expected, compared=compared)

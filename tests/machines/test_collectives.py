# SPDX-License-Identifier: Apache-2.0
"""Test the checks `all_reduce` and `graph_capture` with two processes: right, wrong sums, a hang and a crash."""

import tempfile
import time
from pathlib import Path

import pytest

from zaya_plugin.machines import collectives
from zaya_plugin.machines.check_process import examine
from zaya_plugin.machines.checks import CHECKS, Outcome, Setting
from zaya_plugin.plan.known_machine import machine_of


@pytest.fixture
def setting(tmp_path):
    return Setting("cpu", 0, "CPU x86_64", tmp_path)


@pytest.fixture
def fault(monkeypatch):
    """Lets ranks run with a fault."""

    def choose(name):
        monkeypatch.setattr(collectives, "RANK", "tests.machines.faulty_rank")
        monkeypatch.setenv("ZAYA_TEST_FAULT", name)

    return choose


@pytest.mark.slow
def test_both_lines_between_two_processes(setting):
    outcome = collectives.all_reduce(setting)
    assert outcome.state == "pass" and outcome.reason.endswith("2 ranks")
    assert all(row["right"] and row["gb_per_s"] > 0 for row in outcome.figures["sizes"])
    outcome = collectives.graph_capture(setting)
    assert outcome.state == "pass" and "a CPU has no graphs" in outcome.reason and not outcome.overrides


@pytest.mark.slow
def test_sums_at_the_wrong_place_are_wrong(setting, fault):
    fault("swap")
    assert collectives.all_reduce(setting).reason == "wrong sums at 1,024, 65,536, 1,048,576, 4,194,304 bytes"
    outcome = collectives.graph_capture(setting)
    # 2 * (0 + 1) + 1 at element 0; the other half starts with 2**19 % 251 = 200
    assert outcome.state == "wrong" and outcome.reason == "replay 1: 803.0 for 3.0 at element 0"


def test_a_wrong_replay_is_wrong(monkeypatch):
    result = {"wrong": ["replay 2: 7.0 for 13.0"]}
    monkeypatch.setattr(collectives, "run_ranks", lambda *unused: result)
    outcome = collectives.graph_capture(Setting("cuda", 2, "NVIDIA H200", Path("unused")))
    assert outcome.state == "wrong" and outcome.reason.startswith("replay 2: 7.0 for 13.0; train kernel by kernel")
    result["wrong"] = []
    assert collectives.graph_capture(Setting("cuda", 2, "NVIDIA H200", Path("unused"))).state == "pass"


@pytest.mark.slow
def test_a_collective_that_hangs_is_wrong(setting, fault, monkeypatch):
    fault("hang")
    for limit in ("START_S", "CAPTURE_S"):
        monkeypatch.setattr(collectives, limit, 1)
    begin = time.monotonic()
    outcome = collectives.graph_capture(setting)
    assert outcome.state == "wrong" and outcome.reason == "not done in 2 s; ranks [0, 1] were killed"
    assert time.monotonic() - begin < 60


@pytest.mark.slow
def test_a_rank_that_aborts_is_wrong(setting, fault):
    fault("abort")
    outcome = collectives.graph_capture(setting)
    assert outcome.state == "wrong" and outcome.reason.startswith("rank 1 was killed by signal 6: watchdog thread")
    assert "capturing stream" in outcome.traceback


def test_where_a_capture_fails_the_recipe_runs_kernel_by_kernel(monkeypatch):
    def fails(*given):
        raise collectives.RanksFailed("rank 0 was killed by signal 6: watchdog", "log")

    monkeypatch.setattr(collectives, "run_ranks", fails)
    outcome = collectives.graph_capture(Setting("cuda", 8, "NVIDIA H200", Path("unused")))  # cluster.graphs=auto
    assert outcome.state == "wrong" and outcome.overrides == {"cluster.graphs": "none"} and outcome.traceback == "log"
    assert outcome.reason.endswith("; train kernel by kernel, with cluster.graphs=none")


UNUSED = [("AMD Instinct MI300X", "mi300x_8"), ("AMD Radeon Graphics", "gpu"), ("NVIDIA H100", "h100_8")]


def capture(monkeypatch, torch_release, code, log, name="AMD Instinct MI300X"):
    """Return the outcome where rank 0 writes `log` and ends with `code`, or, with None, is killed."""

    def run_all(commands, logs, *_, **__):
        for path in logs:
            path.write_text(log)
        return [code, None]

    monkeypatch.setattr(collectives, "run_all", run_all)
    monkeypatch.setattr(collectives, "distribution_version", lambda name: torch_release)
    with tempfile.TemporaryDirectory() as folder:
        return collectives.graph_capture(Setting("cuda", 8, name, Path(folder)))


REFUSAL = "operation not permitted when stream is capturing"
FRAMES = "".join(f"frame #{n}: <unknown function> + 0xdc253\n" for n in range(40))  # more than the record keeps
WATCHDOG = f"watchdog thread terminated with exception: HIP error: {REFUSAL}\n{FRAMES}"
TRACEBACK = (
    f"  with torch.cuda.graph(graph, capture_error_mode='global'):\ntorch.AcceleratorError: HIP error: {REFUSAL}"
)


@pytest.mark.parametrize(("name", "cluster"), UNUSED)
def test_a_refused_capture_that_the_recipe_does_not_use_is_unsupported(monkeypatch, name, cluster):
    """The error of a call with each torch, and the abort by the watchdog of one before 2.11."""
    for release, code, log in (
        ("2.13.0+rocm7.2", 1, TRACEBACK),
        ("2.10.0+rocm7.2", -6, WATCHDOG),
        ("2.10.0", 1, "Search for `hipErrorCapturedEvent' in the manual"),
    ):
        outcome = capture(monkeypatch, release, code, log, name)
        assert outcome.state == "unsupported" and outcome.overrides == {}, (release, code)
        assert outcome.reason.endswith(f"); not used: cluster={cluster} has cluster.graphs=none")
        assert f"(torch {release}: {'hipErrorCapturedEvent' if 'Search' in log else REFUSAL})" in outcome.reason


@pytest.mark.parametrize(
    ("release", "code", "log"),
    [
        ("2.11.0+rocm7.2", -6, WATCHDOG),  # repaired there, so this is another defect
        ("2.10.0+rocm7.2", -11, WATCHDOG),
        ("2.10.0+rocm7.2", -6, "Memory access fault by GPU node-1"),
        ("2.10.0+rocm7.2", 1, "with torch.cuda.graph(graph, capture_error_mode='global'):\nHIP error: out of memory"),
        ("2.10.0+rocm7.2", None, WATCHDOG),
    ],
)
def test_another_failure_of_a_capture_is_wrong(monkeypatch, release, code, log):
    outcome = capture(monkeypatch, release, code, log)
    assert outcome.state == "wrong" and outcome.overrides == {} and "no refused capture" in outcome.reason


@pytest.mark.parametrize(("name", "cluster"), UNUSED)
def test_wrong_sums_of_a_capture_are_wrong_where_the_recipe_has_no_graphs(monkeypatch, name, cluster):
    monkeypatch.setattr(collectives, "run_ranks", lambda *unused: {"wrong": ["replay 2: 7.0 for 13.0"]})
    outcome = collectives.graph_capture(Setting("cuda", 8, name, Path("unused")))
    assert outcome.state == "wrong" and outcome.reason.startswith("replay 2: 7.0 for 13.0; ")
    assert outcome.reason.endswith(f"although cluster={cluster} has cluster.graphs=none")


def rows(rate: float, right: bool = True) -> dict:
    return {"sizes": [{"bytes": size, "ms": 0.05, "gb_per_s": rate, "right": right} for size in (4096, 2**30)]}


@pytest.mark.parametrize(
    ("name", "ranks", "rate", "state"),
    [
        ("NVIDIA H200", 8, 330, "pass"),
        ("NVIDIA H200", 8, 200, "slow"),
        ("AMD Instinct MI300X", 8, 300, "pass"),
        ("AMD Instinct MI300X", 2, 45, "pass"),  # one link of seven
        ("AMD Instinct MI300X", 2, 30, "slow"),
        ("AMD Instinct MI355X", 2, 50, "pass"),
        ("AMD Instinct MI355X", 8, 300, "slow"),
        ("NVIDIA B300", 2, 1, "pass"),
    ],
)
def test_the_rate_is_compared_with_the_links(name, ranks, rate, state):
    outcome = collectives.judged(rows(rate), machine_of(name), ranks)
    assert outcome.state == state, outcome.reason
    assert outcome.compared == {"all_reduce_gb_per_s": {"": rate}}
    assert ("PREDICTION" in outcome.expected["kind"]) == ("MI3" in name)


def test_one_device_has_no_links():
    setting = Setting("cuda", 1, "NVIDIA H200", Path("unused"))
    assert examine(CHECKS["all_reduce"], setting) == Outcome("skipped", "one device")

# SPDX-License-Identifier: Apache-2.0
"""Hangs, and waits that are none: a compilation, a save, a stall of storage, an agent that was stopped."""

import json

import pytest

from zaya_plugin.aegis.collectors.rank_files import BUDGET, HOLD, LIMITS, WITHOUT, Progress

NODE = "n1"


class Ranks:
    """Heartbeats of ranks and a clock; polls every half second."""

    def __init__(self, folder, ranks=2, **named):
        self.folder, self.now, self.count = folder, 1000.0, ranks
        self.stall = False
        self.progress = Progress(NODE, folder, stalled=lambda: self.stall, proc=folder / "proc", **named)

    def beat(self, rank, step, phase="train", seconds=1.0, pid=None):
        values = {"pid": pid or 100 + rank, "phase": phase, "step": step, "time": self.now}
        values |= {"step_seconds": seconds, "busy_seconds": 0.5, "loss": 2.0}
        (self.folder / f"rank{rank}.json").write_text(json.dumps(values).ljust(255) + "\n")

    def train(self, steps, seconds=1.0, first=1):
        found = []
        for step in range(first, first + steps):
            for rank in range(self.count):
                self.beat(rank, step, seconds=seconds)
            found += self.wait(seconds)
        return found

    def wait(self, seconds):
        found = []
        interval = 0.5 if seconds < 100 else 2.0
        for _ in range(max(1, round(seconds / interval))):
            self.now += interval
            found += self.progress.poll(self.now)
        return found

    def state(self, rank, letter):
        path = self.folder / "proc" / str(100 + rank)
        path.mkdir(parents=True, exist_ok=True)
        (path / "stat").write_text(f"{100 + rank} (py) thon) {letter} 1 1 1")


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_steps_that_vary_within_the_budget_are_no_hang(ranks):
    assert ranks.train(30) + ranks.train(1, first=31, seconds=4.0) + ranks.train(5, first=32) == []
    assert ranks.progress.budget() == BUDGET * 4.0


def test_a_hang_is_reported_once_and_before_two_budgets(ranks):
    ranks.train(10, seconds=4.0)
    ranks.state(0, "S"), ranks.state(1, "D")
    budget = ranks.progress.budget()
    assert budget == 12.0 and ranks.wait(WITHOUT * budget - 5.0) == []
    (hang,) = ranks.wait(0.5 * budget)
    assert (hang.rule, hang.rank, hang.node, hang.source) == ("hang", 1, NODE, "progress")
    assert (
        hang.values["suspects"] == [1] and hang.values["states"] == {0: "S", 1: "D"} and hang.values["ranks"] == [0, 1]
    )
    assert hang.text == "no step for 18 s in phase train after step 10; ranks [1] differ (state D)"
    assert hang.time == pytest.approx(ranks.now - hang.values["idle"], abs=0.5 * budget)
    assert ranks.wait(100) == []


def test_the_next_hang_is_reported_too(ranks):
    ranks.train(10)
    assert len(ranks.wait(20)) == 1
    ranks.train(5, first=11)
    assert len(ranks.wait(20)) == 1


def test_without_a_difference_no_rank_is_named_and_behind_by_a_step_one_is(ranks):
    ranks.train(10)
    ranks.state(0, "S"), ranks.state(1, "S")
    (hang,) = ranks.wait(20)
    assert hang.rank is None and hang.values["suspects"] == []
    ranks.progress.watch(ranks.folder)
    ranks.train(10)
    ranks.beat(0, 11)
    (hang,) = ranks.wait(20)
    assert hang.rank == 1 and hang.values["steps"] == {0: 11, 1: 10}


@pytest.mark.parametrize("phase", sorted(LIMITS))
def test_other_phases_have_minutes(ranks, phase):
    ranks.train(10)
    ranks.beat(0, 10, phase), ranks.beat(1, 10, phase)
    assert ranks.wait(LIMITS[phase] - 2) == []
    (hang,) = ranks.wait(5)
    assert hang.values["phase"] == phase


@pytest.mark.parametrize("phase", ["warm_up", "save", "train"])
def test_a_stopped_rank_is_reported_in_any_phase(ranks, phase):
    for rank in (0, 1):
        ranks.beat(rank, 5, phase, seconds=40.0)
        ranks.state(rank, "S")
    assert ranks.wait(60) == []
    ranks.state(1, "T")
    (hang,) = ranks.wait(1)
    assert (hang.rank, hang.values["suspects"], hang.values["ranks"]) == (1, [1], [1])


def test_a_slow_first_step_is_the_measure_until_the_second(ranks):
    for rank in (0, 1):
        ranks.beat(rank, 0, "warm_up", seconds=None)
    assert ranks.wait(120) == []
    for rank in (0, 1):
        ranks.beat(rank, 1, seconds=40.0)
    assert ranks.wait(WITHOUT * BUDGET * 40 - 2) == [] and len(ranks.wait(5)) == 1


def test_a_stall_of_storage_holds_a_hang_back_but_not_for_ever(ranks):
    ranks.train(10)
    ranks.stall = True
    assert ranks.wait(300) == []
    ranks.stall = False
    assert ranks.wait(4) == []  # the time limit begins again
    ranks.train(3, first=11)
    ranks.stall = True
    assert ranks.wait(HOLD) == [] and len(ranks.wait(30)) == 1


def test_time_in_which_the_agent_was_stopped_does_not_count(ranks):
    ranks.train(10)
    ranks.now += 3600
    assert ranks.wait(0.5) == []


def test_a_rank_without_a_heartbeat_counts_only_where_one_is_expected(tmp_path):
    silent = Ranks(tmp_path)
    assert silent.wait(LIMITS["start"] + 10) == []
    silent.progress.watch(tmp_path, expected=(0, 1))
    (hang,) = silent.wait(LIMITS["start"] + 10)
    assert hang.values["phase"] == "start" and hang.values["ranks"] == [0, 1] and hang.values["states"][0] == "X"


@pytest.mark.parametrize("content", ["", "{", "[]", '{"step": "x", "phase": "train"}', "\x00" * 256, '{"step": 1}'])
def test_a_line_that_cannot_be_read_is_no_news(ranks, content):
    ranks.train(10)
    (ranks.folder / "rank0.json").write_text(content)
    (ranks.folder / "rankx.json").write_text("{}")
    assert ranks.wait(3) == []
    (hang,) = ranks.wait(6)
    assert hang.values["steps"] == {0: 10, 1: 10}


def test_the_steps_of_the_next_stage_may_be_far_longer(ranks):
    """The ranks of a curriculum's stage are new processes, whose steps count from 1 again."""
    found = ranks.train(60)
    for rank in range(2):
        ranks.beat(rank, 0, phase="start", pid=200 + rank)
    found += ranks.wait(60)
    for step in (1, 2, 3):
        for rank in range(2):
            ranks.beat(rank, step, phase="train", seconds=10.0, pid=200 + rank)
        found += ranks.wait(10.0)
    assert found == [] and ranks.progress.budget() == BUDGET * 10.0
    assert [each.rule for each in ranks.wait(2 * BUDGET * 10.0)] == ["hang"]

# SPDX-License-Identifier: Apache-2.0
"""A guest tells the supervisor of its node the phases and steps of the host's loop."""

import argparse
import json

import pytest

from zaya_plugin.hosts import guest
from zaya_plugin.hosts.guest import GuestHeartbeat
from zaya_plugin.patches.hooks import HOOKS
from zaya_plugin.training import heartbeat


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(heartbeat, "_beat", None)
    monkeypatch.setenv(heartbeat.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


class Clock:
    """Stands in for the module `time`: only `sleep` passes any."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(guest, "time", clock)
    return clock


def told(folder):
    beat = json.loads((folder / "rank3.json").read_text())
    return beat["phase"], beat["step"]


def test_the_phases_and_steps_of_the_hosts_loop(folder, clock):
    args = argparse.Namespace(rank=3, curr_iteration=None)
    guest = GuestHeartbeat(args, resumed_at=5)
    assert told(folder) == ("build", 5)
    seen = []

    def loop():
        seen.append(told(folder))
        for done in (5, 6, 9):  # the host leaves out two steps
            args.curr_iteration = done
            guest.train_step(clock.sleep, 0.25)
            seen.append(told(folder))
        guest.evaluate(lambda: seen.append(told(folder)))
        seen.append(told(folder))
        return "found"

    assert guest.train(loop) == "found"
    train = [("train", step) for step in (6, 7, 10)]
    assert seen == [("warm_up", 5), *train, ("validate", 10), ("train", 10)] and told(folder) == ("end", 10)
    assert json.loads((folder / "rank3.json").read_text())["step_seconds"] == 0.25


def test_steps_count_from_the_checkpoint_in_a_host_that_does_not_name_them_and_a_validation_is_no_step(folder, clock):
    guest = GuestHeartbeat(argparse.Namespace(rank=3), resumed_at=8)
    guest.train(lambda: [guest.train_step(lambda: None), guest.evaluate(lambda: clock.sleep(0.25))])
    guest.train_step(lambda: None)
    assert told(folder)[1] == 10 and guest.before is not None
    assert json.loads((folder / "rank3.json").read_text())["step_seconds"] == 0


def test_nothing_of_the_host_is_replaced_without_a_supervisor(folder, monkeypatch):
    assert {name for name, _ in GuestHeartbeat(argparse.Namespace(rank=3), 0).hooks()} <= set(HOOKS)
    monkeypatch.setattr(heartbeat, "_beat", None)
    monkeypatch.delenv(heartbeat.FOLDER_VARIABLE)
    assert GuestHeartbeat(argparse.Namespace(rank=3), 0).hooks() == []

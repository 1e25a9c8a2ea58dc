# SPDX-License-Identifier: Apache-2.0
"""Steps are reported when their numbers arrive: in order, all of them, without a wait in the loop. An incomplete copy
simulates a late device.
"""

import pytest
import torch

from zaya_plugin.optim.chained import HostCopy
from zaya_plugin.training import step_queue
from zaya_plugin.training.loss_guard import RollBackError
from zaya_plugin.training.step_queue import AgreedSignal, StepClock, StepQueue


class LateCopy(HostCopy):
    """A copy from a GPU that has not reached it yet; counts waits."""

    waits, arrived = 0, set()

    def __init__(self, tensors):
        super().__init__(tensors)
        self.number = int(tensors[0])

    @property
    def is_complete(self):
        return self.number in self.arrived

    def read(self):
        LateCopy.waits += not self.is_complete
        return self._copies


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setattr(step_queue, "HostCopy", LateCopy)
    monkeypatch.setattr(LateCopy, "waits", 0)
    monkeypatch.setattr(LateCopy, "arrived", set())
    return LateCopy


def add(queue, number, seen):
    queue.add(number, [torch.tensor(number)], lambda tensors: seen.append(tensors[0].item()))


def test_on_the_cpu_a_step_is_reported_at_once():
    queue, seen = StepQueue(), []
    source = torch.tensor(3)
    queue.add(1, [source], lambda tensors: seen.append(tensors[0].item()))
    assert seen == [3]


def test_a_save_waits_for_the_numbers_of_its_own_step_alone(late):
    queue, seen = StepQueue(), []
    add(queue, 1, seen)
    queue.flush(until=1)
    assert seen == [1] and late.waits == 1
    add(queue, 2, seen)
    queue.flush(until=1)  # a wait for step 2 would leave the device without work
    assert seen == [1] and late.waits == 1


def test_a_step_is_reported_one_later_and_in_order(late):
    queue, seen = StepQueue(), []
    for number in range(1, 5):
        add(queue, number, seen)
        assert seen == list(range(1, number))  # all but the one that is under way
        late.arrived.add(number)
    assert late.waits == 0
    queue.flush()
    assert seen == [1, 2, 3, 4] and late.waits == 0
    queue.flush()
    assert seen == [1, 2, 3, 4]


def test_polling_reports_what_is_there_and_waits_for_nothing(late):
    queue, seen = StepQueue(), []
    add(queue, 1, seen)
    queue.poll()
    assert seen == []
    late.arrived.add(1)
    queue.poll()
    assert seen == [1] and late.waits == 0


def test_at_the_end_what_is_under_way_is_waited_for(late):
    queue, seen = StepQueue(), []
    add(queue, 1, seen)
    queue.flush()
    assert seen == [1] and late.waits == 1


def test_a_copy_keeps_what_was_there():
    source = torch.arange(3)
    copy = HostCopy([source])
    source.zero_()
    assert copy.is_complete and copy.read()[0].tolist() == [0, 1, 2]


def test_the_clock_counts_from_step_to_step_without_what_lies_between(monkeypatch):
    times = iter([100.0, 103.0, 150.0, 154.0])
    monkeypatch.setattr(step_queue.time, "perf_counter", lambda: next(times))
    clock = StepClock(on_device=False)
    clock.restart()  # before the first step: nothing to do
    first = clock.lap(lambda: 12.5)
    second = clock.lap(lambda: pytest.fail("the beginning of this step was seen"))
    clock.restart()  # a validation
    third = clock.lap(lambda: pytest.fail("the beginning of this step was seen"))
    assert (first(), second(), third()) == (12.5, 3.0, 4.0)


class Handler:
    """Megatron's, before the signal has come."""

    _signal_received = False


@pytest.fixture
def one_rank(tmp_path):
    if not torch.distributed.is_initialized():
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def test_all_ranks_hear_of_a_signal(one_rank):
    handler = Handler()
    signal = AgreedSignal(handler, "cpu")
    assert signal.signals_received() == [0] and signal.since is None
    handler._signal_received = True
    assert signal.signals_received() == [1]


def test_a_signal_counts_once_all_ranks_agree_on_it_and_from_when_it_was_noticed(one_rank, monkeypatch):
    """On a GPU the answer is that of the step before. A rank that acted on its own signal at once would be alone in the
    collective of a save.
    """
    times = iter([100.0, 101.0, 102.0])
    monkeypatch.setattr(step_queue.time, "monotonic", lambda: next(times))
    full = torch.full
    monkeypatch.setattr(torch, "full", lambda *a, device, **named: full(*a, **named))
    handler = Handler()
    signal = AgreedSignal(handler, "cuda")
    assert signal.signals_received() == [0]
    handler._signal_received = True
    assert signal.signals_received() == [0] and signal.since is None
    assert signal.signals_received() == [1] and signal.since == 100.0


def test_all_ranks_hear_of_a_roll_back(one_rank):
    first_spiked = 0
    signal = AgreedSignal(Handler(), "cpu", spiked=lambda: first_spiked)
    assert signal.signals_received() == [0]
    first_spiked = 12_345
    with pytest.raises(RollBackError) as asked:
        signal.signals_received()
    assert asked.value.first_step == 12_345 and asked.value.exit_code == 76


def test_a_roll_back_comes_before_a_save_that_a_signal_asks_for(one_rank):
    handler = Handler()
    handler._signal_received = True
    with pytest.raises(RollBackError):
        AgreedSignal(handler, "cpu", spiked=lambda: 3).signals_received()


def test_the_seconds_until_the_gradients_are_those_of_this_rank(monkeypatch):
    times = iter([103.0, 104.5, 107.0, 110.0])
    monkeypatch.setattr(step_queue.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(step_queue.heartbeat, "is_on", lambda: True)
    clock = StepClock(on_device=False)
    assert clock.until_gradients()() is None  # the start of the first step was not seen
    clock.lap(lambda: 12.5)
    clock.gradients_ready()
    busy, whole = clock.until_gradients(), clock.lap(lambda: 0.0)
    assert (busy(), whole()) == (1.5, 4.0)
    assert clock.until_gradients()() is None  # a step that is one graph does not come by
    monkeypatch.setattr(step_queue.heartbeat, "is_on", lambda: False)
    clock.gradients_ready()
    assert next(times) == 110.0  # without a supervisor the clock is not even read

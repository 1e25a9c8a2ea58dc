# SPDX-License-Identifier: Apache-2.0
"""Collectors in their threads: order, deadlines, failures, programs that hang."""

import sys
import threading
import time

import pytest

from zaya_plugin.aegis.collectors import runner
from zaya_plugin.aegis.collectors.runner import Collector, Collectors, Growth, Tool


class Counting(Collector):
    name, interval, deadline = "counting", 0.01, 60.0
    polls = 0

    def poll(self, now):
        self.polls += 1
        return [self.evidence(now, "link_flap", "a line", interface="a")]


class Blocking(Collector):
    name, interval, deadline = "blocking", 0.01, 0.05

    def __init__(self, node):
        super().__init__(node)
        self.end, self.polls = threading.Event(), 0

    def poll(self, now):
        self.polls += 1
        self.end.wait(30)
        return []


class Broken(Collector):
    name, interval, deadline = "broken", 0.01, 60.0

    def poll(self, now):
        raise KeyError("ecc")


def drained(collectors, until, seconds=60.0):
    found, end = [], time.monotonic() + seconds
    while not until(found) and time.monotonic() < end:
        found += collectors.drain()
        time.sleep(0.005)
    return found


def test_one_that_blocks_is_reported_once_and_does_not_stop_the_others():
    blocking = Blocking("n1")
    collectors = Collectors([blocking, Counting("n1")])
    found = drained(collectors, lambda found: sum(e.rule == "link_flap" for e in found) > 20)
    late = [e for e in found if e.rule == "collector_late"]
    assert [(e.node, e.source, e.values) for e in late] == [("n1", "agent", {"collector": "blocking"})]
    assert late[0].text == "collector blocking does not answer for 0.05 s" and blocking.polls == 1
    blocking.end.set()
    assert drained(collectors, lambda _: blocking.polls > 1) is not None and blocking.polls > 1
    collectors.close()


def test_a_failure_is_reported_once_and_the_polls_go_on():
    collectors = Collectors([Broken("n1"), Counting("n1")])
    found = drained(collectors, lambda found: sum(e.rule == "link_flap" for e in found) > 20)
    collectors.close()
    failed = [e.text for e in found if e.rule == "collector_late"]
    assert failed == ["collector broken has failed: KeyError: 'ecc'"]


def test_evidence_that_waits_too_long_is_dropped_and_counted(monkeypatch):
    monkeypatch.setattr(runner, "MAX_EVIDENCE", 5)
    counting = Counting("n1")
    collectors = Collectors([counting])
    end = time.monotonic() + 60
    while counting.polls < 8 and time.monotonic() < end:
        time.sleep(0.01)
    collectors.close()
    dropped, *kept = collectors.drain()
    assert counting.polls >= 8 and len(kept) == 5
    count = dropped.values["dropped"]
    assert dropped.text == f"{count} pieces of evidence of collectors were dropped, because too many waited"
    assert count >= 3 and collectors.drain() == []


def test_only_growth_from_the_first_value_counts():
    growth = Growth()
    assert [growth.of("a", value) for value in (7, 7, 9, 3, 4)] == [0, 0, 2, 0, 1]
    assert [growth.of("b", value, least=10) for value in (100, 106, 111, 112)] == [0, 0, 11, 0]


def test_a_program_that_hangs_is_left_alone_and_not_started_again(tmp_path):
    count = tmp_path / "count"
    code = f"open({str(count)!r}, 'a').write('x'); import time; time.sleep(600)"
    tool = Tool(0.5)
    with pytest.raises(TimeoutError, match="does not end in 0.5 s"):
        tool.output(sys.executable, "-I", "-S", "-c", code)
    stuck, tool._hanging = tool._hanging, Alive()
    assert tool.output(sys.executable, "-I", "-S", "-c", code) is None
    tool._hanging = stuck
    stuck.wait(60)
    assert not count.exists() or count.read_text() == "x"  # it may have been killed before its first line
    tool.seconds = 60
    assert tool.output(sys.executable, "-I", "-S", "-c", "print(5)") == "5\n"


class Alive:
    """A process in state D."""

    def poll(self):
        return None


def test_absent_and_failing_programs_have_no_output():
    assert Tool(60).output("no-such-program-of-zaya") is None
    assert Tool(60).output(sys.executable, "-I", "-S", "-c", "raise SystemExit(3)") is None

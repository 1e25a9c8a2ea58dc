# SPDX-License-Identifier: Apache-2.0
"""Lines about a start: a phase that is long is named once, a short one and other ranks' are not."""

import io

import pytest

from zaya_plugin.ground import phases


@pytest.fixture
def console(monkeypatch):
    out = io.StringIO()
    phases.show(out)
    yield out
    phases.show(None)


def test_a_long_phase_is_one_line_and_a_short_one_none(console, monkeypatch):
    phases.begin("short")
    phases.begin("ends at once")
    phases.end()
    monkeypatch.setattr(phases, "QUIET_SECONDS", 0.0)
    phases.begin("building the model")
    phases._timer.join(60)
    phases.end()
    assert console.getvalue() == "zaya: building the model\n"
    phases.show(None)
    phases.begin("of another rank")
    assert phases._timer is None


def test_a_console_that_is_gone_ends_no_start(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    phases._print(Gone(), "opening the data")

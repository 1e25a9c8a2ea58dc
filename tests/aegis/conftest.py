# SPDX-License-Identifier: Apache-2.0
"""A decider for the tests of its parts."""

import pytest

from tests.aegis.lone_decider import Wire, peer_of
from zaya_plugin.aegis.decider import Decider
from zaya_plugin.aegis.protocol import Join
from zaya_plugin.aegis.settings import Settings

COMMAND = ("zaya", "train", "experiment=cpu_demo", "resume=never", "data.skip_steps=[5]")


@pytest.fixture
def decider(tmp_path, monkeypatch):
    """Two nodes of a rank each that train, and a spare."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = Settings(COMMAND, "rank", "n1", 2, 1, (2,), 1, tmp_path, "h", 1, skip_steps=("5",))
    decider = Decider(settings, b"s" * 32, None)
    for number, node in enumerate(("n1", "n2", "n3")):
        decider.peers.join(Wire(), Join(0, node, f"10.0.0.{number}", 0, [number], {}))
    decider.attempt.order = ("n1", "n2")
    decider.attempt.start(29500)
    peer_of(decider, "n3").running = set()
    decider.watch()
    yield decider
    decider.record.journal.close()

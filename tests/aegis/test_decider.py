# SPDX-License-Identifier: Apache-2.0
"""Several nodes: spares, lost nodes, strangers, and a decider that starts again at any point."""

import signal
import socket

import pytest

from tests.aegis.toy_run import ToyRun, kill
from zaya_plugin.aegis import link

UE = "[  12.0] amdgpu 0000:dd:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!\n"


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_node_that_is_gone(tmp_path):
    with ToyRun(tmp_path, steps=None, ranks=1).start("n1", "n2", nodes=2, spares=1) as run:
        run.wait_for(lambda: run.rows("attempt"))
        run.start("n3", nodes=2, spares=1)
        run.wait_for(lambda: len(run.rows("node")) == 3 and run.rows("first_step"))
        kill(run.nodes["n2"].pid)
        run.wait_for(lambda: len(run.rows("attempt")) == 2)
        decision = run.rows("decision")[0]
        assert (decision["action"], decision["nodes_out"]) == ("exchange", ["n2"])
        first, second = (row["nodes"] for row in run.rows("attempt"))
        assert second == ["n3" if node == "n2" else node for node in first]  # its ranks have the same numbers
        run.release()
        assert run.end() == 0
        assert (run.folder / "failing_nodes.txt").read_text() == "n2\n"


@pytest.mark.slow
def test_sure_evidence_of_the_kernel_exchanges_the_node_while_its_ranks_still_run(tmp_path):
    (tmp_path / "kernel").touch()
    with ToyRun(tmp_path, steps=None, ranks=1).start("n1", "n2", nodes=1, spares=1) as run:
        run.wait_for(lambda: len(run.rows("node")) == 2 and run.rows("first_step"))
        with open(tmp_path / "kernel", "a") as kernel:  # both nodes of this machine read it; one of them trains
            kernel.write(UE)
        run.wait_for(lambda: len(run.rows("attempt")) == 2)
        run.release()
        assert run.end() == 0
        said, decision = run.rows("diagnosis")[0], run.rows("decision")[0]
        assert (said["cause"], said["confidence"], decision["action"]) == ("ras_ue", "sure", "exchange")
        assert run.rows("attempt")[1]["nodes"] != run.rows("attempt")[0]["nodes"]


@pytest.mark.slow
def test_fewer_nodes_train_on_where_that_is_allowed_and_a_node_that_returns_waits(tmp_path):
    with ToyRun(tmp_path, steps=None, ranks=1, options=("--min-nodes", "1")).start("n1", "n2", nodes=2) as run:
        run.wait_for(lambda: run.rows("first_step"))
        kill(run.nodes["n2"].pid)
        run.wait_for(lambda: len(run.rows("attempt")) == 2)
        assert [row["action"] for row in run.rows("decision")] == ["shrink"]
        assert [row["world_size"] for row in run.rows("attempt")] == [2, 1]
        run.start("n2", nodes=2)
        run.wait_for(lambda: [row for row in run.rows("node") if (row["node"], row["state"]) == ("n2", "back")])
        run.release()
        assert run.end() == 0
        assert len(run.rows("attempt")) == 2


@pytest.mark.slow
def test_strangers_change_nothing(tmp_path):
    with ToyRun(tmp_path, steps=None, ranks=1).start("n1") as run:
        run.wait_for(lambda: run.rows("attempt"))
        for first in (b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 100_000, b"zaya-aegis-1 " + b"0" * 32 + b"\n{}\n"):
            with socket.create_connection(("127.0.0.1", run.port)) as sock:
                sock.sendall(first)
                sock.settimeout(60)
                while sock.recv(1000):  # until the decider closes
                    pass
        wrong = link.Link(socket.create_connection(("127.0.0.1", run.port)), b"w" * 32, server=False)
        wrong.send({"kind": "join", "node": "n1"})
        run.wait_for(lambda: "wrong secret" in (tmp_path / "n1.out").read_text())
        run.release()
        assert run.end() == 0
        assert len(run.rows("attempt")) == 1


@pytest.mark.slow
def test_a_decider_killed_between_decision_and_next_attempt_carries_it_out(tmp_path):
    with ToyRun(tmp_path, [[15, 0, 0, "kill", signal.SIGKILL]], steps=40, ranks=1) as run:
        run.start("n1")
        run.wait_for(lambda: run.rows("decision"))
        kill(run.child("n1", "decider"))
        run.wait_for(lambda: len(run.rows("attempt")) == 2)
        assert [row["generation"] for row in run.rows("attempt")][:2] == [1, 2]
        assert run.end() == 137  # the same failure at each attempt: the run stops
        assert [row["action"] for row in run.rows("decision")].count("stop") == 1


@pytest.mark.slow
def test_a_run_that_has_ended_can_be_started_again_in_the_same_folder(tmp_path):
    with ToyRun(tmp_path, [[5, 0, 1, "exit", 2]], steps=20, ranks=1).start("n1") as run:
        assert run.end() == 2
        run.start("n1")
        assert run.end() == 0
        assert [row["generation"] for row in run.rows("attempt")] == [1, 2]
        assert (run.folder / "attempt_1" / "rank0.log").exists()

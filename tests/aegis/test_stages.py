# SPDX-License-Identifier: Apache-2.0
"""`zaya curriculum --only` under the supervisor, on two "nodes" of this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.aegis.journals import lines
from tests.aegis.toy_run import free_port
from tests.running import MICRO, kill_supervised_rank

STEPS = ("stage.train_iters=60", "checkpoint.save_interval=10", "stage.eval_interval=60")
WORDS = (*MICRO, *STEPS, "nproc=1", "handover.continuous_lr=false")


def rows(run_dir: Path, kind: str) -> list[dict]:
    return lines(run_dir / "aegis" / "journal.jsonl", kind)


@pytest.mark.slow
def test_two_stages_on_two_nodes_and_a_killed_rank(tmp_path, corpus):
    command = ("zaya", "curriculum", *WORDS, f"data.path={corpus}", f"run_dir={tmp_path / 'run'}", "--only")
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    first, second = (tmp_path / "run" / stage for stage in ("demo_1", "demo_2"))
    for stage in (first, second):
        options = ["--nodes", "2", "--decider", f"127.0.0.1:{free_port()}"]
        log = tmp_path / f"{stage.name}.log"
        nodes = []
        try:
            for node in ("n1", "n2"):
                with log.open("a") as out:
                    words = [sys.executable, "-m", "zaya_plugin.cli", "aegis", "run", "--node", node, *options, "--"]
                    nodes.append(
                        subprocess.Popen([*words, *command, stage.name], env=environment, stdout=out, stderr=out)
                    )
            if stage is second:
                kill_supervised_rank(nodes[0], tmp_path, 1, 14, log)
            assert [node.wait(200) for node in nodes] == [0, 0], log.read_text()
        finally:
            for node in nodes:
                node.terminate()
    assert [row["after"] for row in rows(first, "first_step")] == [0]
    (diagnosis,) = rows(second, "diagnosis")
    assert (diagnosis["cause"], diagnosis["node"], diagnosis["rank"]) == ("sigkill", "n2", 1)
    resumed = rows(second, "attempt")[1]["resume_step"]
    assert resumed >= 10 and rows(second, "first_step")[1]["after"] == resumed
    steps = [json.loads(line)["step"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(61))  # 0: the validation before the first step

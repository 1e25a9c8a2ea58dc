# SPDX-License-Identifier: Apache-2.0
"""`zaya curriculum --only` under the supervisor, on two "nodes" of this machine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.aegis.toy_run import free_port
from tests.running import MICRO

STEPS = (
    "stage.train_iters=60",
    "checkpoint.save_interval=10",
    "stage.eval_interval=60",
    "nproc=1",
    "handover.continuous_lr=false",
)


def rows(run_dir: Path, *kinds: str) -> list[dict]:
    lines = (run_dir / "aegis" / "journal.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] in kinds]


@pytest.mark.slow
def test_two_stages_on_two_nodes_and_a_killed_rank(tmp_path, corpus):
    words = ("zaya", "curriculum", *MICRO, *STEPS, f"data.path={corpus}", f"run_dir={tmp_path / 'run'}", "--only")
    program = [sys.executable, "-m", "zaya_plugin.cli", "aegis", "run", "--nodes", "2"]
    environment = {
        **os.environ,
        "TMPDIR": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    for stage, kill in (("demo_1", False), ("demo_2", True)):
        decider = f"127.0.0.1:{free_port()}"
        logs = [tmp_path / f"{stage}.{node}.log" for node in ("n1", "n2")]
        nodes = []
        try:
            for log in logs:
                node = log.suffixes[-2].lstrip(".")
                with log.open("w") as out:
                    nodes.append(
                        subprocess.Popen(
                            [*program, "--node", node, "--decider", decider, "--", *words, stage],
                            env=environment,
                            stdout=out,
                            stderr=subprocess.STDOUT,
                        )
                    )
            if kill:
                deadline, beat = time.monotonic() + 200, {}
                while beat.get("step", 0) < 14:
                    assert nodes[0].poll() is None and time.monotonic() < deadline, logs[0].read_text()
                    time.sleep(0.02)
                    for path in tmp_path.glob("zaya_aegis_*_n2/rank1.json"):
                        with contextlib.suppress(ValueError):  # it is just being made
                            beat = json.loads(path.read_text())
                os.kill(beat["pid"], signal.SIGKILL)
            assert [node.wait(200) for node in nodes] == [0, 0], logs[0].read_text()
        finally:
            for node in nodes:
                node.terminate()
    second = tmp_path / "run" / "demo_2"
    assert [row["after"] for row in rows(tmp_path / "run" / "demo_1", "first_step")] == [0]
    (diagnosis,) = rows(second, "diagnosis")
    assert (diagnosis["cause"], diagnosis["node"], diagnosis["rank"]) == ("sigkill", "n2", 1)
    resumed = rows(second, "attempt")[1]["resume_step"]
    assert resumed >= 10 and rows(second, "first_step")[1]["after"] == resumed
    steps = [json.loads(line)["step"] for line in (second / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == list(range(61))  # 0: the validation before the first step

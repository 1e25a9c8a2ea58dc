# SPDX-License-Identifier: Apache-2.0
"""Test how often the host waits for the GPU in a training step: once, for the gradient norm, while the update runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITS = {"zaya_plugin/optim/chained.py:read calls synchronize"}


def test_a_step_waits_once(tmp_path, record_property):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.hosts.host_reads",
            str(tmp_path),
            "cluster=gpu",
            "model.kv_channels=128",
            "model.hidden_size=256",
            "model.moe_ffn_hidden_size=256",
            "cluster.kernels=triton",
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    steps = json.loads((tmp_path / "host_reads.json").read_text())
    record_property("steps", steps)
    print(json.dumps(steps, indent=1))
    for found in steps[3:-1]:  # after compilation, self-checks and the first tables; a checkpoint follows the last
        assert set(found) <= WAITS, found
        assert sum(found.values()) <= 1, found  # the norm's; what the step before left has arrived by then
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9)) and all(row["step_s"] > 0 for row in rows)

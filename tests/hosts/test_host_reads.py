# SPDX-License-Identifier: Apache-2.0
"""Where the host reads tensors in a training step: nothing that would wait for a device (tests/gpu/test_host_waits.py
counts there).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Of tensors that are on the host already: the report, its row, the loss scale; and what only a CPU's AdamW reads.
ON_THE_HOST = {
    "zaya_plugin/hosts/pretrain.py:report": 1,
    "zaya_plugin/training/metrics.py:_row": 5,
    "megatron/training/training.py:train": 1,
}
ON_A_CPU = {"zaya_plugin/optim/muon.py:step", "zaya_plugin/optim/muon.py:update"}


@pytest.mark.slow
def test_a_step_reads_nothing_from_the_device(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.hosts.host_reads", str(tmp_path)],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    steps = json.loads((tmp_path / "host_reads.json").read_text())
    assert len(steps) == 8
    for found in steps[:-1]:  # a checkpoint follows the last
        assert {place: n for place, n in found.items() if place not in ON_A_CPU} == ON_THE_HOST
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9)) and all(row["grad_norm"] > 0 for row in rows)
    rates = json.loads((tmp_path / "rates.json").read_text())
    assert [row["lr"] for row in rows] == rates and len(set(rates)) > 4, "a row shows the rate that made its step"

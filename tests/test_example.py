# SPDX-License-Identifier: Apache-2.0
"""The script that docs/own-loop.md quotes trains on this machine."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_three_steps.py"
# Of one rank in bf16 on a CPU.
LOSSES = [5.5598, 5.1992, 4.6916]


@pytest.mark.slow
def test_a_server_gets_the_weights_of_each_step(tmp_path):
    """The losses of the server, which is transformers, are those of the training that replays its routing."""
    from tests.inference.small import publish_small

    words = [sys.executable, str(ROOT / "examples" / "refit_transformers.py"), str(publish_small(tmp_path / "model"))]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"step \d: loss (\d\.\d+), of the server (\d\.\d+)", done.stdout)
    assert len(found) == 3
    ours, theirs = ([float(loss) for loss in column] for column in zip(*found, strict=True))
    assert ours == pytest.approx(theirs, abs=2e-5) and ours[2] < ours[0] - 0.02


def test_it_is_short():
    assert len(SCRIPT.read_text().splitlines()) <= 41


@pytest.mark.parametrize(
    "launcher",
    [(), pytest.param(("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"), marks=pytest.mark.slow)],
)
def test_it_trains(launcher):
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if not launcher:
        assert len((done.stdout + done.stderr).splitlines()) == 3, "no warning of Megatron or torch stands beside"
    found = [float(loss) for loss in re.findall(r"step \d: loss (\d+\.\d{4})", done.stdout)]
    ranks = 2 if launcher else 1
    assert len(found) == 3 * ranks
    assert sorted(found, reverse=True)[::ranks] == pytest.approx(LOSSES, abs=0.01)
    assert "balanced" not in done.stderr, "the optimizer's step balances"

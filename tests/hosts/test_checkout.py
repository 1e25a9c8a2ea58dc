# SPDX-License-Identifier: Apache-2.0
"""`zaya train` on a checkout of Megatron-LM (0.19 or 0.20), or on a wheel built from one, against the installed wheel:
the same losses and norms, bit for bit.

Needs ZAYA_MEGATRON_LM=<directory of Megatron-LM, or the file of a wheel>.
"""

import json
import os
from pathlib import Path

import pytest

from tests.running import MICRO, zaya

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
STEPS = ("stage.train_iters=4", "stage.eval_interval=4", "checkpoint.save_interval=2")
LAYOUTS = {
    "one_rank": ("nproc=1",),
    "dp2": ("nproc=2",),
    "pp2": ("nproc=2", "parallel.pipeline_model_parallel_size=2"),
    "tp2": ("nproc=2", "parallel.tensor_model_parallel_size=2"),
    "ep2": ("nproc=2", "parallel.expert_model_parallel_size=2"),
    "cp2": ("nproc=2", "parallel.context_parallel_size=2"),
    "muon": ("nproc=2", "optim=muon"),
}


def rows(run_dir: Path, data: Path, *overrides: str, path: str) -> list[tuple]:
    done = zaya("train", *MICRO, *STEPS, f"run_dir={run_dir}", f"data.path={data}", *overrides, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout
    found = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [tuple(row.get(key) for key in ("step", "loss", "grad_norm", "valid_loss")) for row in found]


def test_a_checkout_continues_as_the_wheel_does(tmp_path, corpus, checkout):
    """Muon with a multiplier of the learning rate, stopped after 2 of 4 steps."""
    overrides, path = (
        (*LAYOUTS["muon"], "optim.overrides=['*router* lr_mult=0.5']"),
        os.pathsep.join([str(checkout), str(ROOT)]),
    )
    wheel = rows(tmp_path / "wheel", corpus, *overrides, path=str(ROOT))
    rows(tmp_path / "checkout", corpus, *overrides, "exit_interval=2", path=path)
    assert rows(tmp_path / "checkout", corpus, *overrides, "resume=auto", path=path)[-3:] == wheel[-3:]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkout_trains_as_the_wheel_does(tmp_path, corpus, checkout, layout):
    wheel = rows(tmp_path / "wheel", corpus, *LAYOUTS[layout], path=str(ROOT))
    other = rows(tmp_path / "checkout", corpus, *LAYOUTS[layout], path=os.pathsep.join([str(checkout), str(ROOT)]))
    assert len(wheel) > 4 and other == wheel

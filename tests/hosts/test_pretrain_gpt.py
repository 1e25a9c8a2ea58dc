# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py with `--spec`, on real text, against `zaya train`: the same losses, bit for bit.

Needs a checkout: ZAYA_MEGATRON_LM=<directory of Megatron-LM, 0.19 or 0.20>.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import MICRO, train, zaya

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
CPU = {"TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SIX = ("stage.train_iters=6", "checkpoint.save_interval=3", "stage.eval_interval=6")
ROOT = Path(__file__).parents[2]


def pretrain_gpt(
    checkout: Path,
    run_dir: Path,
    data: Path,
    *overrides: str,
    ranks: int,
    words: tuple = (),
    recipe=MICRO,
    environment: dict[str, str] = CPU,
):
    """`zaya export megatron`, then the script with those words and `words`; scalars by name and step as Megatron
    reports them, and its output.
    """
    done = zaya("export", "megatron", *recipe, f"run_dir={run_dir}", f"data.path={data}", *overrides, f"nproc={ranks}")
    assert done.returncode == 0, done.stdout
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
        "pretrain_gpt.py",
    ]
    given = shlex.split((run_dir / "megatron.args").read_text())
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    out = subprocess.run(
        [*launch, *given, "--tensorboard-dir", str(run_dir / "scalars"), *words],
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert out.returncode == 0, out.stdout[-6000:]
    return scalars(run_dir / "scalars"), out.stdout


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def float32(values: dict[int, float]) -> dict[int, float]:
    import numpy

    return {step: float(numpy.float32(value)) for step, value in values.items()}


def test_two_ranks_under_muon_stopped_and_continued(checkout, tmp_path, corpus):
    overrides = (*SIX, "optim=muon", "optim.overrides=['*router* lr_mult=0.5']")
    own = train(tmp_path / "own", corpus, *overrides, "nproc=2").steps()
    guest = tmp_path / "guest"
    first, _ = pretrain_gpt(checkout, guest, corpus, *overrides, ranks=2, words=("--exit-interval", "3"))
    assert set(first["lm loss"]) == {1, 2, 3}
    both, output = pretrain_gpt(checkout, guest, corpus, *overrides, ranks=2)
    assert "resumes from step 3, optimizer muon" in output and "in the recipe" not in output
    assert both["lm loss"] == float32({step: row["loss"] for step, row in own.items()})
    assert both["grad-norm"] == float32({step: row["grad_norm"] for step, row in own.items()})
    # Megatron reports the rate of the next step; a row of `zaya train` has the rate that made its step.
    rates = {step: rate for step, rate in both["learning-rate"].items() if step < 6}
    assert rates == float32({step - 1: row["lr"] for step, row in own.items() if step > 1})
    assert both["lm loss"][6] < both["lm loss"][1]


def test_a_stage_takes_over_from_one_of_zaya_train(checkout, tmp_path, corpus):
    before = tmp_path / "before"
    start = train(before, corpus, *SIX, "nproc=1").steps()[1]["loss"]
    second = (
        *SIX,
        f"handover.from_run={before}",
        "stage.seq_length=64",
        "stage.rotary_base=1000000",
        "optim.lr=5e-4",
        "seed=5",
    )
    own = train(tmp_path / "own", corpus, *second, "nproc=1").steps()
    guest, output = pretrain_gpt(checkout, tmp_path / "guest", corpus, *second, ranks=1)
    assert "begins, optimizer adamw" in output
    assert guest["lm loss"] == float32({step: row["loss"] for step, row in own.items()})
    assert guest["lm loss"][1] < start - 0.1, "begins with the weights of the stage before"


def test_a_pipeline_of_two(checkout, tmp_path, corpus):
    overrides = (*SIX, "parallel.pipeline_model_parallel_size=2")
    own = train(tmp_path / "own", corpus, *overrides, "nproc=2").steps()
    guest, _ = pretrain_gpt(checkout, tmp_path / "guest", corpus, *overrides, ranks=2)
    assert guest["lm loss"] == float32({step: row["loss"] for step, row in own.items()})


def test_the_supervisor_of_a_node_sees_the_steps_of_the_script(checkout, tmp_path, corpus):
    """The heartbeat of the guest in Megatron's own loop, with a validation and two saves."""
    folder = tmp_path / "beats"
    folder.mkdir()
    pretrain_gpt(checkout, tmp_path / "run", corpus, *SIX, ranks=2, environment={**CPU, "ZAYA_AEGIS_DIR": str(folder)})
    for rank in range(2):
        beat = json.loads((folder / f"rank{rank}.json").read_text())
        assert (beat["phase"], beat["step"]) == ("end", 6) and 0 < beat["step_seconds"] < 60

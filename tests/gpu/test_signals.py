# SPDX-License-Identifier: Apache-2.0
"""SIGTERM to a run on one or two GPUs: the ranks agree on it one step late, as an interval's save may begin."""

import re
import signal

import pytest
import torch

from tests.running import MICRO, train, train_and_signal, zaya
from zaya_plugin.ground.exit_codes import ENDED_EARLY

RANKS = min(2, max(torch.cuda.device_count(), 1))


@pytest.mark.parametrize("at_step", [5, 6])
def test_a_signal_just_before_an_interval_save(corpus, tmp_path, at_step):
    words = (f"nproc={RANKS}", "cluster=gpu", f"cluster.gpus_per_node={RANKS}", "cluster.kernels=reference")
    words = (*words, "stage.train_iters=4000", "stage.eval_interval=10000", "checkpoint.save_interval=2")
    words = (*words, "checkpoint.keep_last=3")
    stopped = train_and_signal(tmp_path, corpus, signal.SIGTERM, at_step, *words)
    assert stopped.code == ENDED_EARLY, stopped.output
    last = max(stopped.steps())
    saves = re.findall(r"step (\d+): checkpoint saved", stopped.output)
    assert saves[-1] == str(last) and len(saves) == len(set(saves)), stopped.output
    assert f"step {last} is saved" in stopped.output
    assert not list((tmp_path / "checkpoints").glob("iter_*.*"))
    assert zaya("checkpoint", "verify", str(tmp_path), "--all").returncode == 0
    resumed = train(tmp_path, corpus, *words, "resume=must", f"exit_interval={last + 2}", recipe=MICRO)
    assert f"continuing after step {last}" in resumed.output
    assert list(resumed.steps()) == list(range(1, last + 3))

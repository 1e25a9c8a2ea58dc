# SPDX-License-Identifier: Apache-2.0
"""Test that a loaded checkpoint leaves the multipliers of the learning rates, whatever Megatron's load does to them."""

import functools
from types import SimpleNamespace

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from zaya_plugin.optim.factory import load_with_rates

LR, STEPS = 1e-3, 60


@pytest.mark.parametrize("release", ["0.19", "0.20"])
def test_a_load_keeps_the_multipliers(release):
    groups = [{"lr": 0.0, "weight_decay": 0.1}, {"lr": 0.0, "weight_decay": 0.1, "max_lr": LR / 2, "min_lr": 1e-5}]
    optimizer = SimpleNamespace(param_groups=groups)
    schedule = functools.partial(OptimizerParamScheduler, optimizer, init_lr=0.0, max_lr=LR, min_lr=2e-5)
    schedule = functools.partial(schedule, lr_warmup_steps=0, lr_decay_steps=100, lr_decay_style="linear")
    scheduler = schedule(start_wd=0.1, end_wd=0.1, wd_incr_steps=100, wd_incr_style="constant")

    def load_checkpoint(model, optimizer, scheduler):
        """As load_checkpoint of each release under override_opt_param_scheduler (core_v0.19.0, d98e8a64)."""
        scheduler.num_steps = STEPS
        if release == "0.20":
            for group in optimizer.param_groups:
                group.update(max_lr=LR, min_lr=2e-5)
        scheduler.step(increment=0)
        return STEPS, 0

    assert load_with_rates(load_checkpoint, None, optimizer, scheduler) == (STEPS, 0)
    assert (groups[1]["max_lr"], groups[1]["min_lr"]) == (LR / 2, 1e-5)
    expected = [2e-5 + 0.4 * (LR - 2e-5), 1e-5 + 0.4 * (LR / 2 - 1e-5)]
    assert [group["lr"] for group in groups] == pytest.approx(expected, rel=1e-12)

# SPDX-License-Identifier: Apache-2.0
"""Learning rates, ramps and counts of a stage, compared with Megatron's scheduler and batch calculator."""

import re
from types import SimpleNamespace

import pytest

from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.compose import compose
from zaya_plugin.config.schedule import (
    batches,
    first_learning_rate,
    last_learning_rate,
    learning_rate,
    sample_count,
    step_count,
)
from zaya_plugin.config.validate import validate


def recipe(*overrides):
    return compose(["experiment=cpu_demo", "stage.train_iters=50", "optim.lr_warmup_iters=0", *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        ("optim.lr_warmup_iters=7",),
        ("optim.lr_warmup_iters=7", "optim.lr_warmup_init=5e-4", "optim.lr_decay_iters=30"),
        ("optim.lr_decay_style=WSD", "optim.lr_wsd_decay_iters=10", "optim.lr_warmup_iters=5"),
        *[
            ("optim.lr_decay_style=WSD", "optim.lr_wsd_decay_iters=20", f"optim.lr_wsd_decay_style={style}")
            for style in ("linear", "cosine", "minus_sqrt")
        ],
        ("optim.lr_decay_style=constant",),
        ("optim.lr_decay_style=linear", "optim.lr_warmup_iters=1"),
        ("optim.lr_decay_style=inverse-square-root", "optim.lr_warmup_iters=4"),
    ],
)
def test_learning_rates_are_megatrons(overrides):
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    made = recipe(*overrides)
    validate(made, 2)
    args = SimpleNamespace(**megatron_arguments(made, {}))
    batch = args.global_batch_size
    group = {"lr": 0.0, "weight_decay": 0.0}
    last = getattr(args, "lr_wsd_decay_iters", None)
    scheduler = OptimizerParamScheduler(
        SimpleNamespace(param_groups=[group]),
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * batch,
        lr_decay_steps=getattr(args, "lr_decay_iters", args.train_iters) * batch,
        lr_decay_style=args.lr_decay_style,
        start_wd=0.1,
        end_wd=0.1,
        wd_incr_steps=args.train_iters * batch,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=last and last * batch,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )
    for step in range(51):
        assert group["lr"] == pytest.approx(learning_rate(made, step * batch), rel=1e-12), step
        scheduler.step(batch)


def test_a_ramp_is_megatrons():
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    made = recipe("stage.batch_size_ramp='0:4 10K:8 25600:16'", "stage.micro_batch_size=2")
    validate(made, 2)
    values = megatron_arguments(made, {})
    assert (values["train_samples"], values["lr_warmup_samples"], values["eval_global_batch_size"]) == (800, 0, 16)
    assert "global_batch_size" not in values and "train_iters" not in values
    calculator = StepBatchsizeNumMicroBatchesCalculator(2, 2, False, 0, values["step_batch_size_schedule"], 256)
    done, sizes = 0, []
    while done < values["train_samples"]:
        calculator.update(done, consistency_check=True)
        sizes.append(calculator.get_current_global_batch_size())
        done += sizes[-1]
    assert [size for steps, size in batches(made) for _ in range(steps)] == sizes
    assert (step_count(made), sample_count(made)) == (len(sizes), done)
    assert sizes[0] == 4 and sizes[-1] == 16 and len(sizes) > 50


def test_without_a_ramp_the_counts_are_plain():
    assert (step_count(recipe()), sample_count(recipe())) == (50, 800)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lr_decay_style=WSD"], "optim.lr_wsd_decay_iters=null: optim.lr_decay_style=WSD requires"),
        (
            ["optim.lr_wsd_decay_iters=5"],
            "optim.lr_wsd_decay_iters=5: only optim.lr_decay_style=WSD has a last part. Allowed: null",
        ),
        (
            ["optim.lr_decay_style=WSD", "optim.lr_wsd_decay_iters=49", "optim.lr_warmup_iters=2"],
            "at most 48, the steps after the warm-up. Fix: optim.lr_wsd_decay_iters=4.",
        ),
        (["optim.lr_warmup_init=1e-4"], "Allowed: 0.0 with optim.lr_warmup_iters=0. Fix: optim.lr_warmup_init=0.0"),
        (
            ["optim.lr_warmup_init=1", "optim.lr_warmup_iters=1"],
            "Allowed: at most optim.lr=0.01. Fix: optim.lr_warmup_init=0.01",
        ),
        (["stage.batch_size_ramp='0:4 10K'"], "'10K' is not TOKENS:SEQUENCES"),
        (["stage.batch_size_ramp='1K:8 10K:16'"], "its first entry does not start at 0 tokens"),
        (["stage.batch_size_ramp='0:8 20K:8 10K:16'"], "its tokens do not ascend"),
        (["stage.batch_size_ramp='0:8 10K:12'"], "ends at 12 sequences. Allowed: the end stage.global_batch_size=16"),
        (
            ["stage.batch_size_ramp='0:4 10K:16'"],
            "Allowed: multiples of stage.micro_batch_size x data-parallel ranks = 8",
        ),
        (["stage.batch_size_ramp='0:8 1M:16'"], "fewer than the stage's 204800 tokens"),
    ],
)
def test_impossible_schedules_are_refused(overrides, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validate(recipe(*overrides), 2)


def test_promised_continuity_holds_between_the_recipes():
    first = compose(["experiment=zaya1_base", "data.path=x"])
    second = compose(["experiment=zaya1_base_stage2", "data.path=x"])
    assert second.handover.continuous_lr
    assert last_learning_rate(first) == pytest.approx(first_learning_rate(second), rel=1e-12)

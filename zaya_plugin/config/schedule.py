# SPDX-License-Identifier: Apache-2.0
"""A stage's schedule as numbers: how many steps and tokens it has, its batches and its learning rate at any sample.

The formulas are those of Megatron (`megatron.core.optimizer_param_scheduler`, `megatron.core.num_microbatches_calculator`),
which count in sequences; `tests/config/test_schedule.py` compares them. No torch: a plan of months is checked on a login node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zaya_plugin.config.schema import Recipe

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Ramp:
    """From sequence `start` of the stage on a step has `batch` sequences."""

    start: int
    batch: int


def parse_ramp(text: str, seq_length: int) -> list[Ramp]:
    """`0:1024 250B:2048` (tokens : sequences a step) as ramps in sequences.

    Raises:
        ValueError: an entry is malformed, the first is not at 0, or they do not ascend.
    """
    ramps = []
    for entry in text.replace(",", " ").split():
        tokens, colon, batch = entry.partition(":")
        multiplier = SUFFIXES.get(tokens[-1:].upper(), 1)
        try:
            start = int(float(tokens[:-1] if multiplier > 1 else tokens) * multiplier)
            ramps.append(Ramp(start // seq_length, int(batch)))
        except ValueError:
            raise ValueError(f"{entry!r} is not TOKENS:SEQUENCES, such as 250B:2048") from None
        if not colon or start < 0 or ramps[-1].batch < 1:
            raise ValueError(f"{entry!r} is not TOKENS:SEQUENCES, such as 250B:2048")
    if not ramps or ramps[0].start != 0:
        raise ValueError("its first entry has to be at 0 tokens")
    if any(after.start <= before.start for before, after in zip(ramps, ramps[1:], strict=False)):
        raise ValueError("its tokens have to ascend")
    return ramps


def batches(recipe: Recipe) -> Iterator[tuple[int, int]]:
    """(number of steps, sequences a step) of each part of the stage, in order; Megatron's steps of whole batches."""
    stage = recipe.stage
    total = stage.train_iters * stage.global_batch_size
    if stage.batch_size_ramp is None:
        yield stage.train_iters, stage.global_batch_size
        return
    ramps, done = parse_ramp(stage.batch_size_ramp, stage.seq_length), 0
    for index, ramp in enumerate(ramps):
        end = min(ramps[index + 1].start, total) if index + 1 < len(ramps) else total
        steps = max(0, math.ceil((end - done) / ramp.batch))
        done += steps * ramp.batch
        yield steps, ramp.batch


def step_count(recipe: Recipe) -> int:
    """Optimizer steps of the stage; more than `stage.train_iters` where the batch is ramped up."""
    return sum(steps for steps, _ in batches(recipe))


def sample_count(recipe: Recipe) -> int:
    """Sequences that the stage trains on."""
    return sum(steps * batch for steps, batch in batches(recipe))


def token_count(recipe: Recipe) -> int:
    """Tokens that the stage trains on."""
    return recipe.stage.seq_length * sample_count(recipe)


def learning_rate(recipe: Recipe, samples: int) -> float:
    """Learning rate of the step before which `samples` sequences of the stage were trained on (lr_mult not applied).

    Source: OptimizerParamScheduler.get_lr of megatron-core 0.19.
    """
    optim, batch = recipe.optim, recipe.stage.global_batch_size
    warmup = optim.lr_warmup_iters * batch
    decay = (optim.lr_decay_iters or recipe.stage.train_iters) * batch
    if warmup > 0 and samples <= warmup:
        return optim.lr_warmup_init + (optim.lr - optim.lr_warmup_init) * samples / warmup
    if optim.lr_decay_style == "constant":
        return optim.lr
    if samples > decay:
        return optim.min_lr
    if optim.lr_decay_style == "inverse-square-root":
        return max(optim.min_lr, optim.lr * max(warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
    share = (samples - warmup) / (decay - warmup)
    if optim.lr_decay_style == "WSD":
        last = optim.lr_wsd_decay_iters * batch
        share = (samples - (decay - last)) / last
        coefficient = 1.0 if share <= 0 else _decayed(optim.lr_wsd_decay_style, share)
    else:
        coefficient = _decayed(optim.lr_decay_style, share)
    return optim.min_lr + coefficient * (optim.lr - optim.min_lr)


def first_learning_rate(recipe: Recipe) -> float:
    """Learning rate of the stage's first step."""
    return learning_rate(recipe, 0)


def last_learning_rate(recipe: Recipe) -> float:
    """Where the schedule stands once the stage is done: what its successor starts from if it is to be continuous."""
    return learning_rate(recipe, sample_count(recipe))


def schedule_problems(recipe: Recipe, batch_unit: int) -> Iterator[str]:
    """Yields what is impossible about the schedule; batch_unit: micro-batch size x data-parallel ranks."""
    optim, stage = recipe.optim, recipe.stage
    if optim.lr_warmup_init > optim.lr:
        yield f"optim.lr_warmup_init = {optim.lr_warmup_init}: allowed: at most optim.lr = {optim.lr}"
    if optim.lr_warmup_init and not optim.lr_warmup_iters:
        yield (
            f"optim.lr_warmup_init = {optim.lr_warmup_init} with optim.lr_warmup_iters = 0: allowed: 0, or a warm-up of 1 step or "
            "more"
        )
    decay, last = optim.lr_decay_iters or stage.train_iters, optim.lr_wsd_decay_iters
    if optim.lr_decay_style == "WSD" and last is None:
        yield "optim.lr_wsd_decay_iters = null: optim.lr_decay_style = WSD needs the number of steps of its last part"
    elif optim.lr_decay_style != "WSD" and last is not None:
        yield f"optim.lr_wsd_decay_iters = {last}: allowed: null, unless optim.lr_decay_style = WSD (is {optim.lr_decay_style})"
    elif last is not None and last > decay - optim.lr_warmup_iters:
        yield (
            f"optim.lr_wsd_decay_iters = {last}: allowed: at most {decay - optim.lr_warmup_iters}, the steps after the warm-up"
        )
    if stage.batch_size_ramp is not None:
        yield from _ramp_problems(recipe, batch_unit)


def _ramp_problems(recipe: Recipe, batch_unit: int) -> Iterator[str]:
    stage = recipe.stage
    here = f"stage.batch_size_ramp = {stage.batch_size_ramp!r}"
    try:
        ramps = parse_ramp(stage.batch_size_ramp, stage.seq_length)
    except ValueError as error:
        yield f"{here}: {error}"
        return
    if ramps[-1].batch != stage.global_batch_size:
        yield f"{here} ends at {ramps[-1].batch} sequences; allowed: stage.global_batch_size = {stage.global_batch_size}"
    if ramps[-1].start >= stage.train_iters * stage.global_batch_size:
        yield f"{here} ends after the stage's {stage.train_iters * stage.global_batch_size * stage.seq_length} tokens"
    for ramp in ramps:
        if ramp.batch % batch_unit:
            yield (
                f"{here}: {ramp.batch} sequences are not a multiple of stage.micro_batch_size x data-parallel ranks = "
                f"{batch_unit}"
            )


def _decayed(style: str, share: float) -> float:
    """What is left of lr - min_lr after `share` (0 to 1) of the decay."""
    if style == "linear":
        return 1.0 - share
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * share) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**share - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(share)

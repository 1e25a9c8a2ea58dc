# SPDX-License-Identifier: Apache-2.0
"""Compute a stage's schedule: its steps, tokens and batches, and its learning rate at any sample. Imports no torch.

They are written a second time because a dry run, `zaya curriculum` and a hand-over compute them on a login node, where
neither torch nor Megatron can be imported.

The formulas are those of Megatron (`megatron.core.optimizer_param_scheduler`,
`megatron.core.num_microbatches_calculator`), which count in sequences; `tests/config/test_schedule.py` compares them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from zaya_plugin.config.messages import must_be, require
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import message

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class Ramp:
    """One entry of a batch size ramp: a step has `batch` sequences, from sequence `start` of the stage on."""

    start: int
    batch: int


def parse_ramp(text: str, seq_length: int) -> list[Ramp]:
    """Parse `0:1024 250B:2048` (tokens : sequences of a step) into ramps, whose starts are in sequences.

    Raises:
        ValueError: an entry is malformed, the first does not start at 0, or they do not ascend.
    """
    ramps = []
    for entry in text.replace(",", " ").split():
        tokens, _, batch = entry.partition(":")
        multiplier = SUFFIXES.get(tokens[-1:].upper(), 1)
        try:
            start = int(float(tokens[:-1] if multiplier > 1 else tokens) * multiplier)
            ramps.append(Ramp(start // seq_length, int(batch)))
        except (ValueError, OverflowError):  # the latter from infinity
            start = -1
        if start < 0 or ramps[-1].batch < 1:
            raise ValueError(f"{entry!r} is not TOKENS:SEQUENCES, such as 250B:2048")
    if not ramps or ramps[0].start != 0:
        raise ValueError("its first entry does not start at 0 tokens")
    if any(after.start <= before.start for before, after in zip(ramps, ramps[1:], strict=False)):
        raise ValueError("its tokens do not ascend")
    return ramps


def batches(recipe: Recipe) -> Iterator[tuple[int, int]]:
    """Yield (number of steps, sequences of a step) for each part of the stage, in order. All steps are whole batches,
    as Megatron's.
    """
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
    """Return the optimizer steps of the stage; a batch size ramp makes them more than `stage.train_iters`."""
    return sum(steps for steps, _ in batches(recipe))


def sample_count(recipe: Recipe) -> int:
    """Return the number of sequences that the stage trains on."""
    return sum(steps * batch for steps, batch in batches(recipe))


def samples_until(recipe: Recipe, step: int) -> int:
    """Return the number of sequences of the stage's first `step` steps."""
    samples = 0
    for steps, batch in batches(recipe):
        samples, step = samples + min(steps, step) * batch, max(0, step - steps)
    return samples + step * recipe.stage.global_batch_size


def token_count(recipe: Recipe) -> int:
    """Return the number of tokens that the stage trains on."""
    return recipe.stage.seq_length * sample_count(recipe)


def learning_rate(recipe: Recipe, samples: int) -> float:
    """Return the learning rate of the step that follows `samples` sequences of the stage (lr_mult is not applied).

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
    """Return the learning rate of the stage's first step."""
    return learning_rate(recipe, 0)


def last_learning_rate(recipe: Recipe) -> float:
    """Return the learning rate after the stage's last step; a continuous successor starts from it."""
    return learning_rate(recipe, sample_count(recipe))


def schedule_problems(recipe: Recipe, batch_unit: int) -> Iterator[str]:
    """Yield what is impossible about the schedule. batch_unit: micro-batch size x data-parallel ranks."""
    optim, stage = recipe.optim, recipe.stage
    key, init = "optim.lr_warmup_init", optim.lr_warmup_init
    above, allowed = "the warm-up would start above the highest learning rate", f"at most optim.lr={optim.lr}"
    yield from require(init <= optim.lr, key, init, problem=above, allowed=allowed, fix=f"{key}={optim.lr}")
    key, decay, last = "optim.lr_wsd_decay_iters", optim.lr_decay_iters or stage.train_iters, optim.lr_wsd_decay_iters
    most = decay - optim.lr_warmup_iters
    if optim.lr_decay_style != "WSD":
        condition = f"optim.lr_decay_style={optim.lr_decay_style}"
        yield from must_be(recipe, key, None, condition, "only optim.lr_decay_style=WSD has a last part")
    elif last is None or last > most:
        problem = "optim.lr_decay_style=WSD requires the steps of its last part" if last is None else "is too long"
        allowed = f"a whole number above 0, at most {most}, the steps after the warm-up"
        yield message(key, last, problem=problem, allowed=allowed, fix=f"{key}={max(most // 10, 1)}")
    if stage.batch_size_ramp is not None:
        yield from _ramp_problems(recipe, batch_unit)


def _ramp_problems(recipe: Recipe, batch_unit: int) -> Iterator[str]:
    stage, end = recipe.stage, recipe.stage.global_batch_size
    problems = {}
    try:
        ramps = parse_ramp(stage.batch_size_ramp, stage.seq_length)
    except ValueError as error:
        problems[str(error)] = "'0:SEQUENCES TOKENS:SEQUENCES ...' with ascending tokens"
    else:
        if ramps[-1].batch != end:
            problems[f"ends at {ramps[-1].batch} sequences"] = f"the end stage.global_batch_size={end}"
        if ramps[-1].start >= stage.train_iters * end:
            problems["its last entry starts after the end of the stage"] = (
                f"fewer than the stage's {stage.train_iters * end * stage.seq_length} tokens"
            )
        for ramp in ramps:
            if ramp.batch % batch_unit:
                problems[f"{ramp.batch} sequences cannot be divided among micro-batches and data-parallel ranks"] = (
                    f"multiples of stage.micro_batch_size x data-parallel ranks = {batch_unit}"
                )
    for problem, allowed in problems.items():
        yield message(
            "stage.batch_size_ramp",
            repr(stage.batch_size_ramp),
            problem=problem,
            allowed=allowed,
            fix="stage.batch_size_ramp=null",
        )


def _decayed(style: str, share: float) -> float:
    """Return the remaining share of lr - min_lr after `share` (0 to 1) of the decay."""
    if style == "linear":
        return 1.0 - share
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * share) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**share - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(share)

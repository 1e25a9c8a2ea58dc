# SPDX-License-Identifier: Apache-2.0
"""Compares an implementation of an operator with its torch reference on a small input.

The input is made from a fixed seed, so that every process finds the same result. The global random state is restored
afterwards.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Largest error, relative to the reference's largest value: two roundings of bf16 (8 bits); fp32 sums in another order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SEED = 20240817
comparing = False  # True while `difference` runs; then references do not warn that they are slow


def difference(
    candidate: Callable,
    reference: Callable,
    example: Callable[[torch.device], tuple],
    device: torch.device,
    *,
    compare: Callable[[list, list, float | None], str | None] | None = None,
    tolerance: float | None = None,
) -> str | None:
    """Returns None if `candidate` agrees with `reference`, otherwise both numbers at the worst place.

    Each gets its own copy of `example(device)`. The results are compared, and the tensors among the arguments as they
    are after the call, which covers operators that work in place. `compare(got, want, tolerance)`, each [result,
    arguments], replaces this comparison if it is given.
    """
    global comparing
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    with torch.random.fork_rng(devices=devices), torch.no_grad(), torch.autocast(device.type, enabled=False):
        torch.manual_seed(SEED)
        arguments = example(device)
        mine, theirs = _copy(arguments), _copy(arguments)
        comparing = True
        try:
            got = [candidate(*mine), list(mine)]
            want = [reference(*theirs), list(theirs)]
        finally:
            comparing = False
    return (compare or _compare)(got, want, tolerance)


def _copy(value: Any) -> Any:
    """Copies tensors, also inside lists and tuples, with their strides, because an operator may depend on them."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


def _tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _tensors(item, f"{name}[{place}]")


def _compare(got: list, want: list, tolerance: float | None) -> str | None:
    pairs = [
        (*_tensors(got[0], "result"), *_tensors(got[1], "argument")),
        (*_tensors(want[0], "result"), *_tensors(want[1], "argument")),
    ]
    if [name for name, _ in pairs[0]] != [name for name, _ in pairs[1]]:
        return f"it gives {len(pairs[0])} tensors, torch {len(pairs[1])}"
    said = (worst(name, mine, theirs, tolerance) for (name, mine), (_, theirs) in zip(*pairs, strict=True))
    return next(filter(None, said), None)


def worst_element(name: str, mine: torch.Tensor, theirs: torch.Tensor, allowed: float, floor: float) -> str | None:
    """Returns None if each element agrees to `allowed` relative to itself, or to `floor`, otherwise both numbers at the
    worst place.

    For results whose elements differ in size by orders of magnitude.
    """
    limits = floor + allowed * theirs.double().cpu().flatten().abs().nan_to_num(0.0, posinf=0.0)
    return _difference(name, mine, theirs, limits, f"{allowed:.2g} of it")


def worst(name: str, mine: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> str | None:
    """Returns None if both agree to `tolerance` relative to the largest element (None: the dtype's), otherwise both
    numbers at the worst place.
    """
    allowed = (
        0.0 if not theirs.is_floating_point() else tolerance if tolerance is not None else TOLERANCES[theirs.dtype]
    )
    finite = theirs[theirs.isfinite()].double()
    scale = finite.abs().max().item() if len(finite) else 0.0
    return _difference(name, mine, theirs, allowed * scale, f"{allowed:.2g} of the largest, {scale:.4g}")


def _difference(
    name: str, mine: torch.Tensor, theirs: torch.Tensor, limits: torch.Tensor | float, allowed: str
) -> str | None:
    """Returns None if no error exceeds its limit, otherwise both numbers where it exceeds it most. allowed: for the
    message.
    """
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{name} is {mine.dtype} {tuple(mine.shape)}, torch gives {theirs.dtype} {tuple(theirs.shape)}"
    if theirs.numel() == 0 or torch.equal(mine, theirs):
        return None
    mine, theirs = mine.double().cpu().flatten(), theirs.double().cpu().flatten()
    # NaN on one side counts as an infinite error; NaN on both sides as equal.
    error = (mine - theirs).abs().nan_to_num(math.inf)
    error[(mine == theirs) | (mine.isnan() & theirs.isnan())] = 0.0
    excess = error - limits
    place = int(excess.argmax())
    if excess[place] <= 0:
        return None
    numbers = f"it gives {mine[place].item():.8g}, torch {theirs[place].item():.8g}"
    return f"{name}, element {place}: {numbers} (allowed: {allowed})"

# SPDX-License-Identifier: Apache-2.0
"""Compares an implementation of an operator with its torch reference on a small input.

The input is made from a fixed seed, so that every process finds the same result. The global random state is restored
afterwards. A run makes one call for each example; conditions.py calls a version on streams, in a graph and on a full
device.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

from hip_ops.runtime.launch import INTEGERS

# Largest error, relative to the reference's largest value: two roundings of bf16 (8 bits); fp32 sums in another order.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SEED = 20240817
comparing = False  # True while `differences` runs; then references do not warn that they are slow


class Condition(NamedTuple):
    """name: in messages, empty for a plain call. calls: how often `run` calls the candidate.

    run(candidate, arguments of each call) -> [result, arguments] of each call, when the device has finished.
    """

    name: str
    calls: int
    run: Callable[[Callable, list[tuple]], list[list]]


def in_turn(candidate: Callable, arguments: list[tuple]) -> list[list]:
    """Call the candidate on the current stream, once for each of `arguments`."""
    return [[candidate(*of_call), list(of_call)] for of_call in arguments]


PLAIN_CALL = Condition("", 1, in_turn)


@contextlib.contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Within the block, torch's random generators of the CPU and of `device` start from SEED."""
    devices = (
        [device.index if device.index is not None else torch.cuda.current_device()] if device.type == "cuda" else []
    )
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(SEED)
        yield


@contextlib.contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Within the block, this thread records no gradients and casts nothing by itself."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def differences(
    candidate: Callable,
    reference: Callable,
    example: Callable[[torch.device], tuple],
    device: torch.device,
    conditions: Sequence[Condition],
    *,
    compare: Callable[[list, list, float | None], str | None] | None = None,
    tolerance: float | None = None,
    repeats: bool = True,
    written: Callable[[list], Any] | None = None,
) -> list[str | None]:
    """Return for each condition None if `candidate` agrees with `reference`, otherwise both numbers at the worst
    place, or the candidate's error.

    Each call gets its own copy of `example(device)`. The results are compared, and the tensors among the arguments as
    they are after the call, which covers operators that work in place. `compare(got, want, tolerance)`, each [result,
    arguments], replaces this comparison if it is given.

    repeats: whether all calls under a condition must give the same bits, in what `written([result, arguments])`
    returns, by default in everything.
    """
    global comparing
    with seeded(device), plain_arithmetic(device):
        arguments = example(device)
        theirs = copied(arguments)
        comparing = True
        try:
            want = [reference(*theirs), list(theirs)]
            return [
                _under(condition, candidate, arguments, want, compare or compare_tensors, tolerance, repeats, written)
                for condition in conditions
            ]
        finally:
            comparing = False


def _under(
    condition: Condition, candidate: Callable, arguments: tuple, want: list, compare, tolerance, repeats, written
) -> str | None:
    """Call the candidate under one condition and return the first difference, or None."""
    try:
        calls = condition.run(candidate, [copied(arguments) for _ in range(condition.calls)])
    except Exception as error:
        if not condition.name:
            raise
        return f"{type(error).__name__}: {error}"
    for number, got in enumerate(calls, 1):
        problem = compare(got, want, tolerance)
        if problem is None and repeats and number > 1:
            problem = _other_bits(*((got, calls[0]) if written is None else (written(got), written(calls[0]))))
        if problem is not None:
            return f"call {number}: {problem}" if condition.name else problem
    return None


def _other_bits(got: Any, first: Any) -> str | None:
    """Return both numbers at the first place where a call gives other bits than the first call, or None."""
    for (name, mine), (_, theirs) in zip(tensors_of(got, "output"), tensors_of(first, "output"), strict=True):
        bits = [tensor.flatten().view(INTEGERS[tensor.element_size()]) for tensor in (mine, theirs)]
        if not torch.equal(*bits):
            place = int((bits[0] != bits[1]).nonzero()[0])
            numbers = (f"{tensor.flatten()[place].item():.9g}" for tensor in (mine, theirs))
            return f"{name}, element {place}: it gives {', the first call '.join(numbers)} (allowed: equal bits)"
    return None


def copied(value: Any) -> Any:
    """Copy tensors, also inside lists and tuples, with their strides and in a buffer of the same size, because an
    operator may depend on them.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        buffer = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.itemsize)
        return buffer.as_strided(tensor.shape, tensor.stride()).copy_(tensor)

    return tree_map_only(torch.Tensor, copy, value)


def tensors_of(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in `value`, also inside lists and tuples, with their names for messages: `result[0]`."""
    for path, item in tree_leaves_with_path(value):
        if isinstance(item, torch.Tensor):
            yield f"{name}{keystr(path)}", item


def compare_tensors(got: list, want: list, tolerance: float | None) -> str | None:
    """Return the first difference of two [result, arguments], or None."""
    pairs = [
        (*tensors_of(got[0], "result"), *tensors_of(got[1], "argument")),
        (*tensors_of(want[0], "result"), *tensors_of(want[1], "argument")),
    ]
    if [name for name, _ in pairs[0]] != [name for name, _ in pairs[1]]:
        return f"it gives {len(pairs[0])} tensors, torch {len(pairs[1])}"
    texts = (worst(name, mine, theirs, tolerance) for (name, mine), (_, theirs) in zip(*pairs, strict=True))
    return next(filter(None, texts), None)


def worst_element(name: str, mine: torch.Tensor, theirs: torch.Tensor, allowed: float, floor: float) -> str | None:
    """Return None if each element agrees to `allowed` relative to itself, or to `floor`, otherwise both numbers at the
    worst place.

    For results whose elements differ in size by orders of magnitude.
    """
    limits = floor + allowed * theirs.double().flatten().abs().nan_to_num(0.0, posinf=0.0)
    return _difference(name, mine, theirs, limits, f"{allowed:.2g} of it")


def worst(name: str, mine: torch.Tensor, theirs: torch.Tensor, tolerance: float | None = None) -> str | None:
    """Return None if both agree to `tolerance` relative to the largest element (None: the dtype's), otherwise both
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
    """Return None if no error exceeds its limit, otherwise both numbers where it exceeds it most. allowed: for the
    message.
    """
    if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
        return f"{name} is {mine.dtype} {tuple(mine.shape)}, torch gives {theirs.dtype} {tuple(theirs.shape)}"
    if theirs.numel() == 0 or torch.equal(mine, theirs):
        return None
    mine, theirs = mine.double().flatten(), theirs.double().flatten()  # on their device: large on a GPU
    # NaN on one side counts as an infinite error; NaN on both sides as equal.
    error = (mine - theirs).abs().nan_to_num(math.inf)
    error[(mine == theirs) | (mine.isnan() & theirs.isnan())] = 0.0
    excess = error - limits
    place = int(excess.argmax())
    if excess[place] <= 0:
        return None
    numbers = f"it gives {mine[place].item():.8g}, torch {theirs[place].item():.8g}"
    return f"{name}, element {place}: {numbers} (allowed: {allowed})"

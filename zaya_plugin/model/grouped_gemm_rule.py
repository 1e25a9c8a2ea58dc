# SPDX-License-Identifier: Apache-2.0
"""Which grouped GEMM a device runs for which form, and the measurement that says so."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass

import torch

from hip_ops.architecture import architecture
from zaya_plugin.model.grouped_gemm_implementations import IMPLEMENTATIONS, OUTER, TORCH

logger = logging.getLogger(__name__)
CHOICES = ("auto", *IMPLEMENTATIONS)


@dataclass(frozen=True)
class Rule:
    """The implementations of each form on one architecture, the first that can be had; source: the file of the measurement, or why it is so without one."""

    rows_t: tuple[str, ...]
    rows: tuple[str, ...]
    outer: tuple[str, ...]
    source: str


_HOPPER = ("quack", "triton")
RULES = {
    "sm_90": Rule(
        _HOPPER,
        _HOPPER,
        _HOPPER,
        "quack was faster than triton in 19 of 21 measured products, benchmarks/results/quack_tiles-h200.json, and triton than torch in all but "
        "one of six, grouped_product-h100.json",
    ),
    "gfx942": Rule(
        ("triton",),
        ("triton",),
        ("triton",),
        "not measured: torch's may loop over experts and wait for the host, by its build",
    ),
}
OTHERS = Rule(("torch",), ("torch",), ("torch",), "no measurement on this architecture")


@functools.cache
def choices(asked: str, form: str, device: torch.device, dtype: torch.dtype) -> tuple:
    """The implementations of `form` that can be had on `device`, best first; none: the loop over experts. The first is announced once.

    asked: "auto", which takes the rule's and then torch's, or a name, which comes before these for the forms that it has.
    Raises ValueError for a name that does not exist or cannot be had.
    """
    if asked not in CHOICES:
        raise ValueError(
            f"grouped_gemm={asked!r}: allowed are {', '.join(CHOICES)}; Transformer Engine's and AITER's wait for the host at each call"
        )
    if device.type == "cpu":
        if asked not in ("auto", "torch"):
            raise ValueError(
                f"grouped_gemm={asked!r}: on a CPU allowed are auto and torch; set cluster.grouped_gemm=auto"
            )
        return (TORCH,) if form == OUTER and TORCH.available(device, dtype) is None else ()
    rule = RULES.get(architecture(device), OTHERS)
    found, missing = [], []
    for name, why in (
        (asked, "asked for"),
        *((each, rule.source) for each in getattr(rule, form)),
        ("torch", "what is left"),
    ):
        if name == "auto" or form not in IMPLEMENTATIONS[name].forms or IMPLEMENTATIONS[name] in found:
            continue
        reason = IMPLEMENTATIONS[name].available(device, dtype)
        if reason is None:
            if not found:
                logger.info(
                    "grouped GEMM, %s of %s on %s: %s (%s)%s",
                    form,
                    dtype,
                    device,
                    name,
                    why,
                    "".join(f"; {each}" for each in missing),
                )
            found.append(IMPLEMENTATIONS[name])
        elif name == asked:
            raise ValueError(
                f"grouped_gemm={asked!r} cannot be had on {device}: {reason}; set cluster.grouped_gemm=auto"
            )
        else:
            missing.append(f"no {name}: {reason}")
    return tuple(found)


def choose(asked: str, form: str, device: torch.device, dtype: torch.dtype):
    """The first of `choices`, or None for the loop over experts."""
    return next(iter(choices(asked, form, device, dtype)), None)

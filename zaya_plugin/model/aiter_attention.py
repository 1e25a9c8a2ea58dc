# SPDX-License-Identifier: Apache-2.0
"""Flash attention of AITER (package amd-aiter) with the arguments that core attention gives every package.

Not run on any device by this project; read in the sources of 0.1.14.post1, 0.1.18, 0.1.19.post2 and 0.1.20.post1
(tests/stand_ins/aiter-*.json). In all four, forward asserts `return_lse=True` where a gradient is recorded and then
returns (context, log-sum-exps), `deterministic` is True by default, and a causal mask is aligned at the lower right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import Tensor

from hip_ops.runtime import aiter

logger = logging.getLogger(__name__)
FIRST_RELEASE = "0.1.14"
FLASH_FUNCTION = aiter.Function(
    "aiter", "flash_attn_func", ("q", "k", "v", "softmax_scale", "causal", "deterministic", "return_lse", "window_size")
)


def aiter_flash() -> Callable[..., Tensor]:
    """Return flash(query, key, value, *, softmax_scale, causal, deterministic, window_size=(-1, -1)) -> context of the
    installed AITER; window_size: keys before and behind a query that it sees, -1 for all.

    query [b, s, n, d], key and value [b, t, g, d] in bf16 or fp16 -> context [b, s, n, d]; n is a multiple of g.

    Raises:
        ValueError: AITER is missing, too old, or its function does not take these arguments.
    """
    problem = aiter.missing(FIRST_RELEASE) or FLASH_FUNCTION.problem()
    if problem is not None:
        raise ValueError(f"{problem} (allowed: {aiter.RELEASES})")
    logger.warning("core attention of aiter %s: this project has not run it on any device", aiter.installed())
    return _flash


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    # The same call with and without gradients, so that recomputing an activation runs the same kernel.
    context, *_ = FLASH_FUNCTION(
        q=query,
        k=key,
        v=value,
        softmax_scale=softmax_scale,
        causal=causal,
        deterministic=deterministic,
        return_lse=True,
        window_size=(*window_size, 0),  # no sink tokens
    )
    return context

# SPDX-License-Identifier: Apache-2.0
"""CCA's computation between its projections and attention, as one torch operator with gradients, for whole sequences,
packed documents and chunks of a sequence.

Formulas and the conventions of all versions are in reference.py. Saved for the backward pass: the
inputs; query and key, which attention saves too; and one number a head and row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hip_ops.ops.cca_prologue import reference
from hip_ops.runtime.launch import multiprocessors, wide
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator

HEAD_DIM = 128  # ZAYA1's
TRITON_HEAD_DIMS = (32, 64, 128, 256)


def _example(backward: bool, whole: bool = False):
    """Make inputs with the model's heads, two chunks with halos, two sequences with documents of odd lengths, and more
    tiles of 32 rows than blocks for a head, so that a block takes a second one. whole: one chunk without halos and
    without documents, as in training at 4K.
    """

    def make(device: torch.device) -> tuple:
        dtype, d, batch, chunks = torch.bfloat16, HEAD_DIM, 2, 1 if whole else 2
        groups = model_sizes().num_query_groups
        heads = model_sizes().num_attention_heads + groups
        rows = 81 + 3 * multiprocessors(device) if whole else 67 + 2 * multiprocessors(device)
        channels, values = heads * d, groups * d

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        starts = torch.zeros(2, rows + 1, batch, dtype=torch.bool, device=device)
        starts[0, 1, 0] = starts[0, 33:35, 0] = starts[1, 0, 1] = starts[1, 2, 0] = starts[1, rows, 1] = True
        angles = torch.rand(chunks * rows, batch, d // 4, device=device) * 6.0
        inputs = (
            random(chunks * rows, batch, channels + values),
            random(channels, 1, 2),
            random(channels, scale=0.3),
            random(channels, d, 2, scale=(2 * d) ** -0.5),
            random(channels, scale=0.3),
            torch.linspace(0.7, 1.4, groups, device=device).to(dtype),
            torch.cat((angles.cos(), angles.sin()), dim=-1),
            *(
                (None,) * 3
                if whole
                else (random(chunks, 2, batch, channels), random(chunks, batch, values // 2), starts)
            ),
            groups,
            values // 2,
        )
        if not backward:
            return inputs
        query, key, value, inverse_norm = reference.cca_prologue(*inputs)
        return *(random(*t.shape) for t in (query, key, value)), *inputs[:10], query, key, inverse_norm, *inputs[10:]

    return make


def _fits(first: int) -> dict[str, Callable[..., bool]]:
    """Return by version a function that tells whether its kernels take a call; projected is argument number
    `first`.
    """

    def hip(*arguments) -> bool:
        projected, grouped_weight, rope = (arguments[first + place] for place in (0, 3, 6))
        shapes = grouped_weight.shape[1] == HEAD_DIM and arguments[-1] % 4 == 0
        return projected.dtype == torch.bfloat16 and shapes and (rope is None or rope.shape[-1] % 8 == 0)

    def triton(*arguments) -> bool:
        grouped_weight, rope = arguments[first + 3], arguments[first + 6]
        d = grouped_weight.shape[1]
        return d in TRITON_HEAD_DIMS and (rope is None or d % rope.shape[-1] == 0)

    return {"hip": hip, "triton": triton}


def _rule(values: dict) -> tuple[str, str] | None:
    channels, d, groups, delayed = (values[name] for name in ("C", "d", "query_groups", "delayed_channels"))
    heads, chunks, rope = channels // d, values.get("k", 1), values["rope"]
    if channels % d or groups < 1 or heads % groups or heads < 2 * groups:
        return f"query_groups is {groups}", (
            f"a divisor of the number of query heads, where the {channels} channels of depthwise_bias are query heads "
            "and "
            f"query_groups key heads of {d} channels"
        )
    if not 0 <= delayed <= groups * d:
        return f"delayed_channels is {delayed}", f"from 0 to {groups * d}, the number of value channels"
    if (values["halo"] is None) != (values["value_halo"] is None):
        return "one of halo and value_halo is None", "both or neither"
    if values["s"] % chunks:
        return f"halo, value_halo and starts have {chunks} chunks", f"a divisor of the {values['s']} rows of projected"
    if rope is not None and not (values["turns"] in (1, values["b"]) and 0 < values["r"] <= d and values["r"] % 2 == 0):
        shape = f"[{values['s']}, 1 or {values['b']}, r] with an even r up to {d}"
        return f"rope has shape {tuple(rope.shape)}", shape
    return None


_prologue = Operator(
    reference.cca_prologue,
    takes="""
        depthwise_bias    [C]                        bf16|fp32
        depthwise_weight  [C, 1, 2]                  =depthwise_bias
        grouped_weight    [C, d>0, 2]                =depthwise_bias
        grouped_bias      [C]                        =depthwise_bias
        projected         [s, b, C+query_groups*d]   =depthwise_bias
        temperature       [query_groups]             wide(projected)|=projected
        rope?             [s, turns, r]              fp32!|wide(projected)
        halo?             [k>0, 2, b, C]             =projected
        value_halo?       [k>0, b, delayed_channels] =projected
        starts?           [k>0, s//k+1, b]           bool
    """,
    rule=_rule,
    example=_example(backward=False),
    more_examples=dict.fromkeys(("hip", "triton"), (_example(backward=False, whole=True),)),
    tolerance=2**-6,
    fits=_fits(first=0),
)
_prologue_backward = Operator(
    reference.cca_prologue_backward,
    example=_example(backward=True),
    more_examples=dict.fromkeys(("hip", "triton"), (_example(backward=True, whole=True),)),
    tolerance=2**-6,
    fits=_fits(first=3),
)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.query_groups, ctx.delayed_channels = inputs
    query, key, _, inverse_norm = output
    ctx.mark_non_differentiable(inverse_norm)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, query, key, inverse_norm)


def _gradients(ctx, d_query, d_key, d_value, _):
    *inputs, query, key, inverse_norm = ctx.saved_tensors
    # The kernels always read all three gradients: zeros where a result was not used.
    upstream = [
        torch.zeros(like.shape, dtype=like.dtype, device=like.device) if gradient is None else gradient
        for gradient, like in ((d_query, query), (d_key, key), (d_value, key))
    ]
    *of_inputs, d_halo, d_value_halo = _prologue_backward(
        *upstream, *inputs, query, key, inverse_norm, ctx.query_groups, ctx.delayed_channels
    )
    halos = (None, None) if inputs[7] is None else (d_halo, d_value_halo)
    return *of_inputs, None, *halos, None, None, None


_prologue.register_autograd(_gradients, setup_context=_save)


def cca_prologue(
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None = None,
    *,
    query_groups: int,
    delayed_channels: int | None = None,
    halo: Tensor | None = None,
    value_halo: Tensor | None = None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute query [s, b, n, d], key and value [s, b, g, d], contiguous, from the projections (arXiv 2510.04476;
    formulas: reference).

    Args:
        projected: [s, b, C + g d]: queries, keys, current values, delayed values, C = (n + g) d; rows with any strides.
        depthwise_weight, depthwise_bias, grouped_weight, grouped_bias: [C, 1, 2], [C], [C, d, 2] and [C], as
            torch.nn.Conv1d stores them.
        temperature: [g], a factor of the keys, in the tensors' dtype or fp32.
        rope: [s, 1 or b, r], fp32 (or fp64 with fp64 tensors): cos then sin of the angles of channels 0 .. r/2 - 1
            (`rope_table`); None: no rotation. No gradient.
        query_groups: g.
        delayed_channels: w, the number of last value channels that are taken from the row before; None: half of them.
        halo, value_halo: [k, 2, b, C] and [k, b, w]: for a sequence in k chunks of equal length, the last two rows of z
            and the last delayed values before each chunk; both or neither. None: the sequence starts at the first row.
        starts: bool [k, s / k + 1, b]: marks the first rows of documents, among the row before each chunk and the
            chunk's own rows.

    All but rope, starts and temperature share one dtype: bf16, fp32, or fp64, which the reference computes.
    Raises ValueError on wrong shapes, dtypes, devices or values.
    """
    values = projected.shape[-1] - len(grouped_bias)
    delayed = values // 2 if delayed_channels is None else delayed_channels
    weights = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias)
    return _prologue(projected, *weights, temperature, rope, halo, value_halo, starts, query_groups, delayed)[:3]


def rope_table(angles: Tensor) -> Tensor:
    """Return (cos, sin) in fp32 [s, 1 or b, r] for `cca_prologue`, of angles [s, 1 or b, 1, r] in radians, both halves
    equal (Megatron's rotary_pos_emb).
    """
    half = angles[:, :, 0, : angles.shape[-1] // 2]
    half = half.to(wide(half.dtype))
    return torch.cat((half.cos(), half.sin()), dim=-1)

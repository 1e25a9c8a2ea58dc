# SPDX-License-Identifier: Apache-2.0
"""CCA between its projections and attention, as one torch operator with gradients, for training, packed documents and decoding.

Formulas and the conventions that all back ends share are in hip_ops/reference/cca_prologue.py. Saved for the backward: the
inputs, query and key, which attention saves too, and one number a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import cca_prologue as reference

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
HEADS, GROUPS, HEAD_DIM = 8, 2, 128  # ZAYA1's


def _example(backward: bool):
    """ZAYA1's heads, two chunks with halos, two sequences with documents of odd lengths, and rows beyond one tile."""

    def make(device: torch.device) -> tuple:
        dtype, d, heads, batch, chunks, rows = torch.bfloat16, HEAD_DIM, HEADS + GROUPS, 2, 2, 69
        channels, values = heads * d, GROUPS * d

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(dtype)

        starts = torch.zeros(chunks, rows + 1, batch, dtype=torch.bool, device=device)
        starts[0, 1, 0] = starts[0, 33:35, 0] = starts[1, 0, 1] = starts[1, 2, 0] = starts[1, rows, 1] = True
        angles = torch.rand(chunks * rows, batch, d // 4, device=device) * 6.0
        inputs = (
            random(chunks * rows, batch, channels + values),
            random(channels, 1, 2),
            random(channels, scale=0.3),
            random(channels, d, 2, scale=(2 * d) ** -0.5),
            random(channels, scale=0.3),
            torch.tensor([0.7, 1.4], device=device, dtype=dtype),
            torch.cat((angles.cos(), angles.sin()), dim=-1),
            random(chunks, 2, batch, channels),
            random(chunks, batch, values // 2),
            starts,
            GROUPS,
            values // 2,
        )
        if not backward:
            return inputs
        query, key, value, inverse_norm = reference.cca_prologue(*inputs)
        return *(random(*t.shape) for t in (query, key, value)), *inputs[:10], query, key, inverse_norm, *inputs[10:]

    return make


def _operator(name: str) -> Operator:
    return Operator(
        name,
        torch=getattr(reference, name),
        triton=f"hip_ops.triton_kernels.cca_prologue:{name}",
        hip=f"hip_ops.hip_kernels.cca_prologue:{name}",
        example=_example(name.endswith("backward")),
        tolerance=2**-6,
    )


_prologue, _prologue_backward = _operator("cca_prologue"), _operator("cca_prologue_backward")


def _run(operator: Operator, dtype: torch.dtype, arguments: tuple) -> tuple[Tensor, ...]:
    """fp64 is for checking and runs in plain torch."""
    return (operator.reference if dtype == torch.float64 else operator)(*arguments)


@direct_operator("hip_ops::cca_prologue", mutates_args=())
def _op(
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None,
    halo: Tensor | None,
    value_halo: Tensor | None,
    starts: Tensor | None,
    query_groups: int,
    delayed_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    arguments = (
        projected,
        depthwise_weight,
        depthwise_bias,
        grouped_weight,
        grouped_bias,
        temperature,
        rope,
        halo,
        value_halo,
        starts,
        query_groups,
        delayed_channels,
    )
    return _run(_prologue, projected.dtype, arguments)


@_op.register_fake
def _(
    projected,
    depthwise_weight,
    depthwise_bias,
    grouped_weight,
    grouped_bias,
    temperature,
    rope,
    halo,
    value_halo,
    starts,
    query_groups,
    delayed_channels,
):
    rows, d = projected.shape[:2], grouped_weight.shape[1]
    heads = grouped_bias.shape[0] // d
    query, *keys = (
        projected.new_empty((*rows, count, d)) for count in (heads - query_groups, query_groups, query_groups)
    )
    return query, *keys, projected.new_empty((heads, *rows), dtype=reference.compute_dtype(projected))


@direct_operator("hip_ops::cca_prologue_backward", mutates_args=())
def _backward_op(
    d_query: Tensor,
    d_key: Tensor,
    d_value: Tensor,
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None,
    halo: Tensor | None,
    value_halo: Tensor | None,
    starts: Tensor | None,
    query: Tensor,
    key: Tensor,
    inverse_norm: Tensor,
    query_groups: int,
    delayed_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    arguments = (
        d_query,
        d_key,
        d_value,
        projected,
        depthwise_weight,
        depthwise_bias,
        grouped_weight,
        grouped_bias,
        temperature,
        rope,
        halo,
        value_halo,
        starts,
        query,
        key,
        inverse_norm,
        query_groups,
        delayed_channels,
    )
    return _run(_prologue_backward, projected.dtype, arguments)


@_backward_op.register_fake
def _(
    d_query,
    d_key,
    d_value,
    projected,
    depthwise_weight,
    depthwise_bias,
    grouped_weight,
    grouped_bias,
    temperature,
    rope,
    halo,
    value_halo,
    *_,
):
    given = (projected, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature, halo, value_halo)
    return tuple(projected.new_empty(0) if t is None else t.new_empty(t.shape) for t in given)


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.query_groups, ctx.delayed_channels = inputs
    query, key, _, inverse_norm = output
    ctx.mark_non_differentiable(inverse_norm)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, query, key, inverse_norm)


def _gradients(ctx, d_query, d_key, d_value, _):
    projected, *rest = ctx.saved_tensors
    query, key = rest[9:11]
    # The kernels always read all three: zeros where a result was not used.
    upstream = [
        torch.zeros(like.shape, dtype=like.dtype, device=like.device) if given is None else given
        for given, like in ((d_query, query), (d_key, key), (d_value, key))
    ]
    d_projected, *d_parameters, d_halo, d_value_halo = _backward_op(
        *upstream, projected, *rest, ctx.query_groups, ctx.delayed_channels
    )
    halo, value_halo = rest[6:8]
    return (
        d_projected,
        *d_parameters,
        None,
        None if halo is None else d_halo,
        None if value_halo is None else d_value_halo,
        None,
        None,
        None,
    )


_op.register_autograd(_gradients, setup_context=_save)


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
    """query [s, b, n, d], key and value [s, b, g, d], contiguous, from the projections (arXiv 2510.04476; formulas: reference).

    Args:
        projected [s, b, C + g d]: queries, keys, current values, delayed values, C = (n + g) d; rows with any strides.
        depthwise_weight [C, 1, 2], depthwise_bias [C], grouped_weight [C, d, 2], grouped_bias [C], as torch.nn.Conv1d stores them.
        temperature [g], the length of the keys; in the tensors' dtype or fp32.
        rope [s, 1 or b, r], fp32 (or fp64 like the rest): cos then sin of the angles of channels 0 .. r/2 - 1 (`rope_table`); None: no rotation. No gradient.
        query_groups g. delayed_channels w: how many of the last value channels lag one row; None: half of them.
        halo [k, 2, b, C] and value_halo [k, b, w]: the sequence comes in k chunks of equal length, and these are the two last
            rows of z and the last delayed values before each; both or none. None: nothing precedes.
        starts bool [k, s / k + 1, b]: the row before each chunk and its own that are the first of a document (`document_starts`).

    All but rope, starts and temperature share one dtype: bf16, fp32, or fp64, which the torch reference computes.
    Raises ValueError on wrong shapes, dtypes, devices or values.
    """
    values = query_groups * grouped_weight.shape[1] if query_groups > 0 and grouped_weight.dim() == 3 else 0
    delayed = values // 2 if delayed_channels is None else delayed_channels
    tensors = {
        "projected": projected,
        "depthwise_weight": depthwise_weight,
        "depthwise_bias": depthwise_bias,
        "grouped_weight": grouped_weight,
        "grouped_bias": grouped_bias,
        "temperature": temperature,
        "rope": rope,
        "halo": halo,
        "value_halo": value_halo,
        "starts": starts,
    }
    _check(tensors, query_groups, delayed)
    return _op(*tensors.values(), query_groups, delayed)[:3]


def _fail(name: str, value, allowed: str) -> None:
    raise ValueError(f"hip_ops.cca_prologue: {name} {value}; it must be {allowed}")


def _check(tensors: dict[str, Tensor | None], query_groups: int, delayed: int) -> None:
    projected, grouped_weight = tensors["projected"], tensors["grouped_weight"]
    if grouped_weight.dim() != 3 or grouped_weight.shape[1] < 1:
        _fail("grouped_weight", f"has shape {tuple(grouped_weight.shape)}", "[C, d, 2]")
    channels, d = grouped_weight.shape[:2]
    if channels % d or query_groups < 1 or channels // d % query_groups or channels // d < 2 * query_groups:
        _fail(
            "query_groups",
            f"is {query_groups}",
            f"a divisor of the number of query heads, {channels} channels being those and as many key heads of {d}",
        )
    if not 0 <= delayed <= query_groups * d:
        _fail("delayed_channels", f"is {delayed}", f"from 0 to {query_groups * d}, the value channels")
    if projected.dim() != 3 or projected.shape[2] != channels + query_groups * d:
        _fail("projected", f"has shape {tuple(projected.shape)}", f"[s, b, {channels + query_groups * d}]")
    s, b = projected.shape[:2]
    chunks = next((len(tensors[name]) for name in ("halo", "value_halo", "starts") if tensors[name] is not None), 1)
    if chunks < 1 or s % chunks:
        _fail(
            "halo, value_halo and starts", f"tell of {chunks} chunks", f"of as many as divide the {s} rows of projected"
        )
    if (tensors["halo"] is None) != (tensors["value_halo"] is None):
        _fail("halo and value_halo", "came alone", "given both or not at all")
    shapes = {
        "depthwise_weight": (channels, 1, 2),
        "depthwise_bias": (channels,),
        "grouped_weight": (channels, d, 2),
        "grouped_bias": (channels,),
        "temperature": (query_groups,),
        "halo": (chunks, 2, b, channels),
        "value_halo": (chunks, b, delayed),
        "starts": (chunks, s // chunks + 1, b),
    }
    for name, shape in shapes.items():
        if tensors[name] is not None and tensors[name].shape != shape:
            _fail(name, f"has shape {tuple(tensors[name].shape)}", f"{shape}")
    rope = tensors["rope"]
    if rope is not None and not (
        rope.dim() == 3
        and rope.shape[0] == s
        and rope.shape[1] in (1, b)
        and 0 < rope.shape[2] <= d
        and rope.shape[2] % 2 == 0
    ):
        _fail("rope", f"has shape {tuple(rope.shape)}", f"[{s}, 1 or {b}, r] with an even r up to {d}")
    if projected.dtype not in DTYPES:
        _fail("projected", f"is {projected.dtype}", ", ".join(map(str, DTYPES[:-1])) + f" or {DTYPES[-1]}")
    compute = reference.compute_dtype(projected)
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if tensor.device != projected.device:
            _fail(name, f"is on {tensor.device}", f"on {projected.device} like projected")
        allowed = {
            "starts": (torch.bool,),
            "rope": (torch.float32, compute),
            "temperature": (projected.dtype, compute),
        }.get(name, (projected.dtype,))
        if tensor.dtype not in allowed:
            _fail(name, f"is {tensor.dtype}", " or ".join(map(str, dict.fromkeys(allowed))))


def rope_table(angles: Tensor) -> Tensor:
    """(cos, sin) in fp32 [s, 1 or b, r] for `cca_prologue`, of angles [s, 1 or b, 1, r] in radians whose halves are equal (Megatron's rotary_pos_emb)."""
    half = angles[:, :, 0, : angles.shape[-1] // 2]
    half = half.to(torch.promote_types(half.dtype, torch.float32))
    return torch.cat((half.cos(), half.sin()), dim=-1)


def document_starts(cu_seqlens: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Documents packed one behind the other: (starts bool [1, rows + 1, 1], positions int64 [rows] inside the documents).

    cu_seqlens: integers [documents + 1], the row where each document starts, then `rows`; equal neighbours are empty documents.
    Nothing waits for the device. `rope[positions]` restarts the rotation with each document.
    """
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"hip_ops.document_starts: cu_seqlens is {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}; it must be integers [documents + 1]"
        )
    starts = torch.zeros(rows + 2, dtype=torch.bool, device=cu_seqlens.device)
    starts[cu_seqlens.long() + 1] = True  # the end of the last document falls on the row that is cut off
    starts[0] = True
    starts = starts[:-1]
    steps = torch.arange(rows, device=cu_seqlens.device)
    return starts.view(1, -1, 1), steps - torch.where(starts[1:], steps, 0).cummax(0).values


@dataclass
class DecodeState:
    """What the next tokens need of the past: conv [2, b, C], the last two rows of z, and value [b, w], the last delayed values.

    transformers' cache holds the same as conv state [b, C, 2] and recurrent state [b, w].
    """

    conv: Tensor
    value: Tensor

    @classmethod
    def empty(
        cls, batch: int, channels: int, delayed_channels: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> DecodeState:
        """Before a sequence: zeros, as z and the delayed values are there."""
        return cls(
            torch.zeros(2, batch, channels, dtype=dtype, device=device),
            torch.zeros(batch, delayed_channels, dtype=dtype, device=device),
        )

    def advance(self, projected: Tensor) -> None:
        """Takes in the tokens projected [t, b, C + g d], in place (so a captured graph may hold the state)."""
        channels, delayed = self.conv.shape[-1], self.value.shape[-1]
        self.conv.copy_(torch.cat((self.conv, projected[-2:, :, :channels]))[-2:])
        self.value.copy_(projected[-1, :, projected.shape[-1] - delayed :])


def cca_prologue_step(
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None = None,
    *,
    query_groups: int,
    state: DecodeState,
) -> tuple[Tensor, Tensor, Tensor]:
    """The next t >= 1 tokens of b sequences, projected [t, b, C + g d]: query, key and value as cca_prologue; `state` moves on, in place.

    A prompt is the first step, from the empty state. No gradients.
    """
    with torch.no_grad():
        found = cca_prologue(
            projected,
            depthwise_weight,
            depthwise_bias,
            grouped_weight,
            grouped_bias,
            temperature,
            rope,
            query_groups=query_groups,
            delayed_channels=state.value.shape[-1],
            halo=state.conv.unsqueeze(0),
            value_halo=state.value.unsqueeze(0),
        )
        if len(projected):
            state.advance(projected)
    return found

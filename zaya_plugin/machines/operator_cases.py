# SPDX-License-Identifier: Apache-2.0
"""The arguments of every operator of hip_ops in a step of ZAYA1-base: 4 sequences of 4,096 tokens a micro-batch.

A case repeats what the model passes (zaya_plugin/model/), in bf16 with an fp32 stream. Numbers are random; those of a
backward pass that a forward pass saves come from its reference.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hip_ops.newton_schulz_form import newton_schulz_flops
from hip_ops.ops.linear_cross_entropy.passes import parts_for
from hip_ops.ops.newton_schulz.plan import coefficient_triples, make_plan
from hip_ops.saved_bytes import parts_of_exponentials

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Sizes:
    """Sizes of a step. chunk: tokens whose logits exist at once. matrices: of a call of Newton-Schulz."""

    rows: int = 4096
    batch: int = 4
    hidden: int = 2048
    heads: int = 8
    groups: int = 2
    head_dim: int = 128
    experts: int = 16
    ffn: int = 2048
    router: int = 256
    classes: int = 262_272
    chunk: int = 2048
    matrices: int = 16

    @property
    def tokens(self) -> int:
        return self.rows * self.batch


ZAYA1_BASE = Sizes()
SMALL = Sizes(64, 2, 256, 8, 2, 32, 16, 256, 32, 4096, 64, 2)  # for a CPU


@dataclass(frozen=True)
class Case:
    """A call of an operator.

    Attributes:
        make: sizes, device -> its arguments. flops: of its products, for operators that are limited by them.
        traffic: the bytes that it must move; None: all arguments once, results once, and what it changes twice.
        ulps: the largest error that the reference itself may have against fp64, in ULP of bf16.
        chooses: it is the router, whose choices decide some of its results (`operators.routed`).
        operator: its name, where it is not the case's.
    """

    make: Callable[[Sizes, torch.device], tuple]
    flops: Callable[[Sizes], float] | None = None
    traffic: Callable[[Sizes], float] | None = None
    ulps: float = 2.0
    chooses: bool = False
    operator: str | None = None


def _normal(device: torch.device, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype=BF16) -> Tensor:
    return torch.randn(shape, device=device).mul_(scale).add_(mean).to(dtype)


def _reference(folder: str, name: str, *arguments):
    return getattr(importlib.import_module(f"hip_ops.ops.{folder}.reference"), name)(*arguments)


def _norm(sizes: Sizes, device: torch.device, scaled: bool, backward: bool, centered: bool) -> tuple:
    """scaled: ZAYA's merge, else the plain one. centered: LayerNorm, else RMSNorm."""
    shape, h = (sizes.rows, sizes.batch, sizes.hidden), sizes.hidden
    of_stream = FP32 if scaled else BF16  # as the fast kernels take it
    output, residual = _normal(device, *shape), _normal(device, *shape, dtype=of_stream)
    *merge, weight = (_normal(device, h, scale=0.3, mean=mean) for mean in (0, 1, 0, 1, 1))
    vectors = (*(merge if scaled else [None] * 4), weight)
    inputs = (output, residual, *vectors, _normal(device, h) if centered else None, 1e-5)
    if not backward:
        return inputs
    _, new_residual, mean, rstd = _reference("rms_norm", "merge_norm", *inputs)
    upstream = _normal(device, *shape), _normal(device, *shape, dtype=of_stream)
    rows = (output, residual) if scaled else (None, new_residual)
    return *upstream, *rows, mean if centered else None, rstd, *vectors, BF16


def _prologue(sizes: Sizes, device: torch.device, backward: bool) -> tuple:
    d, groups, s, b = sizes.head_dim, sizes.groups, sizes.rows, sizes.batch
    channels, values = (sizes.heads + groups) * d, groups * d
    angles = torch.rand(s, 1, d // 4, device=device) * 6.0
    inputs = (
        _normal(device, s, b, channels + values),
        _normal(device, channels, 1, 2),
        _normal(device, channels, scale=0.3),
        _normal(device, channels, d, 2, scale=(2 * d) ** -0.5),
        _normal(device, channels, scale=0.3),
        _normal(device, groups, scale=0.3, mean=1.0),
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        *(None, None, None),
    )
    sizes_of = (groups, values // 2)
    if not backward:
        return *inputs, *sizes_of
    query, key, value, inverse_norm = _reference("cca_prologue", "cca_prologue", *inputs, *sizes_of)
    upstream = (_normal(device, *tensor.shape) for tensor in (query, key, value))
    return *upstream, *inputs, query, key, inverse_norm, *sizes_of


def _router(sizes: Sizes, device: torch.device, backward: bool) -> tuple:
    n, r, c = sizes.tokens, sizes.router, sizes.experts + 1
    projected, previous = _normal(device, n, r), _normal(device, n, r)
    gamma, b_down, w_norm = _normal(device, r), _normal(device, r), _normal(device, r, scale=0.25, mean=1.0)
    w1, w2 = (_normal(device, r, r, scale=r**-0.5) for _ in range(2))
    b1, b2 = (_normal(device, r, scale=0.25) for _ in range(2))
    w_out, biases = _normal(device, c, r, scale=0.5), _normal(device, c, scale=1 / 16, dtype=FP32)
    inputs = (projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, None, 1e-5, c - 1)
    if not backward:
        return inputs
    state, weights, ids, hidden1, hidden2, logits, _ = _reference("router_mlp", "router_mlp", *inputs)
    saved = (state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out)
    return torch.randn_like(weights), torch.randn_like(state), *saved, 1e-5, c - 1, True


def _ids(sizes: Sizes, device: torch.device, skipping: bool) -> Tensor:
    """Make an expert for every token; with `skipping` some belong to no expert, as those of ZAYA1's 17th class."""
    return torch.randint(sizes.experts + skipping, (sizes.tokens,), device=device)


def _gathered(sizes: Sizes, device: torch.device) -> tuple:
    order = _reference("expert_permutation", "sort_by_expert", _ids(sizes, device, True), sizes.experts)
    return _normal(device, sizes.tokens, sizes.hidden), *order[:2], torch.rand(sizes.tokens, device=device)


def _offsets(sizes: Sizes, device: torch.device, skipping: bool) -> Tensor:
    ids = _ids(sizes, device, skipping)
    return _reference("expert_permutation", "sort_by_expert", ids, sizes.experts)[3]


def _swiglu(sizes: Sizes, device: torch.device, backward: bool) -> tuple:
    n, f = sizes.tokens, sizes.ffn
    inputs = _normal(device, n, 2 * f), torch.rand(n, device=device), _offsets(sizes, device, True)
    return (_normal(device, n, f), *inputs, True) if backward else inputs


def _grouped_rows(sizes: Sizes, device: torch.device) -> tuple:
    """The experts' first product; a token of no expert would leave a row that a version need not write."""
    matrices = _normal(device, sizes.experts, 2 * sizes.ffn, sizes.hidden, scale=sizes.hidden**-0.5)
    return _normal(device, sizes.tokens, sizes.hidden), matrices.mT, _offsets(sizes, device, False)


def _grouped_outer(sizes: Sizes, device: torch.device) -> tuple:
    out = _normal(device, sizes.experts, 2 * sizes.ffn, sizes.hidden, dtype=FP32)
    rows = _normal(device, sizes.tokens, 2 * sizes.ffn), _normal(device, sizes.tokens, sizes.hidden)
    return out, *rows, _offsets(sizes, device, True), True


def _dense_product(sizes: Sizes, device: torch.device, of: str) -> tuple:
    """A chunk's logits, or from a gradient of the logits that of hidden or of the weight."""
    hidden, weight = _normal(device, sizes.chunk, sizes.hidden), _normal(device, sizes.classes, sizes.hidden)
    logits = _normal(device, sizes.chunk, sizes.classes)
    return {
        "logits": (logits, hidden, weight.t(), False),
        "hidden": (hidden.float(), logits, weight, False),
        "weight": (weight.float(), logits.t(), hidden, True),
    }[of]


def _newton_schulz(sizes: Sizes, device: torch.device) -> tuple:
    """Halves of the experts' first matrices; fp16 inside, as experiment=zaya1_base."""
    triples = coefficient_triples("simple", 5)
    plan = make_plan(triples, sizes.hidden, sizes.hidden, torch.float16)
    flat = tuple(value for triple in triples for value in triple)
    x = _normal(device, sizes.matrices, sizes.hidden, sizes.hidden)
    return x, None, flat, plan.form, plan.restarts, torch.float16, 1e-7


def _matrices(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [_normal(device, sizes.hidden, sizes.hidden, dtype=dtype) for _ in range(sizes.matrices)]


def _momentum(sizes: Sizes, device: torch.device) -> tuple:
    gradients, momenta = (_matrices(sizes, device, FP32) for _ in range(2))
    sums = torch.zeros(sizes.matrices, device=device)
    return gradients, momenta, _matrices(sizes, device, BF16), sums, None, None, 0.95, True


def _update(sizes: Sizes, device: torch.device) -> tuple:
    lists = [_matrices(sizes, device, dtype) for dtype in (BF16, FP32, BF16)]
    return *lists, [0.2 * sizes.hidden**0.5] * sizes.matrices, 6e-4, None, 0.1, None


def _head(sizes: Sizes, device: torch.device, operator: str) -> tuple:
    logits = _normal(device, sizes.chunk, sizes.classes, scale=2.0)
    labels, grad = (torch.randint(sizes.classes, (sizes.chunk,), device=device), torch.rand(sizes.chunk, device=device))
    folder, parts = "linear_cross_entropy", parts_of_exponentials(sizes.classes)
    if operator == "row_statistics":
        return logits, labels, 0, parts_for(logits)
    if operator == "overwrite_with_exponentials":
        return logits, labels, 0, parts
    if operator == "overwrite_with_gradient":
        statistics = _reference(folder, "row_statistics", logits, labels, 0, 1)
        return logits, labels, 0, _reference(folder, "combined", statistics)[0], grad, 0.0
    statistics = _reference(folder, "overwrite_with_exponentials", logits, labels, 0, parts)
    return logits, labels, 0, statistics, 0, parts, grad, 0.0


def _rows_of_embedding(sizes: Sizes, device: torch.device) -> tuple:
    total = _normal(device, sizes.classes, sizes.hidden, dtype=FP32)
    ids = torch.randint(sizes.classes, (sizes.tokens,), device=device)
    return total, ids, _normal(device, sizes.tokens, sizes.hidden)


def _addition(sizes: Sizes, device: torch.device) -> tuple:
    shape = sizes.classes // 8, sizes.hidden
    return _normal(device, *shape, dtype=FP32), _normal(device, *shape)


def _head_flops(sizes: Sizes) -> float:
    return 2.0 * sizes.chunk * sizes.hidden * sizes.classes


def _expert_flops(sizes: Sizes) -> float:
    return 4.0 * sizes.tokens * sizes.hidden * sizes.ffn


# The stream is rounded to bf16 before its statistics: 1 ULP, which counts twice where the result's exponent rises, and
# more with LayerNorm's bias. 2.02 and 2.61 ULP on an H200.
NORM_ULPS = {"add_rms_norm": 2.5, "add_layer_norm": 4.0}

CASES = {
    **{
        f"{merge}_{kind}{suffix}": Case(
            partial(_norm, scaled=merge == "scaled_residual", backward=bool(suffix), centered=kind == "layer_norm"),
            ulps=NORM_ULPS.get(f"{merge}_{kind}{suffix}", 2.0),
            operator=f"merge_norm{suffix}",
        )
        for kind in ("rms_norm", "layer_norm")
        for suffix in ("", "_backward")
        for merge in ("add", "scaled_residual")
    },
    "cca_prologue": Case(partial(_prologue, backward=False), ulps=12.0),  # it rounds between the convolutions
    "cca_prologue_backward": Case(partial(_prologue, backward=True), ulps=12.0),
    # it rounds between the products: 12.4 ULP backward on an H200
    "router_mlp": Case(partial(_router, backward=False), ulps=25.0, chooses=True),
    "router_mlp_backward": Case(partial(_router, backward=True), ulps=25.0),
    "sort_by_expert": Case(lambda sizes, device: (_ids(sizes, device, True), sizes.experts)),
    "gather_rows": Case(_gathered),
    "weighted_swiglu": Case(partial(_swiglu, backward=False)),
    "weighted_swiglu_backward": Case(partial(_swiglu, backward=True)),
    "grouped_rows": Case(_grouped_rows, flops=_expert_flops),
    "grouped_outer_": Case(_grouped_outer, flops=_expert_flops),
    **{
        f"dense_product_, {of}": Case(partial(_dense_product, of=of), flops=_head_flops, operator="dense_product_")
        for of in ("logits", "hidden", "weight")
    },
    "newton_schulz": Case(
        _newton_schulz,
        flops=lambda sizes: sizes.matrices * newton_schulz_flops(sizes.hidden, sizes.hidden),
        ulps=16.0,  # five steps amplify the roundings of fp16
    ),
    "muon_momentum_": Case(_momentum),
    "muon_update_": Case(_update),
    "row_statistics": Case(partial(_head, operator="row_statistics")),
    "overwrite_with_gradient": Case(partial(_head, operator="overwrite_with_gradient")),
    "overwrite_with_exponentials": Case(partial(_head, operator="overwrite_with_exponentials")),
    "finish_gradient": Case(partial(_head, operator="finish_gradient")),
    # each row of fp32 read and written, each row of bf16 read
    "add_rows_": Case(_rows_of_embedding, traffic=lambda sizes: 10.0 * sizes.tokens * sizes.hidden),
    "add_gradient_": Case(_addition),
}


def cases_of(operator: str) -> dict[str, Case]:
    """Return the cases of an operator by their names."""
    return {name: case for name, case in CASES.items() if (case.operator or name) == operator}

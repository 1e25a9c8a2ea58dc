# SPDX-License-Identifier: Apache-2.0
"""A stand-in for AITER (github.com/ROCm/aiter): its modules and recorded signatures, computed by torch.

Not AITER, and no evidence of its numbers: the tests show that our calls fit the recorded releases, and that the
reported defects are detected. aiter-<version>.json holds the signatures, made from a clone of the repository by

    python tools/record_signatures.py CLONE --rev v<version> --doc '^[qkv]: \\(|bottom right|row-major|stride \\(' \\
        --symbols <SYMBOLS below> > tests/stand_ins/aiter-<version>.json

VERSIONS are the newest of each of the last three minor releases on 2026-08-22, and the one that Primus pins.
`ops/triton/utils/gmm_common.py` is the source of the layouts that gmm and ptgmm of this file refuse.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hip_ops import errors
from hip_ops.runtime import aiter as runtime_aiter
from hip_ops.runtime.aiter import Function

VERSIONS = ("0.1.14.post1", "0.1.18", "0.1.19.post2", "0.1.20.post1")
GMM = "aiter.ops.triton.gmm"
SYMBOLS = (
    "aiter.flash_attn_func",
    "aiter.ops.mha.FlashAttnFunc",
    "aiter.ops.triton.attention.mha.flash_attn_func",
    *(f"{GMM}.{name}" for name in ("gmm", "ptgmm", "nptgmm")),
    "aiter.ops.triton.utils.gmm_common.DTYPE",
)
# inf: gradients that are not finite (AMD-AGI/Primus#764). raises: a failure in the backward pass (ROCm/aiter#3139 hangs
# the device, which no check survives). lost: a missing gradient. wrong: one gradient is a tenth too large.
DEFECTS = ("inf", "raises", "lost", "wrong")


def recorded(version: str) -> dict:
    """Return the symbols of a release, by name."""
    return json.loads((Path(__file__).parent / f"aiter-{version}.json").read_text())["symbols"]


def signature_of(parameters: list[dict]) -> inspect.Signature:
    """Return the recorded signature; its defaults are evaluated, with gmm_common's DTYPE, bf16."""
    return inspect.Signature(
        [
            inspect.Parameter(
                each["name"],
                inspect._ParameterKind[each["kind"]],
                default=eval(each["default"], {"DTYPE": torch.bfloat16})
                if "default" in each
                else inspect.Parameter.empty,
            )
            for each in parameters
        ]
    )


def install(monkeypatch: pytest.MonkeyPatch, version: str, defect: str | None = None) -> dict[str, list[dict]]:
    """Make `import aiter` give the stand-in of a release; returns the arguments of all calls by function."""
    assert defect in (None, *DEFECTS)
    monkeypatch.setattr(runtime_aiter, "installed", lambda: version)
    # Forget earlier results.
    monkeypatch.setattr(Function, "_resolved", functools.cache(Function._resolved.__wrapped__))
    monkeypatch.setattr(errors, "_warnings", set())
    symbols, calls, computing = recorded(version), {}, Computing(defect)
    for symbol, data in symbols.items():
        if data["kind"] == "function":
            name = symbol.rpartition(".")[2]
            seen = calls.setdefault(name, [])
            _put(monkeypatch, symbol, _strict(data, getattr(computing, name), seen))
    return calls


def _put(monkeypatch: pytest.MonkeyPatch, symbol: str, value: Callable) -> None:
    parts = symbol.split(".")
    for depth in range(1, len(parts)):
        name = ".".join(parts[:depth])
        if not isinstance(sys.modules.get(name), StandIn):
            monkeypatch.setitem(sys.modules, name, StandIn(name))
        if depth > 1:
            setattr(sys.modules[name.rpartition(".")[0]], parts[depth - 1], sys.modules[name])
    setattr(sys.modules[name], parts[-1], value)


class StandIn(types.ModuleType):
    """A module of the stand-in."""

    __path__ = ()


def _strict(data: dict, compute: Callable, calls: list[dict]) -> Callable:
    """Make a function that binds its arguments to the recorded signature and calls `compute` with all of them."""
    signature = signature_of(data["parameters"])

    def function(*positional, **named):
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        calls.append(bound.arguments)
        return compute(**bound.arguments)

    function.__signature__ = signature
    return function


class Computing:
    """What the functions compute, with the roundings and layouts of the sources, and one defect."""

    def __init__(self, defect: str | None):
        self.defect = defect

    def _spoil(self, gradient: Tensor) -> None:
        """Apply the defect to a gradient in place."""
        if self.defect == "raises":
            raise RuntimeError("HIP error: an illegal memory access was encountered")
        if self.defect == "inf":
            gradient[..., 3] = torch.inf
        if self.defect == "lost":
            gradient.zero_()
        if self.defect == "wrong":
            gradient *= 1.1

    # gmm.py: groups of rows

    def gmm(self, lhs, rhs, group_sizes, preferred_element_type, existing_out, **others):
        assert all(value in (None, False) for value in others.values())
        (m, k), groups, n = lhs.shape, len(group_sizes), rhs.shape[2]
        assert m > 0 and rhs.shape == (groups, k, n) and lhs.dtype == rhs.dtype and lhs.stride() == (k, 1)
        assert group_sizes.dtype in (torch.int32, torch.int64)
        matches = [
            rhs.stride() == (k * n, n, 1),
            rhs.stride() == (k * n, 1, k),
            k == n and rhs.stride() == (k * n, k, 1),
        ]
        assert sum(matches) == 1, "rhs must match exactly one supported layout"
        out = torch.full((m, n), torch.nan, dtype=preferred_element_type) if existing_out is None else existing_out
        for group, (start, end) in enumerate(self._groups(group_sizes)):
            out[start:end] = (lhs[start:end].float() @ rhs[group].float()).to(out.dtype)
        return out

    def ptgmm(self, lhs, rhs, group_sizes, preferred_element_type, existing_out, accumulate, **others):
        return self._tgmm(lhs, rhs, group_sizes, preferred_element_type, existing_out, accumulate, others, skips=False)

    def nptgmm(self, lhs, rhs, group_sizes, preferred_element_type, existing_out, accumulate, **others):
        return self._tgmm(lhs, rhs, group_sizes, preferred_element_type, existing_out, accumulate, others, skips=True)

    def _tgmm(self, lhs, rhs, group_sizes, dtype, existing_out, accumulate, others, skips: bool):
        assert all(value is None for value in others.values())
        (k, m), groups, n = lhs.shape, len(group_sizes), rhs.shape[1]
        assert m > 0 and rhs.shape == (m, n) and rhs.stride() == (n, 1) and lhs.dtype == rhs.dtype
        assert (lhs.stride() == (m, 1)) + (lhs.stride() == (1, k)) == 1, "lhs must match exactly one supported layout"
        out = torch.full((groups, k, n), torch.nan, dtype=dtype) if existing_out is None else existing_out
        assert out.dtype == dtype and out.shape == (groups, k, n) and out.stride() == (k * n, n, 1)
        for group, (start, end) in enumerate(self._groups(group_sizes)):
            if start == end and skips:
                continue
            product = (lhs[:, start:end].float() @ rhs[start:end].float()).to(dtype)
            out[group] = out[group] + product if accumulate else product
        self._spoil(out)
        return out

    @staticmethod
    def _groups(sizes: Tensor) -> list[tuple[int, int]]:
        ends = sizes.cumsum(0).tolist()
        return [*zip([0, *ends], ends, strict=False)]

    # mha.py: [batch, sequence, heads, head dimension], the causal mask aligned at the lower right

    def flash_attn_func(
        self,
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        deterministic,
        return_lse,
        return_attn_probs,
        **others,
    ):
        assert all(value in (None, 0, 1) for value in others.values()) and not dropout_p and not return_attn_probs
        assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype
        assert (
            q.shape[2] % k.shape[2] == 0
            and k.shape[:3] == v.shape[:3]
            and len(window_size) == 3
            and not window_size[2] > 0
        )
        computing, training = self, torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        assert return_lse or not training, "FlashAttnFunc.forward: assert return_lse"

        def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            groups = q.shape[2] // k.shape[2]
            q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            scores = q @ k.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
            if causal:
                s, t = scores.shape[-2:]
                seen = torch.ones(s, t, dtype=torch.bool).tril(t - s)
                if window_size[0] >= 0:
                    assert window_size[1] == 0
                    seen = seen.triu(t - s - window_size[0])
                scores = scores.masked_fill(~seen, -torch.inf)
            return (scores.softmax(-1).nan_to_num() @ v).transpose(1, 2), scores.logsumexp(-1)

        class Flash(torch.autograd.Function):
            @staticmethod
            def forward(ctx, q, k, v):
                ctx.save_for_backward(q, k, v)
                out, lse = attention(q, k, v)
                return (out.to(q.dtype), lse) if return_lse else out.to(q.dtype)

            @staticmethod
            def backward(ctx, dout, *rest):
                with torch.enable_grad():
                    inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
                    out, _ = attention(*inputs)
                    dq, dk, dv = torch.autograd.grad(out, inputs, dout.float())
                computing._spoil(dk)
                return (dq, None if computing.defect == "lost" else dk, dv)

        return Flash.apply(q, k, v)

# SPDX-License-Identifier: Apache-2.0
"""A stand-in for Transformer Engine, for tests on a CPU: not Transformer Engine, and no evidence of its numbers or speed.

With this folder's parent on PYTHONPATH, Megatron's own wrappers (megatron.core.extensions.transformer_engine) are built
on it. `Linear` and `DotProductAttention` bind their arguments to the signatures recorded from the release named by
STAND_IN_TE, have its extra state, and compute by plain torch. Any other name is a class that cannot be made.
The modules of ABSENT cannot be imported: Megatron then takes its own functions, since the real ones need a GPU.

tests/stand_ins/transformer_engine-<version>.json are made from a checkout or an unpacked wheel by

    python tools/record_signatures.py CHECKOUT --symbols transformer_engine.pytorch.Linear \\
        transformer_engine.pytorch.DotProductAttention \\
        transformer_engine.pytorch.module.base.TransformerEngineBaseModule \\
        --methods __init__ forward get_extra_state set_extra_state
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.nn.functional as F

__version__ = os.environ.get("STAND_IN_TE", "2.20.2")
DATA = Path(__file__).parents[2] / f"transformer_engine-{__version__}.json"
SYMBOLS = json.loads(DATA.read_text())["symbols"]
MODULE = "transformer_engine.pytorch.module.base.TransformerEngineBaseModule"
ABSENT = ("transformer_engine.pytorch.optimizers", "transformer_engine.pytorch.cpu_offload")
EMPTY = "torch.empty(0, dtype=torch.uint8)"


def signature_of(symbol: str, method: str) -> inspect.Signature:
    """Return the recorded signature; defaults other than literals become None."""
    parameters = []
    for each in SYMBOLS[symbol]["methods"][method]["parameters"]:
        default = inspect.Parameter.empty
        if "default" in each:
            text = each["default"]
            default = None if "(" in text or "." in text.strip("0123456789.") else eval(text)
        parameters.append(inspect.Parameter(each["name"], inspect._ParameterKind[each["kind"]], default=default))
    return inspect.Signature(parameters)


def bound(function):
    """Bind a method's arguments to the recorded signature and pass them by name."""

    @functools.wraps(function)
    def checked(self, *args, **named):
        symbol = (
            f"transformer_engine.pytorch.{next(c.__name__ for c in type(self).__mro__ if c.__module__ == __name__)}"
        )
        arguments = signature_of(symbol, function.__name__).bind(self, *args, **named)
        arguments.apply_defaults()
        return function(**arguments.arguments)

    return checked


class ExtraState(torch.nn.Module):
    """Saves what the release saves without fp8, and takes back what it takes back."""

    def get_extra_state(self) -> torch.Tensor:
        first = SYMBOLS[MODULE]["methods"]["get_extra_state"]["returns"][0]["source"]
        assert first == EMPTY, f"Transformer Engine {__version__} saves {first} without fp8"
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor | None) -> None:
        assert state is None or state.numel() == 0, "an fp8 state"


class AddsToMainGrad(torch.autograd.Function):
    """x W^T whose weight gradient is added to weight.main_grad, as with fuse_wgrad_accumulation=True.

    In the first micro-batch it replaces main_grad, and the gradient that autograd gets is memory without a value, as in
    transformer_engine/pytorch/module/linear.py.
    """

    @staticmethod
    def forward(ctx, x, weight, first):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.first = weight, first
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        product = grad.flatten(0, -2).t().float() @ x.flatten(0, -2).float()
        if ctx.first:
            ctx.weight.main_grad.copy_(product)
        else:
            ctx.weight.main_grad += product
        ctx.weight.grad_added_to_main_grad = True
        return grad @ weight, torch.full_like(weight, torch.nan), None


class Linear(ExtraState):
    """y = x W^T; column: W [out / t, in], row: W [out, in / t] of t tensor-parallel ranks."""

    @bound
    def __init__(self, in_features, out_features, **given):
        super().__init__()
        assert given["bias"] is False and given["return_bias"] is False
        self.parallel_mode, self.tp_group = given["parallel_mode"], given["tp_group"]
        self.sequence_parallel = given["sequence_parallel"] and given["tp_size"] > 1
        self.fuse_wgrad_accumulation = given["fuse_wgrad_accumulation"]
        rows, columns = out_features, in_features
        if self.parallel_mode == "column":
            rows //= given["tp_size"]
        elif self.parallel_mode == "row":
            columns //= given["tp_size"]
        shape = rows, columns
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=given["params_dtype"], device=given["device"]))
        # as set_tensor_model_parallel_attributes in Linear.reset_parameters
        self.weight.tensor_model_parallel = self.parallel_mode is not None
        self.weight.partition_dim, self.weight.partition_stride = int(self.parallel_mode == "row"), 1
        given["init_method"](self.weight)

    @bound
    def forward(self, inp, **given):
        from megatron.core import tensor_parallel as megatron  # which imports this module

        if self.parallel_mode == "column" and self.sequence_parallel:
            inp = megatron.gather_from_sequence_parallel_region(inp, group=self.tp_group)
        elif self.parallel_mode == "column":
            inp = megatron.copy_to_tensor_model_parallel_region(inp, group=self.tp_group)
        if self.fuse_wgrad_accumulation:
            out = AddsToMainGrad.apply(inp, self.weight, given["is_first_microbatch"])
        else:
            out = F.linear(inp, self.weight)
        if self.parallel_mode == "row" and self.sequence_parallel:
            return megatron.reduce_scatter_to_sequence_parallel_region(out, group=self.tp_group)
        if self.parallel_mode == "row":
            return megatron.reduce_from_tensor_model_parallel_region(out, group=self.tp_group)
        return out


class DotProductAttention(ExtraState):
    """Causal attention of sbhd tensors with grouped heads; causal_bottom_right: aligned at the end of the keys."""

    @bound
    def __init__(self, num_attention_heads, kv_channels, num_gqa_groups, **given):
        super().__init__()
        assert given["qkv_format"] == "sbhd" and given["attention_dropout"] == 0.0
        self.heads, self.groups, self.scale = num_attention_heads, num_gqa_groups, given["softmax_scale"]

    @bound
    def forward(self, query_layer, key_layer, value_layer, **given):
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer))
        assert (query.shape[1], key.shape[1]) == (self.heads, self.groups)
        s, t = query.shape[2], key.shape[2]
        offset = {"causal": 0, "causal_bottom_right": t - s}[given["attn_mask_type"]]
        mask = torch.ones(s, t, dtype=torch.bool).tril(offset)
        if given.get("window_size") is not None:
            previous, behind = given["window_size"]
            assert behind == 0
            mask = mask.triu(offset - previous)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale, enable_gqa=True)
        return out.permute(2, 0, 1, 3).flatten(2)


class _Names(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (Placeholder,), {})


class Placeholder(metaclass=_Names):
    """Any other name of the package."""

    def __init__(self, *_, **__):
        raise NotImplementedError(f"the stand-in has no {type(self).__name__}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        return getattr(Placeholder, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if not name.startswith("transformer_engine.") or name.startswith(ABSENT):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        if module.__name__ == "transformer_engine.pytorch":
            module.Linear, module.DotProductAttention = Linear, DotProductAttention


sys.meta_path.insert(0, _Finder())
importlib.import_module("transformer_engine.common")
importlib.import_module("transformer_engine.pytorch")

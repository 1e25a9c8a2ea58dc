# SPDX-License-Identifier: Apache-2.0
"""Causal attention with grouped key-value heads: as the model calls it, which leaves the back end to torch, in other layouts by each of them, and by
the packages of cluster.core_attention that are installed."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from forward_backward import DIRECTIONS, Way, apart, cell, kernels, measure
from operator_benchmark import failure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
LAYOUTS = ("sbhd", "bhsd", "bshd")  # in memory; torch gets views [b, h, s, d]
HEADS = {
    "grouped": "all query heads beside fewer key-value heads",
    "groups in the batch": "each key-value head with its queries a sequence of its own; in sbhd the same memory",
    "repeated": "keys and values of each query head were there before; their gradients are not summed",
    "repeated in the call": "made of the groups in the call that is timed, and their gradients summed",
}


def view(tensor: Tensor, layout: str) -> Tensor:
    """[b, h, s, d] of what is stored in `layout`."""
    return tensor.permute([layout.index(extent) for extent in "bhsd"])


def stored(tensor: Tensor, layout: str) -> Tensor:
    """A leaf in `layout` of [b, h, s, d]."""
    return tensor.detach().permute(["bhsd".index(extent) for extent in layout]).contiguous()


def arranged(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, heads: str) -> tuple[Tensor, ...]:
    """Of [b, n, s, d] and [b, g, s, d] what `heads` says."""
    groups = key.shape[1]
    if heads == "repeated":
        return query, *(x.repeat_interleave(query.shape[1] // groups, dim=1) for x in (key, value)), upstream
    if heads == "groups in the batch":
        return tuple(x.unflatten(1, (groups, -1)).flatten(0, 1) for x in (query, key, value, upstream))
    return query, key, value, upstream


def by_torch(layout: str, heads: str, backend: SDPBackend, scale: float) -> Callable:
    def function(*leaves: Tensor) -> Tensor:
        query, key, value = (view(leaf, layout) for leaf in leaves)
        if heads == "repeated in the call":
            key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
            )

    return function


def flex(layout: str, rows: int, device: torch.device, scale: float, mode: str | None) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention, dynamic=False, mode=mode)
    mask = create_block_mask(lambda b, h, query, key: query >= key, None, None, rows, rows, device=device)
    return lambda *leaves: compiled(
        *(view(leaf, layout) for leaf in leaves), block_mask=mask, scale=scale, enable_gqa=True
    )


def forms(
    sizes: tuple[int, int, int, int, int], work: dict[str, float], device: torch.device, autotune: bool
) -> dict[str, Way]:
    """By name, the model's first; sizes: b, s, n, g, d; all of the same random numbers."""
    from zaya_plugin.model.core_attention import PACKAGES, causal_attention, core_attention

    b, s, n, g, d = sizes
    base = tuple(torch.randn(b, heads, s, d, device=device).bfloat16() for heads in (n, g, g, n))
    scale = d**-0.5

    def way(function: Callable, layout: str, heads: str = "grouped", flat: bool = False) -> Way:
        *leaves, upstream = (stored(x, layout) for x in arranged(*base, heads))
        upstream = upstream.flatten(2) if flat else view(upstream, layout)
        return Way(function, tuple(leaf.requires_grad_() for leaf in leaves), (upstream,), work)

    found = {"model": way(lambda *qkv: causal_attention(*qkv, scale), "sbhd", flat=True)}
    for (backend, kernel), layout, heads in itertools.product(BACKENDS.items(), LAYOUTS, HEADS):
        found[f"{backend}, {layout}, {heads}"] = way(by_torch(layout, heads, kernel, scale), layout, heads)
    for package in PACKAGES:
        try:
            attend = core_attention(package).whole
        except ValueError:
            continue  # not installed
        found[f"{package}, sbhd, grouped"] = way(lambda *qkv, attend=attend: attend(*qkv, scale), "sbhd", flat=True)
    if device.type == "cuda":
        modes = {"flex_attention": None} | (
            {"flex_attention, autotuned": "max-autotune-no-cudagraphs"} if autotune else {}
        )
        for (name, mode), layout in itertools.product(modes.items(), LAYOUTS[:2]):
            found[f"{name}, {layout}, grouped"] = way(flex(layout, s, device, scale, mode), layout)
    return found


def distance(name: str, way: Way, model: tuple[Tensor, Tensor]) -> float:
    """The larger of the output's and the query's gradient's from the model's, [b, n, s, d], each of its norm."""
    way.clear()
    output, leaf = way.outputs()[0], way.inputs[0]
    output.backward(*way.upstream)
    layout = name.split(", ")[-2]
    if output.dim() == 3:  # [s, b, n * d], as the model's
        output = view(output.unflatten(2, (model[0].shape[1], -1)), layout)
    return round(
        max(
            apart(mine.reshape(theirs.shape), theirs)
            for mine, theirs in zip((output, view(leaf.grad, layout)), model, strict=True)
        ),
        5,
    )


def measure_forms(
    sizes: tuple[int, int, int, int, int], work: dict[str, float], device: torch.device, rep: int, autotune: bool
) -> dict:
    """{direction: {form: figures}, "distance from the model": ..., "kernels": each form's four longest, "summary": the fastest}."""
    ways = forms(sizes, work, device, autotune)
    model = ways["model"]
    output = model.outputs()[0]
    output.backward(*model.upstream)
    reference = view(output.detach().unflatten(2, (sizes[2], -1)), "sbhd"), view(model.inputs[0].grad, "sbhd")
    apart_by: dict[str, object] = {}
    for name, way in list(ways.items())[1:]:
        try:
            apart_by[name] = distance(name, way, reference)
        except Exception as error:  # torch has no such kernel for this device and shape: its row
            apart_by[name] = failure(error)
            print(name, apart_by[name], file=sys.stderr, flush=True)
            del ways[name]
        way.clear()
    found = measure(ways, device, rep)
    fastest: dict[str, object] = {"cuDNN": torch.backends.cudnn.version()}
    for direction in DIRECTIONS:
        ms = {name: row[cell(device)] for name, row in found[direction].items() if cell(device) in row}
        fastest[direction] = {
            "model": ms.get("model"),
            **{name: ms[name] for name in sorted(ms, key=ms.__getitem__)[:5]},
        }
    return found | {
        "kernels": {name: kernels(way, 4) for name, way in ways.items()},
        "distance from the model": apart_by,
        "summary": fastest,
    }

# SPDX-License-Identifier: Apache-2.0
"""Measure the router of one ZAYA1-base layer with each version of hip_ops.router_mlp; forward and backward.

    python3 benchmarks/router.py                           16,384 tokens of 2048 channels in bf16, router of 256,
                                                           17 classes
    python3 benchmarks/router.py --versions triton compiled reference

The router is zaya_plugin.model.router in Megatron's DDP, in training, with weight gradients in fp32 main gradients,
from the normed input to routing weights, choice and state; `behind the down projection` leaves that product out. The
gradient of the input is a separate tensor in this script; in a layer it is added to that of the experts. `distance`
compares a step of the first version with the reference. `ms` is a call from Python, `graph_ms` the replay of a captured
graph, as in training, `both` forward and backward in one; all are medians of triton's do_bench, which clears L2 before
each call. GB/s count the bytes that a step must read and write if it keeps state and both hidden layers. Prints a table
and one line of JSON, which it writes to benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse

import torch
from forward_backward import DIRECTIONS, Way, apart, capturable_stream, cell, flop, kernels, measure
from operator_benchmark import add_options, begin, finish
from torch import Tensor, nn

from hip_ops import use_kernels

BF16 = torch.bfloat16
EXPERTS, BATCH = 16, 4


def router_of_the_model(hidden: int, width: int, device: torch.device) -> nn.Module:
    """Return ZayaRouter of a layer after the first in Megatron's DDP. Makes the process groups of one rank."""
    from zaya_plugin import patches

    patches.apply()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from zaya_plugin.model.config import ZayaConfig
    from zaya_plugin.model.router import ZayaRouter

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    torch.manual_seed(1)
    config = ZayaConfig(
        num_layers=2,
        hidden_size=hidden,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=hidden // 8,
        ffn_hidden_size=hidden,
        moe_ffn_hidden_size=hidden,
        num_moe_experts=EXPERTS,
        router_hidden_size=width,
        params_dtype=BF16,
        bf16=True,
        use_cpu_initialization=True,
    )
    router = ZayaRouter(config)
    with torch.no_grad():
        for parameter in router.parameters():  # logits that tell classes apart
            parameter.copy_(
                torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
                if parameter.dim() == 2
                else 1 + torch.randn_like(parameter) / 4
            )
    return DistributedDataParallel(
        config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), router.to(device).train()
    )


def bytes_needed(tokens: int, hidden: int, width: int, whole: bool) -> dict[str, float]:
    """Return bytes by direction. The chain of gradients reads five tensors of the router's width and writes two. It
    writes five more, which the matrices' products read.
    """
    row = 2.0 * tokens * width
    forward, backward = 5 * row, (5 + 2 + 2 * 5) * row
    if whole:  # the input, twice for its gradient; the projection in between; the input's gradient
        forward, backward = forward + 2.0 * tokens * hidden + row, backward + 2 * 2.0 * tokens * hidden + 2 * row
    return dict(zip(DIRECTIONS, (forward, backward, forward + backward), strict=True))


def ways_of(router: nn.Module, inputs: tuple[Tensor, Tensor], upstream: tuple[Tensor, Tensor]) -> dict[str, Way]:
    """Return the router, and its part after the down projection: [s, b, h] or [s, b, r], and the previous state ->
    weights [s, b] and state.
    """
    from hip_ops.runtime.main_grad import main_grad_linear

    (x, previous), parameters = inputs, tuple(router.parameters())
    tokens, hidden, width = x.shape[0] * x.shape[1], x.shape[2], previous.shape[2]
    projected = main_grad_linear(x, router.module.down_proj.weight).detach().requires_grad_()
    behind = 2.0 * tokens * width * (2 * width + EXPERTS + 1)

    def run(x: Tensor, previous: Tensor, projected: Tensor | None = None) -> tuple[Tensor, Tensor]:
        weights, _, state = router.module(x, previous, None, projected)
        return weights, state

    return {
        "router": Way(run, inputs, upstream, flop(behind + 2.0 * tokens * hidden * width, 2), parameters),
        "behind the down projection": Way(
            lambda projected, previous: run(projected, previous, projected),
            (projected, previous),
            upstream,
            flop(behind, 2),
            parameters,
        ),
    }


def step(way: Way) -> list[Tensor]:
    """Return outputs and gradients of one step."""
    for parameter in way.parameters:
        parameter.main_grad.zero_()
    outputs = way.outputs()
    torch.autograd.backward(outputs, way.upstream)
    found = [*outputs, *(t.grad for t in way.inputs), *(p.main_grad.clone() for p in way.parameters)]
    way.clear()
    return found


def distances(router: nn.Module, ours: list[Tensor], theirs: list[Tensor]) -> dict[str, float]:
    """Return the distances of outputs and gradients of two steps, relative to their norms. A token with another
    class has another weight.
    """
    names = [name for name, _ in router.module.named_parameters()]
    labels = ["weights", "state", "input's gradient", "gradient of the state before", *names]
    return {label: round(apart(a, b), 6) for label, a, b in zip(labels, ours, theirs, strict=True)}


def measure_router(tokens: int, device: torch.device, options) -> dict:
    rows = tokens // BATCH

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(BF16)

    inputs = random(rows, BATCH, options.hidden).requires_grad_(), random(rows, BATCH, options.width).requires_grad_()
    upstream = torch.randn(rows, BATCH, device=device), random(rows, BATCH, options.width)
    router = router_of_the_model(options.hidden, options.width, device)
    ways = ways_of(router, inputs, upstream)
    found: dict[str, dict] = {direction: {} for direction in DIRECTIONS}
    # Before any graph: a capture needs compiled and checked kernels.
    with use_kernels("reference"):
        theirs = step(ways["router"])
    for version in options.versions:
        with use_kernels(router_mlp=version):
            ours = step(ways["router"])
            found.setdefault("distance", distances(router, ours, theirs))
            found[f"kernels of {version}"] = kernels(ways["router"], 16)
            timed = measure({f"{piece}, {version}": way for piece, way in ways.items()}, device, options.rep)
        for direction, rows_of in timed.items():
            found[direction] |= rows_of
    for piece in ways:
        needed = bytes_needed(tokens, options.hidden, options.width, piece == "router")
        for version in options.versions:
            for direction in DIRECTIONS:
                row = found[direction][f"{piece}, {version}"]
                if cell(device) in row:
                    rate = needed[direction] / row[cell(device)] * 1e3
                    row |= {"gb_per_s": float(f"{rate / 1e9:.4g}"), "of_copy": round(rate / options.copy, 3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 256)
    parser.add_argument("--hidden", type=int, default=2048 if on_gpu else 128)
    parser.add_argument("--width", type=int, default=256 if on_gpu else 64, help="of the router")
    parser.add_argument(
        "--versions",
        nargs="+",
        default=["triton", "compiled"] if on_gpu else ["reference"],
        help="versions of the operator: triton, compiled, reference",
    )
    add_options(parser, "router", sweep=False)
    options = parser.parse_args()
    device = begin(options)
    title = f"{options.tokens}x{options.hidden}, router of {options.width}"
    with capturable_stream(device):
        results = {title: measure_router(options.tokens, device, options)}
    finish(options, results, (32, 28, 44))


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Measure the CCA block of one ZAYA1-base layer, from normed input to output projection, and transformers'
ZayaAttention; forward and backward.

    python3 benchmarks/cca_block.py                        4 sequences of 4096 tokens in bf16, two minutes
    python3 benchmarks/cca_block.py --core-attention flash_attn_4        with cluster.core_attention=flash_attn_4

`ours` is zaya_plugin.model.attention in Megatron's DDP, which adds weight gradients to fp32 main gradients; the lines
below it are its pieces alone. transformers has the same weights and sdpa, and keeps new bf16 gradients, which is less
work. Norm and residual are not included. `ms` is a call from Python, `graph_ms` the replay of a captured graph, as in
training, `both` forward and backward in one; all are medians of triton's do_bench, which clears L2 before each call.
TFLOP/s count attention's backward as 2.5 times its forward (five products instead of two) and every other backward as
twice its forward. Prints a table and one line of JSON, which it writes to benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest import mock

import torch
from cca_prologue import CHANNELS, GROUPS, HEADS, ROTARY, VALUES, D
from forward_backward import DIRECTIONS, Way, apart, capturable_stream, cell, flop, kernels, measure
from operator_benchmark import add_options, begin, finish
from torch import Tensor, nn

BF16 = torch.bfloat16
GOALS = {"forward": 0.60, "backward": 1.60}  # ms on an H100, 4 x 4096 tokens
ROTARY_BASE = 10_000


def operations(batch: int, rows: int, hidden: int) -> dict[str, dict[str, float]]:
    """Return the operations of each piece and of all pieces; a multiply-add counts as two."""
    tokens = 2.0 * batch * rows
    found = {
        "input projections": flop(tokens * hidden * (CHANNELS + VALUES), 2),
        "prologue": flop(tokens * CHANNELS * (2 + 2 * D), 2),
        "core attention": flop(tokens * HEADS * D * rows, 2.5),
        "output projection": flop(tokens * HEADS * D * hidden, 2),
    }
    return found | {"all": {direction: sum(each[direction] for each in found.values()) for direction in DIRECTIONS}}


def attention_of_the_model(
    hidden: int, rows: int, core_attention: str, device: torch.device
) -> tuple[nn.Module, Tensor]:
    """Return ZayaSelfAttention in Megatron's DDP, and the angles [s, 1, 1, r] of its rotation. Makes the process
    groups of one rank.
    """
    from zaya_plugin import patches

    patches.apply()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer.spec_utils import build_module

    from zaya_plugin.model.config import ZayaConfig
    from zaya_plugin.model.gpt_model import ZayaRotaryEmbedding
    from zaya_plugin.model.layer_specs import zaya_layer_submodules

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234, force_reset_rng=True)
    config = ZayaConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=D,
        ffn_hidden_size=hidden,
        moe_ffn_hidden_size=hidden,
        params_dtype=BF16,
        bf16=True,
        core_attention=core_attention,
        use_cpu_initialization=True,
    )
    module = (
        build_module(zaya_layer_submodules(config).self_attention, config=config, layer_number=1).to(device).train()
    )
    rotation = ZayaRotaryEmbedding(D, ROTARY / D, rotary_base=ROTARY_BASE, use_cpu_initialization=True)
    rotation.order = config.context_parallel_order
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, settings, module), rotation(rows).to(device)


def of_the_model(attention: nn.Module, angles: Tensor, x: Tensor, upstream: Tensor) -> dict[str, Way]:
    """Return the block [s, b, h] -> [s, b, h], and its calls with the arguments that they have in it."""
    import hip_ops
    from zaya_plugin.model import attention as module
    from zaya_plugin.model.parameters import view_together

    work, parameters, noted = operations(x.shape[1], x.shape[0], x.shape[2]), tuple(attention.parameters()), {}

    def whole(x: Tensor) -> Tensor:
        return attention(x, rotary_pos_emb=angles, view=view_together(attention.vectors()))[0]  # as the layer calls it

    block = Way(whole, (x,), (upstream,), work["all"], parameters)

    def noting(name: str, owner: object, attribute: str):
        function = getattr(owner, attribute)

        def call(*arguments, **keywords):
            noted[name] = function, arguments, keywords
            return function(*arguments, **keywords)

        return mock.patch.object(owner, attribute, call)

    with (
        noting("input projections", attention, "project"),
        noting("prologue", hip_ops, "cca_prologue"),
        noting("core attention", attention.core_attention, "forward"),
        noting("output projection", module, "main_grad_linear"),  # the last of its calls
    ):
        block.outputs()
    return {"ours": block} | {
        f"ours, {name}": piece(*noted[name], work[name], parameters) for name in work if name != "all"
    }


def piece(
    function: Callable, arguments: tuple, keywords: dict, work: dict[str, float], parameters: tuple[Tensor, ...]
) -> Way:
    """Return a call whose inputs are the arguments that get gradients and are not parameters."""
    known = {id(parameter) for parameter in parameters}
    places = [i for i, t in enumerate(arguments) if isinstance(t, Tensor) and t.requires_grad and id(t) not in known]

    def call(*inputs: Tensor):
        given = dict(zip(places, inputs, strict=True))
        return function(*(given.get(i, argument) for i, argument in enumerate(arguments)), **keywords)

    way = Way(call, tuple(arguments[i].detach().requires_grad_() for i in places), (), work, parameters)
    way.upstream = tuple(torch.randn_like(t) for t in way.outputs())
    return way


def of_transformers(attention: nn.Module, x: Tensor, upstream: Tensor, compiled: bool) -> Way:
    """Return ZayaAttention with the weights of `attention` and its parameters in the same order; batch first, as in
    transformers.
    """
    from transformers import ZayaConfig
    from transformers.models.zaya import modeling_zaya as zaya

    from zaya_plugin.checkpoint.convert.tables import TABLE

    rows, batch, hidden = x.shape
    rope = {"rope_type": "default", "rope_theta": float(ROTARY_BASE), "partial_rotary_factor": ROTARY / D}
    config = ZayaConfig(
        num_hidden_layers=2,
        hidden_size=hidden,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=D,
        use_cache=False,
        max_position_embeddings=rows,
        rope_parameters={"hybrid": rope},
        attn_implementation="sdpa",
    )
    module = zaya.ZayaAttention(config, 1).to(x.device, BF16).train()
    here, there = "decoder.layers.{l}.self_attention.", "model.layers.{l}.self_attn."
    names = {name.removeprefix(here): theirs.removeprefix(there) for name, theirs, *_ in TABLE if name.startswith(here)}
    module.load_state_dict({names[name]: weight.detach() for name, weight in attention.named_parameters()})
    x, upstream = (t.detach().transpose(0, 1).contiguous() for t in (x, upstream))
    cos_sin = zaya.ZayaRotaryEmbedding(config).to(x.device)(x, torch.arange(rows, device=x.device)[None], "hybrid")
    run = torch.compile(module, dynamic=False) if compiled else module
    theirs = dict(module.named_parameters())
    return Way(
        lambda x: run(x, attention_mask=None, position_embeddings=cos_sin)[0],
        (x.requires_grad_(),),
        (upstream,),
        operations(batch, rows, hidden)["all"],
        tuple(theirs[names[name]] for name, _ in attention.named_parameters()),
    )


def distances(mine: Way, theirs: Way, names: list[str]) -> dict[str, float]:
    """Return the distances of our output, and of our gradients of input and matrices, from those of transformers,
    relative to their norms. They show that both compute the same.

    names: of the parameters.
    """
    for parameter in mine.parameters:
        parameter.main_grad.zero_()
    for way in (mine, theirs):
        way.calls()["both"]()()
    found = {
        "output": apart(mine.outputs()[0].transpose(0, 1), theirs.outputs()[0]),
        "input's gradient": apart(mine.inputs[0].grad.transpose(0, 1), theirs.inputs[0].grad),
    } | {
        name: apart(a.main_grad, b.grad)
        for name, a, b in zip(names, mine.parameters, theirs.parameters, strict=True)
        if a.dim() == 2
    }
    mine.clear()
    theirs.clear()
    return {name: round(value, 5) for name, value in found.items()}


def compared(ms: dict[str, float]) -> dict[str, float]:
    """Return the times of our block and of the sum of its measured pieces, and the ratio of transformers' time to
    ours.
    """
    pieces = {name: value for name, value in ms.items() if name.startswith("ours,")}
    found = {"ours": ms["ours"], f"sum of its {len(pieces)} pieces": round(sum(pieces.values()), 4)}
    return found | {
        f"{name} / ours": round(value / ms["ours"], 3) for name, value in ms.items() if name.startswith("transformers")
    }


def measure_block(batch: int, rows: int, device: torch.device, options) -> dict:
    """Return {direction: {name: figures}, "distance": ..., "kernels": microseconds of our kernels, "summary": ...}."""
    ddp, angles = attention_of_the_model(options.hidden, rows, options.core_attention, device)
    x, upstream = (torch.randn(rows, batch, options.hidden, device=device).to(BF16) for _ in range(2))
    ways, distance = of_the_model(ddp.module, angles, x.requires_grad_(), upstream), {}
    anchors = () if options.no_anchors else ("transformers", "transformers, torch.compile")
    for name in anchors if device.type == "cuda" else anchors[:1]:
        ways[name] = of_transformers(ddp.module, x, upstream, name.endswith("compile"))
        distance[f"from {name}"] = distances(
            ways["ours"], ways[name], [each for each, _ in ddp.module.named_parameters()]
        )
    found, summary = measure(ways, device, options.rep), {}
    for direction, each in found.items():
        ms = {name: row[cell(device)] for name, row in each.items() if cell(device) in row}
        if "ours" in ms:
            summary[f"{cell(device)}, {direction}"] = compared(ms) | (
                {"goal on an H100": GOALS[direction]} if direction in GOALS else {}
            )
    return found | {"kernels": {"ours": kernels(ways["ours"])}, "distance": distance, "summary": summary}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shapes", nargs="+", default=["4x4096"] if on_gpu else ["2x64"], help="micro batch x rows")
    parser.add_argument("--hidden", type=int, default=2048 if on_gpu else 256)
    add_options(parser, "cca_block", sweep=False)
    parser.add_argument("--no-anchors", action="store_true", help="without transformers")
    parser.add_argument(
        "--core-attention",
        default="sdpa",
        help="softmax attention of the block, as in cluster.core_attention; default: %(default)s",
    )
    parser.set_defaults(rep=100)
    options = parser.parse_args()
    device, results = begin(options), {}
    with capturable_stream(device):
        for shape in options.shapes:
            batch, rows = map(int, shape.split("x"))
            results[shape] = measure_block(batch, rows, device, options)
    finish(options, results, (12, 26, 64))


if __name__ == "__main__":
    main()

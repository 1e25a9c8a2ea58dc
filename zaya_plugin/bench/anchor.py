# SPDX-License-Identifier: Apache-2.0
"""The anchor of `zaya bench step`: measures transformers' ZayaForCausalLM in processes of its own.

    python -m zaya_plugin.bench.anchor <recipe.yaml> <options as JSON> <vocabulary>      one rank, under torchrun

FSDP2 (fully_shard of every layer and of the model), bf16 compute with fp32 reduction, each layer compiled, torch's
fused AdamW, the recipe's sequence length, tokens per rank and micro-batches, random tokens and random weights. On a CPU
nothing is compiled, and the kernels of the fused optimizer and of the grouped GEMM are not used; the report says so.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from zaya_plugin.bench.options import ANCHOR, Options
from zaya_plugin.bench.results import dtype_of, rank_device

OUT_OF_MEMORY = 3  # exit code


def main(argv: list[str]) -> int:
    """Measure and, on rank 0, write <run_dir>/anchor.json. A rank that runs out of memory writes the error; its exit
    ends the others.
    """
    # Megatron's single queue under tensor parallelism slows FSDP down; the variable is read when CUDA starts
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    import torch

    from zaya_plugin.config.compose import load_recipe

    recipe, options, vocabulary = load_recipe(Path(argv[0])), Options.from_json(argv[1]), int(argv[2])
    device = rank_device(recipe)
    of_accelerator = None if device.type == "cpu" else device
    torch.distributed.init_process_group(recipe.cluster.distributed_backend, device_id=of_accelerator)
    try:
        result = measure(recipe, options, vocabulary, device)
    except torch.OutOfMemoryError as error:
        write(
            recipe,
            {"what": described(recipe, options, device), "error": f"out of memory: {str(error).splitlines()[0]}"},
        )
        return OUT_OF_MEMORY
    if torch.distributed.get_rank() == 0:
        write(recipe, result)
    torch.distributed.destroy_process_group()
    return 0


def write(recipe, result: dict) -> None:
    (Path(recipe.run_dir) / ANCHOR).write_text(json.dumps(result, indent=1) + "\n")


def described(recipe, options: Options, device) -> str:
    """Return a description of the anchor."""
    import transformers

    compiled = ", each layer compiled" if device.type != "cpu" else ", not compiled"
    optimizer = ", AdamW" if options.optimizer else ", no optimizer"
    return (
        f"transformers {transformers.__version__} ZayaForCausalLM, FSDP2, {recipe.cluster.dtype} compute, fp32 "
        f"reduction{compiled}{optimizer}"
    )


def measure(recipe, options: Options, vocabulary: int, device) -> dict:
    """Return time and memory of a step with as many tokens as ours: the mean of options.steps steps after
    options.warmup.
    """
    import torch

    model = sharded_model(recipe, vocabulary, device)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type != "cpu") if options.optimizer else None
    )
    stage, world = recipe.stage, torch.distributed.get_world_size()
    samples = stage.global_batch_size // world  # of a step on each device, independent of our layout
    size = min(stage.micro_batch_size, samples)
    generator = torch.Generator(device).manual_seed(recipe.seed + torch.distributed.get_rank())
    tokens = torch.randint(vocabulary, (size, stage.seq_length), device=device, generator=generator)

    def step() -> torch.Tensor:
        for _ in range(samples // size):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return loss

    def synchronize() -> None:
        if device.type != "cpu":
            torch.cuda.synchronize()
        torch.distributed.barrier()

    for _ in range(options.warmup):
        step()
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    begin = time.perf_counter()
    for _ in range(options.steps):
        loss = step()
    synchronize()
    seconds = (time.perf_counter() - begin) / options.steps
    on_cpu = device.type == "cpu"
    return {
        "what": described(recipe, options, device),
        "ms": 1e3 * seconds,
        "tokens": samples // size * size * stage.seq_length * world,
        "micro_batches": samples // size,
        "tokens_per_s_per_device": samples // size * size * stage.seq_length / seconds,
        "allocated_gib": None if on_cpu else torch.cuda.max_memory_allocated() / 2**30,
        "reserved_gib": None if on_cpu else torch.cuda.max_memory_reserved() / 2**30,
        "loss": loss.item(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "compiled": not on_cpu,
    }


def zaya_config(recipe, vocabulary: int, device):
    """Return transformers' configuration of the recipe's sizes."""
    from transformers import ZayaConfig

    m, stage = recipe.model, recipe.stage
    rope = {"rope_type": "default", "rope_theta": float(stage.rotary_base), "partial_rotary_factor": m.rotary_percent}
    config = ZayaConfig(
        num_hidden_layers=m.num_layers,
        vocab_size=vocabulary,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.num_query_groups,
        head_dim=m.kv_channels,
        moe_intermediate_size=m.moe_ffn_hidden_size,
        num_experts=m.num_experts,
        router_hidden_size=m.router_hidden_size,
        rms_norm_eps=m.norm_epsilon,
        max_position_embeddings=stage.seq_length,
        rope_parameters={"hybrid": rope},
        use_cache=False,
        attn_implementation="sdpa",
        initializer_range=m.init_method_std,
    )
    config._experts_implementation = "grouped_mm" if device.type != "cpu" else "eager"
    return config


def sharded_model(recipe, vocabulary: int, device):
    """Return ZayaForCausalLM with the recipe's sizes, sharded, with random weights."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import ZayaForCausalLM

    with torch.device("meta"):
        model = ZayaForCausalLM(zaya_config(recipe, vocabulary, device))
    policy = MixedPrecisionPolicy(param_dtype=dtype_of(recipe), reduce_dtype=torch.float32)
    mesh = torch.distributed.init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        if device.type != "cpu":
            layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(recipe.seed)
    with torch.no_grad():
        for module in model.modules():
            model._init_weights(module)
    return model.train()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

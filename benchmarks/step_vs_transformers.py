# SPDX-License-Identifier: Apache-2.0
"""Compare a step of `zaya bench step` with transformers' ZayaForCausalLM under FSDP2, on the same devices.

    zaya bench step experiment=zaya1_base cluster=h200_8 --random-tokens --output runs/step
    python3 benchmarks/step_vs_transformers.py runs/step

Reads the recipe, the number of ranks and of steps in the folder's step.json, starts as many ranks, adds what they
measured to step.json under "anchor", and prints the ratio of tokens per second and device. FSDP2 (fully_shard of every
layer and of the model), bf16 compute with fp32 reduction, each layer compiled, torch's fused AdamW where the step had an
optimizer, the recipe's sequence length, tokens per rank and micro-batches, random tokens and random weights; gradients
are reduced after every micro-batch, because otherwise they would not fit. On a CPU nothing is compiled, and the kernels
of the fused optimizer and of the grouped GEMM are not used; the report says so. transformers has ZAYA from 5.13 on.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from zaya_plugin.bench.results import dtype_of, rank_device, write
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.config.messages import check_transformers_has
from zaya_plugin.plan.step_source import recorded_recipe
from zaya_plugin.run.rank_plan import rank_environment

RECORD, ANCHOR = "step.json", "anchor.json"
OUT_OF_MEMORY = 3  # exit code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="--output of zaya bench step")
    parser.add_argument("--warmup", type=int, default=3, help="steps before the timed ones; default: %(default)s")
    options = parser.parse_args()
    record = json.loads((options.folder / RECORD).read_text())
    recipe = recorded_recipe(record)
    if "RANK" in os.environ:
        return run_rank(options.folder, recipe, record, options.warmup)
    check_transformers_has(recipe.model.normalization)
    (options.folder / ANCHOR).unlink(missing_ok=True)  # of an earlier run
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(recipe.nproc)]
    environment = os.environ | rank_environment(recipe, recipe.nproc, os.environ)
    code = subprocess.run([*words, __file__, *sys.argv[1:]], env=environment).returncode
    if not (options.folder / ANCHOR).is_file():
        return code
    print(text(with_anchor(options.folder)))  # out of memory is a result too
    return 0


def with_anchor(folder: Path) -> dict:
    """Add the anchor's figures and the ratio of tokens per second and device to step.json; return the anchor."""
    record, anchor = (json.loads((folder / name).read_text()) for name in (RECORD, ANCHOR))
    if "error" not in anchor:
        step = record["step"]
        flops_a_token = step["tflops_per_device"] / step["tokens_per_s_per_device"]
        anchor["tflops_per_device"] = flops_a_token * anchor["tokens_per_s_per_device"]
        anchor["ratio"] = step["tokens_per_s_per_device"] / anchor["tokens_per_s_per_device"]
    write(folder / RECORD, record | {"anchor": anchor})
    return anchor


def text(anchor: dict) -> str:
    """Return the figures and the ratio."""
    if "error" in anchor:
        return f"anchor: {anchor['what']}: {anchor['error']}"
    memory = "" if anchor["allocated_gib"] is None else f", peak memory {anchor['allocated_gib']:.1f} GiB"
    return (
        f"anchor: {anchor['what']}: {anchor['ms']:.1f} ms, {anchor['tokens_per_s_per_device']:,.0f} tokens/s a device, "
        f"{anchor['tflops_per_device']:.4g} TFLOP/s{memory}\nours / theirs: {anchor['ratio']:.3f}"
    )


def run_rank(folder: Path, recipe, record: dict, warmup: int) -> int:
    """Measure and, on rank 0, write anchor.json. A rank that runs out of memory writes the error; its exit ends the
    others.
    """
    # Megatron's single queue under tensor parallelism slows FSDP down; the variable is read when CUDA starts
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    device = rank_device(recipe)
    of_accelerator = None if device.type == "cpu" else device
    torch.distributed.init_process_group(recipe.cluster.distributed_backend, device_id=of_accelerator)
    what = described(recipe, record["step"]["optimizer"], device)
    try:
        result = measure(recipe, record, warmup, device)
    except torch.OutOfMemoryError as error:
        write(folder / ANCHOR, {"what": what, "error": f"out of memory: {str(error).splitlines()[0]}"})
        return OUT_OF_MEMORY
    if torch.distributed.get_rank() == 0:
        write(folder / ANCHOR, {"what": what, **result})
    torch.distributed.destroy_process_group()
    return 0


def described(recipe, with_optimizer: bool, device) -> str:
    """Return a description of the anchor."""
    compiled = ", each layer compiled" if device.type != "cpu" else ", not compiled"
    optimizer = ", AdamW" if with_optimizer else ", no optimizer"
    return (
        f"transformers {transformers.__version__} ZayaForCausalLM, FSDP2, {recipe.cluster.dtype} compute, fp32 "
        f"reduction{compiled}{optimizer}"
    )


def measure(recipe, record: dict, warmup: int, device) -> dict:
    """Return time and memory of a step with as many tokens as ours: the mean of as many steps, after `warmup`."""
    vocabulary, steps = record["model"]["vocab_size"], record["step"]["steps"]
    model = sharded_model(recipe, vocabulary, device)
    optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type != "cpu")
        if record["step"]["optimizer"]
        else None
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

    for _ in range(warmup):
        step()
    if device.type != "cpu":
        torch.cuda.reset_peak_memory_stats()
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        loss = step()
    synchronize()
    seconds = (time.perf_counter() - begin) / steps
    on_cpu = device.type == "cpu"
    return {
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
    m, stage = recipe.model, recipe.stage
    windows = Description.of_recipe(recipe, vocabulary).windows
    rope = {"rope_type": "default", "rope_theta": float(stage.rotary_base), "partial_rotary_factor": m.rotary_percent}
    config = transformers.ZayaConfig(
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
        rope_parameters={"hybrid": rope, "hybrid_sliding": rope | {"rope_theta": float(m.swa_rotary_base)}},
        layer_types=["hybrid_sliding" if window else "hybrid" for window in windows],
        sliding_window=m.sliding_window and m.sliding_window + 1,
        use_cache=False,
        attn_implementation="sdpa",
        initializer_range=m.init_method_std,
    )
    config._experts_implementation = "grouped_mm" if device.type != "cpu" else "eager"
    return config


def sharded_model(recipe, vocabulary: int, device):
    """Return ZayaForCausalLM with the recipe's sizes, sharded, with random weights."""
    with torch.device("meta"):
        model = transformers.ZayaForCausalLM(zaya_config(recipe, vocabulary, device))
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
    sys.exit(main())

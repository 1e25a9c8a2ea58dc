# SPDX-License-Identifier: Apache-2.0
"""Forward and backward of our model and of transformers' ZayaForCausalLM, one after the other in one process.

Started by step_vs_transformers.py after its training run, whose checkpoint both models get: so both route the same
tokens to the same experts, and their losses on the same text can be compared. Ours is what trains: Megatron's GPTModel
in its bf16 wrapper and DDP, gradients added to the fp32 buffer. transformers' keeps its fresh bf16 gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
from pathlib import Path
from unittest import mock

from zaya_plugin import patches

patches.apply()

import torch  # noqa: E402  (patches come first, as in a training process)
from step_timing import ON_GPU, STREAM, figures, say  # noqa: E402
from step_variants import unwrapped, variant  # noqa: E402

DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def build(recipe):
    """Megatron's globals, the model of `recipe` with its checkpoint loaded, and the data sources."""
    from megatron.core.enums import ModelType
    from megatron.training import checkpointing, get_args, training
    from megatron.training.argument_utils import core_transformer_config_from_args

    from zaya_plugin.config.arguments import megatron_arguments
    from zaya_plugin.data.sources import find_sources
    from zaya_plugin.hosts import pretrain
    from zaya_plugin.model.build import build_zaya_model
    from zaya_plugin.model.config import ZayaConfig

    sources = find_sources(recipe)
    pretrain.parse_arguments(megatron_arguments(recipe, sources.tokenizer_arguments()))
    training.initialize_megatron()
    args = get_args()

    def provide(pre_process=True, post_process=True, config=None, pg_collection=None, vp_stage=None):
        return build_zaya_model(
            core_transformer_config_from_args(args, ZayaConfig),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent,
            pg_collection=pg_collection,
        )

    own_stream = mock.patch.object(torch.cuda, "Stream", lambda *args, **named: STREAM)
    with own_stream if ON_GPU else contextlib.nullcontext():
        model = training.get_model(provide, ModelType.encoder_or_decoder)
    iteration = checkpointing.load_checkpoint(model, None, None)[0]
    return model[0].train(), sources, args, iteration


def batch_of(sources, args, size: int) -> dict[str, torch.Tensor]:
    """`size` sequences of the training text on the device."""
    from megatron.training import get_tokenizer

    data = sources.build((64, 0, 0), args.seq_length, args.seed, get_tokenizer())[0]
    items = [data[i] for i in range(size)]
    return {
        name: torch.stack([torch.as_tensor(item[name]) for item in items]).to(DEVICE)
        for name in ("tokens", "labels", "position_ids")
    }


def measure_zaya(model, sources, args, options) -> dict:
    """{"results": {variant: {"1x4096": figures}}, "profiles": the same}."""
    results, profiles = {}, {}

    def clear():
        model.zero_grad(set_to_none=True)  # DDP moved the gradients to its buffer already

    for name in options.variants:
        results[name], profiles[name] = {}, {}
        with variant(name, model):
            for size in options.batches:
                batch = batch_of(sources, args, size)

                def loss(batch=batch):
                    return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]).float().mean()

                started, shape, tokens = time.time(), f"{size}x{args.seq_length}", size * args.seq_length
                model.zero_grad_buffer()
                found, profiles[name][shape] = figures(
                    loss, clear, tokens, options, name, graph="graph" in name.split("+")
                )
                results[name][shape] = found
                if found and "ms" in found and "graph" not in name:
                    model.zero_grad_buffer()
                    loss().backward()
                    buffers = [*model.buffers, *model.expert_parallel_buffers]
                    found["gradient_norm"] = sum(b.grad_data.norm().item() ** 2 for b in buffers) ** 0.5
                say(model="zaya", variant=name, shape=shape, seconds=round(time.time() - started, 1), **(found or {}))
    return {"results": results, "profiles": profiles}


def transformers_model(state, args):
    """ZayaForCausalLM of the same sizes with the weights in `state`, in their dtype."""
    from transformers import ZayaConfig, ZayaForCausalLM

    rope = {"rope_type": "default", "rope_theta": float(args.rotary_base), "partial_rotary_factor": args.rotary_percent}
    config = ZayaConfig(
        num_hidden_layers=args.num_layers,
        vocab_size=args.padded_vocab_size,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups,
        head_dim=args.kv_channels,
        moe_intermediate_size=args.moe_ffn_hidden_size,
        num_experts=args.num_experts,
        router_hidden_size=args.router_hidden_size,
        rms_norm_eps=args.layernorm_epsilon,
        max_position_embeddings=args.seq_length,
        rope_parameters={"hybrid": rope},
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.set_default_dtype(args.params_dtype)
    try:
        with DEVICE:
            model = ZayaForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)
    for layer in model.model.layers:
        layer.mlp.gate.balancing_biases = layer.mlp.gate.balancing_biases.float()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)  # the head is the embedding
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model.train()


def measure_transformers(model, sources, args, options) -> dict:
    """As measure_zaya; the variants are implementations of the experts, +compile compiles each layer."""
    results, profiles = {}, {}

    def clear():
        model.zero_grad(set_to_none=True)

    for name in options.transformers_variants:
        implementation, _, compiled = name.partition("+")
        model.config._experts_implementation = implementation
        if compiled:
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(dynamic=False)
        results[name], profiles[name] = {}, {}
        for size in options.batches:
            batch = batch_of(sources, args, size)

            def loss(batch=batch):
                labels = batch["labels"]  # shifted by the data set already
                return model(input_ids=batch["tokens"], labels=labels, shift_labels=labels, use_cache=False).loss

            started, shape, tokens = time.time(), f"{size}x{args.seq_length}", size * args.seq_length
            found, profiles[name][shape] = figures(loss, clear, tokens, options, name)
            results[name][shape] = found
            if found and "ms" in found:
                loss().backward()
                norms = torch.stack([p.grad.float().norm() for p in model.parameters() if p.grad is not None])
                found["gradient_norm"] = norms.norm().item()
                clear()
            say(
                model="transformers",
                variant=name,
                shape=shape,
                seconds=round(time.time() - started, 1),
                **(found or {}),
            )
    return {"results": results, "profiles": profiles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", type=Path, required=True, help="recipe.yaml of a finished run with a checkpoint")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--variants", nargs="+", default=["plain"])
    parser.add_argument("--transformers-variants", nargs="+", default=["grouped_mm", "eager"])
    parser.add_argument("--profile", nargs="*", default=["plain", "grouped_mm"], help="variants that are profiled")
    options = parser.parse_args()
    sys.argv = sys.argv[:1]

    from zaya_plugin.checkpoint.hf_map import to_hf
    from zaya_plugin.config.compose import load_recipe

    # Megatron prints all its arguments.
    stream = torch.cuda.stream(STREAM) if ON_GPU else contextlib.nullcontext()
    with open(options.out.with_suffix(".log"), "w") as log, contextlib.redirect_stdout(log), stream:
        model, sources, args, iteration = build(load_recipe(options.recipe))
        ours = measure_zaya(model, sources, args, options)
        gpt = unwrapped(model)
        names = {name: t for name, t in gpt.state_dict().items() if torch.is_tensor(t)}
        state = {name: tensor.to("cpu", copy=True) for name, tensor in to_hf(names, gpt.config).items()}
        # DDP and Megatron's globals hold on to the module; its memory is what has to go.
        for buffer in [*model.buffers, *model.expert_parallel_buffers]:
            for storage in (buffer.param_data, buffer.grad_data):
                if storage is not None:
                    storage.untyped_storage().resize_(0)
        del model, gpt, names
        gc.collect()
        left = torch.cuda.memory_allocated() / 2**30 if ON_GPU else None
        hf = transformers_model(state, args)
        del state
        theirs = measure_transformers(hf, sources, args, options)
    import transformers

    options.out.write_text(
        json.dumps(
            {
                "checkpoint_step": iteration,
                "zaya": ours,
                "transformers": theirs,
                "memory_left_gib": left,
                "transformers_version": transformers.__version__,
                "parameters": sum(p.numel() for p in hf.parameters()),
            }
        )
    )


if __name__ == "__main__":
    main()

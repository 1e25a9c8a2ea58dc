# SPDX-License-Identifier: Apache-2.0
"""A decoding step of few sequences by kernels of its own, nine a layer (hip_ops/ops/decode_step).

The layers of training launch each operator by itself, which for one row takes longer than the bytes that it reads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hip_ops
from hip_ops.runtime.choice import missing
from hip_ops.runtime.launch import WARP_SIZE, run_kernel
from hip_ops.saved_bytes import router_columns
from hip_ops.versions import selection
from zaya_plugin.model.attention import key_scale, rope_table
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.decode_state import DecodeState
from zaya_plugin.model.experts import as_block

MAX_BATCH = 4  # above, more tokens share an expert, which a grouped product reads once
# Rows of a program: up to 32 KB of ZAYA1-base's weights, and where there are enough rows a program a multiprocessor.
ROWS = {"project": 8, "output": 16, "down": 2, "router": 8, "expert_input": 4, "expert_output": 8}
SPLITS, BLOCK = 65, 128  # parts of a sequence's stored tokens, and tokens that a program of attention reads at a time
WARPS = 256 // WARP_SIZE


def refusal(config: ZayaConfig, device: torch.device, batch: int) -> str | None:
    """Return why the kernels do not compute a step of `batch` sequences of a model, or None."""
    heads, d, request = config.num_attention_heads, config.kv_channels, selection().of("decode_step").version
    if request not in ("auto", "triton"):
        return f"kernels={request}"
    if request == "auto" and torch.version.hip:
        return "no AMD GPU has run them: HIP_OPS_KERNELS=triton takes them"
    if batch > MAX_BATCH:
        return f"more than {MAX_BATCH} sequences"
    if config.tensor_model_parallel_size * config.expert_model_parallel_size > 1:
        return "heads and experts lie on several ranks"
    if config.lora_rank is not None or config.normalization != "RMSNorm":
        return "adapters and LayerNorm have no kernels"
    if heads & (heads - 1) or d & (d - 1) or d < 16 or config.num_query_groups * d % (2 * ROWS["project"]):
        return f"{heads} heads of {d} channels; both must be powers of two, 16 channels at least"
    if config.hidden_size % 16 or config.moe_ffn_hidden_size % 8 or config.router_hidden_size % ROWS["router"]:
        return "a width is no multiple of the rows of a program"
    return missing("triton", device, named=False)


class DecodeStep:
    """The layers and the final norm for one token of each of b sequences, with the states of the layers.

    Weights are read in place, so that they may change between steps.

    Args:
        model: one that `refusal` does not refuse.
        states: of its layers, or of the first ones, which alone are computed; for b sequences.
    """

    def __init__(self, model: nn.Module, states: Sequence[DecodeState]):
        config, device = model.config, states[0].z.device
        batch, dtype = states[0].keys.shape[0], config.params_dtype
        self.model, self.config, self.states, self.batch, self.device = model, config, states, batch, device
        self.overlap = overlap(device)

        def buffer(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        h, n, g, d = config.hidden_size, config.num_attention_heads, config.num_query_groups, config.kv_channels
        wide = functools.partial(buffer, dtype=torch.float32)
        stream = wide if config.residual_in_fp32 else buffer
        # A merge reads one stream and writes the other; the affine of the embedding is a merge into zeros.
        self.streams, self.zeros = (stream(h), stream(h)), stream(h)
        self.projected = buffer((n + 2 * g) * d)
        self.normed, self.attended, self.output = buffer(h), buffer(h), buffer(h)
        self.query, self.log_sums, self.parts = buffer(n, d), wide(SPLITS, n), buffer(SPLITS, n, d)
        # Of the router: its input, both layers, and the states of two layers, one read while the other is written.
        self.down, self.first, self.second, *self.router_states = (buffer(config.router_hidden_size) for _ in range(5))
        self.hidden = buffer(config.moe_ffn_hidden_size)

    def __call__(self, embedding: Tensor, angles: Tensor) -> Tensor:
        """Add a token to each sequence: embedding [1, b, h], angles [1, b, 1, r] in radians of its position -> hidden
        states [1, b, h] behind the final norm. The positions are those of the states' progress.
        """
        layers, last = self.model.decoder.layers, self.model.decoder.final_layernorm
        temperatures = torch.stack([layer.self_attention.temperature for layer in layers])
        scales, affine = key_scale(temperatures, self.config.temperature_form), layers[0].input_affine
        output, stream = embedding, self.zeros
        vectors = affine.bias, affine.scale, self.zeros[0], self.zeros[0]
        for layer, state, scale in zip(layers, self.states, scales, strict=False):
            rope = rope_table(angles, layer.self_attention.own_rotary_base)
            self._layer(layer, state, output, stream, vectors, scale, rope)
            self.router_states.reverse()
            output, stream, vectors = self.output, self.streams[1], layer.post_mlp_residual.vectors()
        return hip_ops.scaled_residual_rms_norm(
            output.view_as(embedding), stream.view_as(embedding), *vectors, last.weight, last.eps
        )[0]

    def _layer(
        self, layer: nn.Module, state: DecodeState, output: Tensor, stream: Tensor, vectors: tuple[Tensor, ...],
        scale: Tensor, rope: Tensor,
    ) -> None:  # fmt: skip
        """output [b, h], which the merge by `vectors` adds to `stream` -> self.output, to be added to self.streams[1]."""
        from hip_ops.ops.decode_step import triton_kernels as kernels

        config, attention, batch = self.config, layer.self_attention, self.batch
        h, n, g, d = config.hidden_size, config.num_attention_heads, config.num_query_groups, config.kv_channels
        f, r, experts = config.moe_ffn_hidden_size, config.router_hidden_size, config.num_moe_experts
        places, positions = state.keys.shape[2], state.progress.positions
        launch = functools.partial(run_kernel, device=self.device, num_warps=WARPS, **self.overlap)
        merged = dict(H=h, BATCH=batch, BLOCK=power_of_two(h))

        inputs = (attention.linear_q, attention.linear_k, attention.linear_v_current, attention.linear_v_delayed)
        matrices = [module.weight for module in inputs]
        ends = (n * d, (n + g) * d, (n + g) * d + g * d // 2, (n + 2 * g) * d)
        norm, normed = layer.input_layernorm, self.normed
        launch(
            kernels.merge_project_kernel, (ends[-1] // ROWS["project"],), output, stream, *vectors, norm.weight,
            *matrices, self.streams[0], normed, self.projected, norm.eps, *ends, ROWS=ROWS["project"], **merged,
        )  # fmt: skip
        depthwise_weight, depthwise_bias, grouped_bias, _ = attention.vectors()
        launch(
            kernels.prologue_kernel, (n + g, batch), self.projected, depthwise_weight, depthwise_bias,
            attention.conv_qk_grouped.weight, grouped_bias, scale, rope, positions, state.z, state.delayed, self.query,
            state.keys, state.values, places, HEADS=n, GROUPS=g, D=d, ROTARY=rope.shape[-1],
            DELAYED=state.delayed.shape[-1], BATCH=batch,
        )  # fmt: skip
        launch(
            kernels.attend_kernel, (SPLITS, g, batch), self.query, state.keys, state.values, positions, self.log_sums,
            self.parts, attention.core_attention.softmax_scale or d**-0.5, places, GROUPS=g, PER=n // g,
            D=d, SPLITS=SPLITS, BLOCK=BLOCK, ROWS=max(16, n // g), num_stages=1,
        )  # fmt: skip
        launch(
            kernels.output_kernel, (h // ROWS["output"],), self.log_sums, self.parts,
            attention.linear_proj.weight, self.attended, H=h, HEADS=n, D=d, SPLITS=SPLITS, BATCH=batch,
            ROWS=ROWS["output"],
        )  # fmt: skip

        router, norm = layer.mlp.router, layer.pre_mlp_layernorm
        launch(
            kernels.merge_project_kernel, (r // ROWS["down"],), self.attended, self.streams[0],
            *layer.post_attention_residual.vectors(), norm.weight, *[router.down_proj.weight] * 4, self.streams[1],
            normed, self.down, norm.eps, r, r, r, r, ROWS=ROWS["down"], **merged,
        )  # fmt: skip
        layer_of_router = dict(R=r, BATCH=batch, ROWS=ROWS["router"], BLOCK=power_of_two(r))
        launch(
            kernels.router_first_kernel, (r // ROWS["router"],), self.down, *self.router_states,
            router.router_states_scale, router.down_proj.bias, router.norm.weight, router.fc1.weight, router.fc1.bias,
            self.first, router.norm.eps, **layer_of_router,
        )  # fmt: skip
        launch(
            kernels.router_second_kernel, (r // ROWS["router"],), self.first, router.fc2.weight, router.fc2.bias,
            self.second, **layer_of_router,
        )  # fmt: skip
        fc1, fc2 = (
            as_block(module.matrices()) for module in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2)
        )
        routed = normed, self.second, router.out_proj.weight, router.balancing_biases
        sizes = dict(
            EXPERTS=experts, SKIP=experts if config.moe_skip_expert and config.skip_output == "zero" else -1,
            CLASSES=router.num_classes, COLUMNS=router_columns(router.num_classes), R=r, H=h, F=f,
            ROUTER_BLOCK=power_of_two(r),
        )  # fmt: skip
        launch(
            kernels.expert_input_kernel, (f // ROWS["expert_input"], batch), *routed, fc1, self.hidden,
            ROWS=ROWS["expert_input"], BLOCK=power_of_two(h), **sizes,
        )  # fmt: skip
        launch(
            kernels.expert_output_kernel, (h // ROWS["expert_output"], batch), *routed, self.hidden, fc2, self.output,
            ROWS=ROWS["expert_output"], BLOCK=power_of_two(f), **sizes,
        )  # fmt: skip


def overlap(device: torch.device) -> dict[str, bool]:
    """Return the words of a launch that let a kernel start while the one before it ends, on NVIDIA from Hopper on."""
    possible = device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAP": True, "launch_pdl": True} if possible else {"OVERLAP": False}


def power_of_two(width: int) -> int:
    """Return the smallest power of two that is at least `width`."""
    return 1 << (width - 1).bit_length()

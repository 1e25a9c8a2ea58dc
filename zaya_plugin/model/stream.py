# SPDX-License-Identifier: Apache-2.0
"""The residual stream of a layer: its merges and norms, and its way in and out of the layer with the router state.

This file alone decides where the norms are computed, what activation recomputation frees, and what passes between
layers:

* A merge and the norm behind it are one operator (hip_ops/ops/rms_norm, which `ResidualScaling.merge_and_norm` calls
  through the norm), also across two layers of a stage (`link_layers`): 83 instead of 123 ms of the norms of 40 layers
  on an H200 (docs/log.md, 2026-11-21). With `layernorm` among recompute_modules a norm is computed by itself instead;
  its result is freed behind the module that read it, and the backward pass computes it again.
* Megatron's transformer block passes a `context` from layer to layer, for cross-attention. In this model it is the
  router state, which is a tensor, so that it may also cross the border of a recomputed part; between linked layers it
  is a `LinkedContext`, which holds the normed stream too.
* Between pipeline stages Megatron's schedules send one tensor only, and its gradient back. So the last layer of a stage
  appends the router state to the stream's channels, and the first layer of the next stage splits them. The stream is
  fp32; a bf16 state is converted to fp32 and back without loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.parameters import view_together
from zaya_plugin.model.residual import InputAffine, ResidualScaling, ZayaRMSNorm


class LinkedContext(NamedTuple):
    """The `context` between linked layers.

    router_state [s, b, r], or None without averaging. stream [s, b, h]: the tensor that is also returned as
    hidden_states. normed [s, b, h]: stream after the next layer's input norm.
    """

    router_state: Tensor | None
    stream: Tensor
    normed: Tensor


class Stream:
    """The residual stream [s, b, h] in one forward pass of `layer`, a ZayaTransformerLayer.

    view: the `ParameterView` through which the layer's vectors are used (`view_together`).
    """

    def __init__(self, layer: TransformerLayer, value: Tensor, normed: Tensor | None):
        self.layer, self.value, self.view = layer, value, view_together(layer.vectors())
        self._normed = normed  # the stream after the next norm, where it is computed and not yet read
        self._free: Callable[[Tensor], None] | None = None  # frees the last norm, once a module has read it

    @classmethod
    def receive(
        cls, layer: TransformerLayer, hidden_states: Tensor, context: Tensor | LinkedContext | None
    ) -> tuple[Stream, Tensor | None]:
        """Return the stream and the previous layer's router state [s, b, r] from the arguments of `layer.forward`."""
        if layer.receives_state:
            config = layer.config
            hidden_states, context = split_stream_and_state(hidden_states, config.hidden_size, config.params_dtype)
        if not isinstance(context, LinkedContext):
            return cls(layer, hidden_states, None), context
        assert context.normed.requires_grad or not hidden_states.requires_grad, (
            "a LinkedContext crossed the border of a recomputed part"
        )
        # A hook may have replaced the stream since; then the layer norms it again.
        normed = context.normed if context.stream is hidden_states else None
        return cls(layer, hidden_states, normed), context.router_state

    def start(self, affine: InputAffine, norm: ZayaRMSNorm) -> None:
        """Apply the affine of the embedding, and `norm` with it unless that is recomputed."""
        if norm.recompute:
            self.value = affine(self.value)
        else:
            self._normed, self.value = affine.affine_and_norm(self.value, norm)

    def norm(self, norm: ZayaRMSNorm) -> Tensor:
        """Return the norm of the stream [s, b, h] in the parameters' dtype: the result that `start`, `merge` or the
        previous layer has computed with the same `norm`, if there is one, otherwise `norm` is called now.
        """
        if self._normed is not None:
            normed, self._normed = self._normed, None
            return normed
        if not norm.recompute:
            return norm(self.value)
        # None means no fp8; the default False would require Transformer Engine.
        checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
        self._free = checkpoint.discard_output_and_register_recompute
        return checkpoint.checkpoint(norm, self.value)

    def merge(self, output: Tensor, scaling: ResidualScaling, norm: ZayaRMSNorm | None = None) -> None:
        """Merge `output` [s, b, h] of the module that read the last norm into the stream.

        norm: the one that reads the stream next. The same operator computes it, and it is kept for the next call of
        `self.norm`. Without it, or where it is recomputed, the merge is a formula of its own, which torch.compile
        fuses.
        """
        if self._free is not None:
            self._free(output)
            self._free = None
        if norm is None or norm.recompute:
            self.value = scaling(output, self.value, self.view)
        else:
            self._normed, self.value = scaling.merge_and_norm(output, self.value, norm, self.view)

    def send(self, router_state: Tensor | None) -> tuple[Tensor, Tensor | LinkedContext | None]:
        """Return what `layer.forward` returns: hidden_states and context."""
        value = self.value
        if self._normed is not None:
            return value, LinkedContext(router_state, value, self._normed)
        if self.layer.sends_state:
            value, router_state = join_stream_and_state(value, router_state), None
        # A stage's output must be no view, for the schedule to free it.
        return make_viewless_tensor(inp=value, requires_grad=value.requires_grad, keep_graph=True), router_state


def link_layers(layers: Sequence[TransformerLayer], config: ZayaConfig) -> None:
    """Let each of a stage's layers apply the next one's input norm with its own last merge. Parameter names do not
    change.

    A layer is not linked at the end of a unit of full recomputation: only plain tensors carry gradients across that
    border, and the normed stream would be kept in addition to the stream.
    """
    for index, (layer, following) in enumerate(pairwise(layers)):
        norm = following.input_layernorm
        if not norm.recompute and not _ends_recomputed_part(config, index):
            layer.next_norm = (norm,)


def _ends_recomputed_part(config: ZayaConfig, index: int) -> bool:
    """Return whether a unit of full recomputation ends behind layer `index` of the stage, counted from 0."""
    if config.recompute_granularity != "full":
        return False
    if config.recompute_method == "uniform":
        return (index + 1) % config.recompute_num_layers == 0
    # block: each of the first layers is a unit, the others are not recomputed
    return index < config.recompute_num_layers


def join_stream_and_state(stream: Tensor, state: Tensor | None) -> Tensor:
    """Join stream [s, b, h] and router state [s, b, r] to [s, b, h + r] in the stream's dtype; return the stream if
    state is None.
    """
    return stream if state is None else torch.cat((stream, state.to(stream.dtype)), dim=-1)


def split_stream_and_state(joined: Tensor, hidden_size: int, state_dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Split [s, b, h + r] into the stream [s, b, h] and the router state [s, b, r] in state_dtype, None if r is 0."""
    stream, state = joined.split((hidden_size, joined.shape[-1] - hidden_size), dim=-1)
    return stream.contiguous(), state.to(state_dtype).contiguous() if state.shape[-1] else None

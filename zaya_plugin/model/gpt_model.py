# SPDX-License-Identifier: Apache-2.0
"""The whole model: Megatron's GPTModel with ZAYA's head, loss, embedding gradient and RoPE.

Megatron's loss makes an fp32 copy of all logits; with 262,272 classes that copy is the largest tensor of a step. In
this module only the logits of one chunk of tokens exist at a time.

The vocabulary's matrix is 1 GB in bf16 and used twice. Autograd would make a dense gradient for each use, their sum,
and a pass that adds it to the fp32 main gradient. In this model the head's matrix product and the embedding's rows are
added to the main gradient directly. DDP's hook, which waits for both uses, then adds nothing.
"""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

import hip_ops
from hip_ops.runtime.main_grad import handed_over, main_grad_of
from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.low_rank import is_trained
from zaya_plugin.model.parameters import gathered
from zaya_plugin.model.stream import link_layers
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments
from zaya_plugin.patches import hooks


class ZayaGPTModel(GPTModel):
    """GPTModel whose head and loss are `hip_ops.linear_cross_entropy`, and whose RoPE counts from the start of a
    sequence or, in packed documents, of a document.

    A `loss_mask` given to the model in training is a promise that the loss is the sum of losses * loss_mask
    (`promised_gradient`).
    """

    config: ZayaConfig

    def __init__(self, config: ZayaConfig, *positional, rotary_percent: float, rotary_base: int, **named):
        for name in ("rope_scaling", "seq_len_interpolation_factor"):
            if named.get(name):
                raise mistake(
                    name, named[name], problem="ZAYA's positions are not scaled", allowed="None", fix="leave it out"
                )
        super().__init__(config, *positional, rotary_percent=rotary_percent, rotary_base=rotary_base, **named)
        self.rotary_pos_emb = ZayaRotaryEmbedding(
            config.kv_channels,
            rotary_percent,
            rotary_base=rotary_base,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
            order=config.context_parallel_order,
        )
        if self.pre_process:
            # Megatron sets it, so that DDP adds the gradient that its own head and embedding leave; ours leave none.
            hooks.set_attribute("Parameter().zero_out_wgrad", self.embedding.word_embeddings.weight, False)
        link_layers(self.decoder.layers, config)
        if config.lora_rank is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_trained(config, name))

    def _preprocess(self, input_ids, position_ids, decoder_input=None, *positional, packed_seq_params=None, **named):
        if self.pre_process and decoder_input is None:
            # A head on this stage marks the weight's gradient for DDP.
            decoder_input = embedded(self.embedding, input_ids, marks_main_grad=not self.post_process)
        decoder_input, angles, *others = super()._preprocess(
            input_ids, position_ids, decoder_input, *positional, packed_seq_params=packed_seq_params, **named
        )
        if self.config.lora_rank is not None and self.pre_process and torch.is_grad_enabled():
            # The embedding is frozen. Recomputed parts give no gradients to parameters unless an input requires one.
            decoder_input = decoder_input.detach().requires_grad_()
        if isinstance(packed_seq_params, PackedDocuments) and packed_seq_params.reset_positions:
            angles = self.rotary_pos_emb.of_positions(packed_seq_params.positions)
        return decoder_input, angles, *others

    def sharded_state_dict(self, prefix: str = "", *positional, whole: bool = False, **named) -> dict:
        """As Megatron's; of a model with adapters only what is trained, because checkpoints hold the adapter alone, unless
        `whole`.
        """
        state = super().sharded_state_dict(prefix, *positional, **named)
        if whole or self.config.lora_rank is None:
            return state
        return {name: value for name, value in state.items() if is_trained(self.config, name)}

    def load_state_dict(self, state_dict: dict, strict: bool = True, **named):
        """As torch's; with adapters, frozen weights may be missing."""
        if self.config.lora_rank is not None:
            state_dict = {
                name: value for name, value in self.state_dict().items() if name not in state_dict
            } | state_dict
        return super().load_state_dict(state_dict, strict, **named)

    def promised_gradient(self, loss_mask: Tensor | None) -> Tensor | None:
        """Return the gradient [b, s] that the losses will get; None if it is not known in advance.

        With calculate_per_token_loss the loss is sum(losses * loss_mask), so that gradient is loss_mask; the gradients
        of weights are divided by the number of tokens after the backward pass.
        """
        config = self.config
        return loss_mask if self.training and config.calculate_per_token_loss and not config.fp16 else None

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *positional, loss_mask=None, **named):
        with_loss = self.post_process and labels is not None
        if not with_loss or named.get("output_processor") is not None:
            return super()._postprocess(
                hidden_states, input_ids, position_ids, labels, *positional, loss_mask=loss_mask, **named
            )
        head = gathered(self.output_layer)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else head.weight
        return head_losses(
            hidden_states,
            weight,
            labels,
            self.promised_gradient(loss_mask),
            sequence_parallel=self.config.sequence_parallel,
            group=self.pg_collection.tp,
            z_loss=self.config.z_loss if self.training else 0.0,
        )


class ZayaRotaryEmbedding(RotaryEmbedding):
    """Megatron's RotaryEmbedding for any `order` of ContextShard; Megatron's own supports zig-zag only."""

    def __init__(self, *positional, order: str = "zigzag", **named):
        super().__init__(*positional, **named)
        self.order = order

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None) -> Tensor:
        """Return angles [s, 1, 1, r] in radians of this rank's rows in a sequence of max_seq_len tokens."""
        group = self.cp_group if cp_group is None else cp_group
        angles = self.get_emb(max_seq_len, offset)
        return angles if group is None else ContextShard.of(group, self.order).take(angles, 0)

    def of_positions(self, positions: Tensor) -> Tensor:
        """Return angles [s, b, 1, r] in radians of positions int64 [s, b] (arXiv 2104.09864)."""
        angles = positions.unsqueeze(-1) * self.inv_freq.to(positions.device)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)


def embedded(embedding: LanguageModelEmbedding, ids: Tensor, marks_main_grad: bool) -> Tensor:
    """Return the start of the stream [s, b, h] for ids int64 [b, s]; with sequence parallelism this rank's rows of it.

    Computes what the call of `embedding` does, which has no positions and no dropout, by EmbeddingRows: rows are
    taken in the order of the stream, so that neither they nor their gradients have to be moved.
    """
    words, config = gathered(embedding.word_embeddings), embedding.config
    cut, ids = words.tp_group.size() > 1, ids.transpose(0, 1)
    rows = EmbeddingRows.apply(ids - words.vocab_start_index if cut else ids, words.weight, cut, marks_main_grad)
    scatters = words.reduce_scatter_embeddings
    reduce = reduce_scatter_to_sequence_parallel_region if scatters else reduce_from_tensor_model_parallel_region
    rows = reduce(rows, group=words.tp_group)
    return rows.float() if config.fp32_residual_connection else rows


class EmbeddingRows(torch.autograd.Function):
    """Return weight[ids], with `cut` zeros for ids outside of it. The gradient's rows are added to `main_grad` if there
    is one.
    """

    @staticmethod
    def forward(ctx, ids, weight, cut, marks_main_grad):
        inside = (ids >= 0) & (ids < len(weight)) if cut else None
        place = ids.masked_fill(~inside, 0) if cut else ids
        ctx.save_for_backward(place, inside)
        ctx.weight, ctx.marks_main_grad = weight, marks_main_grad
        rows = torch.nn.functional.embedding(place, weight)
        return rows.masked_fill_(~inside.unsqueeze(-1), 0) if cut else rows

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (place, inside), weight = ctx.saved_tensors, ctx.weight
        if inside is not None:
            grad = grad.masked_fill(~inside.unsqueeze(-1), 0)
        total, nothing = main_grad_of(weight), (None, None)
        if total is None:
            return None, torch.ops.aten.embedding_dense_backward(grad, place, len(weight), -1, False), *nothing
        hip_ops.add_rows_(total, place.flatten(), grad.flatten(0, -2))
        return None, handed_over(weight) if ctx.marks_main_grad else None, *nothing


def head_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    promised: Tensor | None,
    *,
    sequence_parallel: bool,
    group,
    z_loss: float = 0.0,
) -> Tensor:
    """Compute the loss of each token, fp32 [b, s].

    Args:
        hidden: [s, b, h], with sequence_parallel this rank's rows of it. weight: this rank's rows [V / ranks, h].
        labels: int64 [b, s]. promised: the gradient [b, s] that the losses will get, None if that is not known.
        group: tensor-parallel group. z_loss: factor of logsumexp(logits)^2 in the loss (arXiv 2204.02311).
    """
    ranks = group.size()
    if sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=group)
    elif ranks > 1:
        hidden = copy_to_tensor_model_parallel_region(hidden, group=group)
    s, b, h = hidden.shape
    main_grad = main_grad_of(weight) if torch.is_grad_enabled() and weight.requires_grad else None
    losses = hip_ops.linear_cross_entropy(
        hidden.reshape(s * b, h),
        weight if main_grad is None else MarksMainGrad.apply(weight),
        labels.transpose(0, 1).reshape(-1),
        promised_grad=None if promised is None else promised.transpose(0, 1).reshape(-1),
        main_grad=main_grad,
        z_loss=z_loss,
        group=group if ranks > 1 else None,
        first_class=group.rank() * len(weight),
    )
    return losses.view(s, b).transpose(0, 1).contiguous()


class MarksMainGrad(torch.autograd.Function):
    """Return the weight, for readers that add to its main gradient themselves; the backward pass marks that for DDP and
    lets its hook run.
    """

    @staticmethod
    def forward(ctx, weight):
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        return weight.detach()

    @staticmethod
    def backward(ctx, grad):
        assert grad is None, "a user of the weight left its gradient to autograd"
        return handed_over(ctx.weight)

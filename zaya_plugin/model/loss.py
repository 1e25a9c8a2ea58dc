# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy over the vocabulary that never holds the logits in fp32.

Megatron's makes an fp32 copy of the logits and passes over it several times; with 262,272 classes that copy is the
largest tensor of a step. Here one kernel reads the logits and sums in fp32, and one overwrites them with their gradient:
six bytes of traffic an element in bf16.
"""

from __future__ import annotations

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from zaya_plugin.model.fusion import fused_on_accelerator
from zaya_plugin.model.parameter_gather import gathered
from zaya_plugin.model.rotary import ZayaRotaryEmbedding
from zaya_plugin.model.tied_head import MainGradEmbedding, head_losses
from zaya_plugin.parallel.packed_documents import PackedDocuments


@fused_on_accelerator
def loss_and_logsumexp(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """-log softmax(logits)[label] and logsumexp(logits), both fp32 (or wider) [T]; logits [T, v], labels int64 [T]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    normalizer = torch.logsumexp(logits, dim=-1)
    return normalizer - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), normalizer


@fused_on_accelerator
def overwrite_with_gradient(logits: Tensor, labels: Tensor, normalizer: Tensor, grad: Tensor) -> None:
    """logits <- grad * (softmax(logits) - onehot(labels)), in place; normalizer and grad [T]."""
    wide = logits.to(normalizer.dtype)
    softmax = torch.exp(wide - normalizer.unsqueeze(-1))
    is_label = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    logits.copy_((softmax - is_label.to(softmax.dtype)) * grad.unsqueeze(-1))


class CrossEntropy(torch.autograd.Function):
    """Loss of each token; the backward pass overwrites the logits, which nobody may read afterwards."""

    @staticmethod
    def forward(ctx, logits, labels):
        losses, normalizer = loss_and_logsumexp(logits, labels)
        ctx.save_for_backward(logits, labels, normalizer)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, labels, normalizer = ctx.saved_tensors
        overwrite_with_gradient(logits, labels, normalizer, grad.contiguous())
        return logits, None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of logits [s, b, v] with labels int64 [b, s], fp32 (or wider) [b, s]."""
    s, b, v = logits.shape
    losses = CrossEntropy.apply(logits.reshape(s * b, v), labels.transpose(0, 1).reshape(-1))
    return losses.view(s, b).transpose(0, 1).contiguous()


class ZayaGPTModel(GPTModel):
    """GPTModel with the loss above on an accelerator (Megatron's elsewhere and where the vocabulary is split), and with
    RoPE by a token's place in its sequence or, in packed documents, in its document.

    fused_linear_cross_entropy: head and loss by `hip_ops.linear_cross_entropy` everywhere. A `loss_mask` given to the model in
    training is then a promise that the loss is the sum of losses * loss_mask (see `promised_gradient`).
    """

    def __init__(self, config, *args, rotary_percent: float, rotary_base: int, **kwargs):
        super().__init__(config, *args, rotary_percent=rotary_percent, rotary_base=rotary_base, **kwargs)
        self.rotary_pos_emb = ZayaRotaryEmbedding(
            config.kv_channels,
            rotary_percent,
            rotary_base=rotary_base,
            order=config.context_parallel_order,
            use_cpu_initialization=config.use_cpu_initialization,
            cp_group=self.pg_collection.cp,
        )
        if config.fused_linear_cross_entropy and self.pre_process:
            MainGradEmbedding.take_over(self.embedding.word_embeddings, announces=not self.post_process)

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        prepared = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if not (isinstance(packed_seq_params, PackedDocuments) and packed_seq_params.reset_positions):
            return prepared
        decoder_input, _, *rest = prepared
        return decoder_input, self.rotary_pos_emb.of_documents(packed_seq_params), *rest

    def promised_gradient(self, loss_mask: Tensor | None) -> Tensor | None:
        """The gradient [b, s] that the losses are going to get, None if it is not known before.

        With calculate_per_token_loss the loss is the masked sum, divided by the number of tokens only after the backward pass.
        """
        config = self.config
        return loss_mask if self.training and config.calculate_per_token_loss and not config.fp16 else None

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *positional, loss_mask=None, **named):
        fused = self.post_process and labels is not None and self.config.fused_linear_cross_entropy
        if not fused or named.get("output_processor") is not None or getattr(self.config, "use_mup", False):
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

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """labels int64 [b, s], logits [s, b, v] -> loss of each token [b, s]."""
        whole = self.config.tensor_model_parallel_size == 1 and not self.config.cross_entropy_loss_fusion
        if logits.is_cuda and whole:
            return cross_entropy(logits, labels)
        return super().compute_language_model_loss(labels, logits)

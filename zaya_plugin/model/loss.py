# SPDX-License-Identifier: Apache-2.0
"""The whole model: Megatron's GPTModel with ZAYA's head, loss and RoPE.

Megatron's loss makes an fp32 copy of all logits; with 262,272 classes that copy is the largest tensor of a step. Here
only the logits of one chunk of tokens exist at a time.
"""

from __future__ import annotations

from megatron.core.models.gpt import GPTModel
from torch import Tensor

from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.parameter_gather import gathered
from zaya_plugin.model.rotary import ZayaRotaryEmbedding
from zaya_plugin.model.stream import link_layers
from zaya_plugin.model.tied_head import MainGradEmbedding, head_losses
from zaya_plugin.parallel.packed_documents import PackedDocuments
from zaya_plugin.patches import hooks


class ZayaGPTModel(GPTModel):
    """GPTModel whose head and loss are `hip_ops.linear_cross_entropy`, and whose RoPE counts from the start of a
    sequence or, in packed documents, of a document.

    A `loss_mask` given to the model in training is a promise that the loss is the sum of losses * loss_mask
    (`promised_gradient`).
    """

    @classmethod
    def convert_in_place(cls, model: GPTModel, config: ZayaConfig) -> None:
        """Change the classes of `model`, of its embedding and of its RoPE to ours; parameters, their names and DDP's
        hooks stay. A ZayaGPTModel stays as it is.

        A spec names a GPTModel's layers only, and pretrain_gpt.py and Primus build the GPTModel themselves. `config` is
        that of the layers: a host's own configuration lacks our fields.
        """
        if isinstance(model, cls):
            return
        hooks.set_attribute("GPTModel().__class__", model, cls)
        model.z_loss = config.z_loss
        hooks.set_attribute("RotaryEmbedding().__class__", model.rotary_pos_emb, ZayaRotaryEmbedding)
        model.rotary_pos_emb.order = config.context_parallel_order
        if model.pre_process:
            MainGradEmbedding.convert_in_place(model.embedding.word_embeddings, marks_main_grad=not model.post_process)
        link_layers(model.decoder.layers, config)

    def _preprocess(self, *args, packed_seq_params=None, **kwargs):
        prepared = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        if not (isinstance(packed_seq_params, PackedDocuments) and packed_seq_params.reset_positions):
            return prepared
        decoder_input, _, *rest = prepared
        return decoder_input, self.rotary_pos_emb.of_documents(packed_seq_params), *rest

    def promised_gradient(self, loss_mask: Tensor | None) -> Tensor | None:
        """Return the gradient [b, s] that the losses will get; None if it is not known in advance.

        With calculate_per_token_loss the loss is the masked sum, divided by the number of tokens only after the
        backward pass.
        """
        config = self.config
        return loss_mask if self.training and config.calculate_per_token_loss and not config.fp16 else None

    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *positional, loss_mask=None, **named):
        with_loss = self.post_process and labels is not None
        if not with_loss or named.get("output_processor") is not None or getattr(self.config, "use_mup", False):
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
            z_loss=self.z_loss if self.training else 0.0,
        )

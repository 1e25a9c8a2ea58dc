# SPDX-License-Identifier: Apache-2.0
"""Head and loss in one operator, and the tied embedding's gradient without a dense copy of it.

The vocabulary's matrix is 1 GB in bf16 and used twice. Autograd would make a dense gradient for each use, their sum,
and a pass that adds it to the fp32 main gradient. Here the head's matrix product and the embedding's rows are added to
the main gradient directly. DDP's hook, which waits for both uses, then adds nothing.
"""

from __future__ import annotations

import torch
from megatron.core.tensor_parallel import (
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

import hip_ops
from hip_ops.runtime.main_grad import handed_over, main_grad_of
from zaya_plugin.patches import hooks


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


class MainGradEmbedding(VocabParallelEmbedding):
    """Megatron's embedding with the gradient above. marks_main_grad: mark the gradient for DDP; False where a head on this
    stage does.
    """

    marks_main_grad = True

    @classmethod
    def convert_in_place(cls, embedding: VocabParallelEmbedding, marks_main_grad: bool) -> None:
        """Make `embedding` a MainGradEmbedding; its parameter and its hooks stay."""
        assert type(embedding) is VocabParallelEmbedding, type(embedding)
        hooks.set_attribute("VocabParallelEmbedding().__class__", embedding, cls)
        embedding.marks_main_grad = marks_main_grad
        # Megatron sets it, so that DDP adds the gradient that its own head and embedding leave; MainGradEmbedding leaves none
        hooks.set_attribute("Parameter().zero_out_wgrad", embedding.weight, False)

    def forward(self, input_: Tensor) -> Tensor:
        """Ids int64 [b, s] -> [b, s, h], or with sequence parallelism in the embedding this rank's rows of [s, b,
        h].
        """
        cut = self.tp_group.size() > 1
        # rows are taken in the order of the stream, so that neither they nor their gradients have to be moved
        ids = input_.transpose(0, 1)
        rows = EmbeddingRows.apply(ids - self.vocab_start_index if cut else ids, self.weight, cut, self.marks_main_grad)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(rows, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(rows, group=self.tp_group).transpose(0, 1)


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

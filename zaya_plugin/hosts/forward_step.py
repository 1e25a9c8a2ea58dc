# SPDX-License-Identifier: Apache-2.0
"""The forward step of one micro-batch, which any host's training loop calls."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.training import get_args, get_tokenizer

from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.training.batches import micro_batch


def forward_step(data_iterator, model):
    """Run one micro-batch; return the losses of the tokens [b, s] and the function that reduces them."""
    args = get_args()
    shard = ContextShard.of(parallel_state.get_context_parallel_group(), args.context_parallel_order)
    eod = get_tokenizer().eod if args.packing == "documents" else None
    batch = micro_batch(next(data_iterator), torch.cuda.current_device(), shard, eod, args.reset_position_ids)
    mask = batch.loss_mask

    def reduce_loss(losses):
        """Return the sum over the tokens that count, their number, and both for the report (Megatron adds and
        divides).
        """
        total, count = (losses.float() * mask).sum(), mask.sum()
        return total, count.to(torch.int), {"lm loss": torch.stack((total.detach(), count))}

    losses = model(
        batch.tokens, batch.positions, None, labels=batch.labels, loss_mask=mask, packed_seq_params=batch.packed
    )
    return losses, reduce_loss

# SPDX-License-Identifier: Apache-2.0
"""megatron.training.training.num_floating_point_operations: counts ZAYA's operations; Megatron's formula has no CCA,
router or partial heads.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch


def zaya_flops(args, batch_size, seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None) -> float:
    """Operations of a step of `batch_size` sequences, by zaya_plugin.plan.flops; arguments as in Megatron."""
    from zaya_plugin.plan.flops import Shape, training_flops

    return training_flops(Shape.of_arguments(args), batch_size * args.seq_length, args.seq_length)


PATCH = Patch(
    symbol="megatron.training.training.num_floating_point_operations",
    make=lambda _: zaya_flops,
    scope="always",
    reason="counts another model (dense q, k, v; no convolutions or router), so TFLOP/s and MFU would be wrong",
    upstream=MEGATRON + "training/training.py",
    until="a model can provide its own count of operations",
)

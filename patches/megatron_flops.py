# SPDX-License-Identifier: Apache-2.0
"""megatron.training.training.num_floating_point_operations: knows neither CCA, nor the router, nor partial heads."""

from zaya_plugin.patches.registry import Patch


def zaya_flops(args, batch_size, seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None) -> float:
    """Operations of a step of `batch_size` sequences, by zaya_plugin.plan.flops; arguments as in Megatron."""
    from zaya_plugin.plan.flops import Shape, training_flops

    return training_flops(Shape.of_arguments(args), batch_size * args.seq_length, args.seq_length)


def install() -> None:
    from megatron.training import training

    training.num_floating_point_operations = zaya_flops


PATCH = Patch(
    symbol="megatron.training.training.num_floating_point_operations",
    scope="always",
    reason="counts another model (dense q, k, v; no convolutions or router), so TFLOP/s and MFU would be wrong",
    install=install,
)

# SPDX-License-Identifier: Apache-2.0
"""megatron.training.training.initialize_megatron: pretrain() cannot pass allow_no_cuda on."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import functools

    from megatron.training import training

    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


PATCH = Patch(
    symbol="megatron.training.training.initialize_megatron",
    reason="asserts CUDA unless allow_no_cuda is given, which pretrain() has no way to give",
    install=install,
)

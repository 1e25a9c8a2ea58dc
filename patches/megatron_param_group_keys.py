# SPDX-License-Identifier: Apache-2.0
"""megatron.core.optimizer.optimizer.param_group_identifier_keys (and the copy in distrib_optimizer).

0.16 pairs the parameter groups of a checkpoint with those of the run by settings among which the learning rates are not. Two groups that differ in
nothing else become one, and after a resume one of them goes on at the other's rate, without a word. 0.19 has the keys:
https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/optimizer.py
"""

from zaya_plugin.patches.registry import Patch

LEARNING_RATES = ("max_lr", "min_lr")


def _learning_rates_are_missing() -> bool:
    from megatron.core.optimizer import optimizer

    return "max_lr" not in optimizer.param_group_identifier_keys


def install() -> None:
    from megatron.core.optimizer import distrib_optimizer, optimizer

    for module in (optimizer, distrib_optimizer):
        module.param_group_identifier_keys = (*module.param_group_identifier_keys, *LEARNING_RATES)


PATCH = Patch(
    symbol="megatron.core.optimizer.optimizer.param_group_identifier_keys",
    scope="always",
    wanted=_learning_rates_are_missing,
    reason="megatron-core 0.16 takes groups that differ in their learning rate alone for one, so a resumed run mixes their rates up",
    install=install,
)

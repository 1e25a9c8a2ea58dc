# SPDX-License-Identifier: Apache-2.0
"""megatron.core.optimizer.optimizer.param_group_identifier_keys (and the copy in distrib_optimizer): adds the learning
rates.

0.16 pairs the parameter groups of a checkpoint with those of the run by settings that do not include the learning
rates. Two groups that differ only in their rates become one, and after a resume one of them continues at the other's
rate without a warning. 0.19 has the keys.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch


def _learning_rates_are_missing() -> bool:
    from megatron.core.optimizer import optimizer

    return "max_lr" not in optimizer.param_group_identifier_keys


def with_learning_rates(keys):
    return (*keys, "max_lr", "min_lr")


PATCH = Patch(
    symbol="megatron.core.optimizer.optimizer.param_group_identifier_keys",
    make=with_learning_rates,
    also={"megatron.core.optimizer.distrib_optimizer.param_group_identifier_keys": with_learning_rates},
    scope="always",
    wanted=_learning_rates_are_missing,
    reason=(
        "megatron-core 0.16 merges groups that differ only in their learning rate, so a resumed run mixes up their "
        "rates"
    ),
    upstream=MEGATRON + "core/optimizer/optimizer.py",
    until="Primus pins a Megatron that has the keys, as 0.19 does",
)

# SPDX-License-Identifier: Apache-2.0
"""megatron.core.optimizer.Adam: GroupStepAdamW in place of torch.optim.AdamW, to which Megatron falls back without
Transformer Engine or apex.

The state of torch's AdamW keeps a step for each parameter. The distributed optimizer then cannot load its own
checkpoint (assertion in distrib_optimizer.py) or, with dp_reshardable, continues with a wrong step. This also happens
on a GPU without either library.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch


def _torch_adam_is_used() -> bool:
    from megatron.core import optimizer

    return optimizer.USING_PYTORCH_OPTIMIZER


def group_step_adamw(_):
    from zaya_plugin.optim.muon import GroupStepAdamW

    return GroupStepAdamW


PATCH = Patch(
    symbol="megatron.core.optimizer.Adam",
    make=group_step_adamw,
    also={
        "megatron.core.optimizer.distrib_optimizer.Adam": group_step_adamw,
        # "Not torch's own, apex's layout": chooses the branches that read and write `step` in the parameter group.
        "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER": lambda _: False,
        "megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE": lambda _: True,
        "megatron.core.optimizer.distrib_optimizer.USING_APEX_OPTIMIZER": lambda _: True,
    },
    scope="always",
    condition=_torch_adam_is_used,
    reason="without Transformer Engine and apex: the distributed optimizer cannot load the state of torch's AdamW back",
    upstream=MEGATRON + "core/optimizer/distrib_optimizer.py",
    until="the distributed optimizer saves and loads the steps of torch's AdamW",
)

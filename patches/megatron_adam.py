# SPDX-License-Identifier: Apache-2.0
"""megatron.core.optimizer.Adam: without Transformer Engine or apex Megatron falls back to torch.optim.AdamW.

Its state keeps a step a parameter, and then the distributed optimizer cannot load its own checkpoint (assertion in
distrib_optimizer.py) or, with dp_reshardable, continues with a wrong step. On a GPU without either library too.
"""

from zaya_plugin.patches.registry import Patch


def _torch_adam_is_used() -> bool:
    from megatron.core import optimizer

    return optimizer.USING_PYTORCH_OPTIMIZER


def install() -> None:
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from zaya_plugin.optim.muon import GroupStepAdamW

    optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    # "Not torch's own, apex's layout": chooses the branches that read and write `step` in the parameter group.
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


PATCH = Patch(
    symbol="megatron.core.optimizer.Adam",
    also=("megatron.core.optimizer.distrib_optimizer.Adam",),
    scope="always",
    wanted=_torch_adam_is_used,
    reason="no Transformer Engine or apex here: torch's AdamW state cannot be loaded back by the distributed optimizer",
    install=install,
)

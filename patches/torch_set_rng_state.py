# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.set_rng_state: without CUDA torch queues the call and never makes it."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    torch.cuda.set_rng_state = lambda new_state, device="cuda": torch.set_rng_state(new_state)


PATCH = Patch(
    symbol="torch.cuda.set_rng_state",
    package="torch",
    versions=">=2.6",
    reason="queued for a CUDA start that never comes, so forks of the RNG tracker would not restore any state",
    install=install,
)

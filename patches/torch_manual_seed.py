# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.manual_seed: without CUDA torch queues the call and never makes it."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)


PATCH = Patch(
    symbol="torch.cuda.manual_seed",
    package="torch",
    versions=">=2.6",
    reason="queued for a CUDA start that never comes, so the RNG tracker would not seed its model-parallel state",
    install=install,
)

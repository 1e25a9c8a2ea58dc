# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.get_rng_state: the CPU generator stands in for the device generator."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    torch.cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()


PATCH = Patch(
    symbol="torch.cuda.get_rng_state",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; the RNG tracker and checkpoints read it",
    install=install,
)

# SPDX-License-Identifier: Apache-2.0
"""Read the parameters of a module that is not called.

With `overlap_param_gather` Megatron gathers updated parameters while the model already runs, and waits in a forward
pre-hook on every module for that module's own parameters. Where several matrices are applied as one product, or vectors
go into one kernel, their modules are never called. Without the hook a rank would compute with the other ranks'
parameters of the previous step (if a bucket holds no module that is called earlier).
"""

from __future__ import annotations

from torch import nn


def gathered(module: nn.Module) -> nn.Module:
    """Run the forward pre-hooks of `module` with no input, and return it; then its own parameters (not its submodules')
    may be read.
    """
    for key, hook in module._forward_pre_hooks.items():
        if key not in module._forward_pre_hooks_with_kwargs:  # Megatron's takes none
            hook(module, ())
    return module

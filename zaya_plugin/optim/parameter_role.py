# SPDX-License-Identifier: Apache-2.0
"""The role of a parameter for the optimizer and for the layout of DDP's buffers: one object, attached to the parameter.

The model sets `ParameterRole.block` when it builds its experts; `zaya_plugin.optim.grouping` sets the other fields by
rule and recipe.
A role is frozen, so a parameter and its fp32 copy or shard share one: `main.zaya_role = role_of(parameter)`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(eq=False)
class ExpertBlock:
    """The matrices of one weight (fc1 or fc2) of all experts of a layer on this rank, which lie one after another in
    memory.

    layer: number of the layer in the whole model, from 1.
    size: number of matrices.
    writes_first: the first micro-batch of a step writes the block's gradient, and later ones add to it.
    gradient_is_unwritten: no micro-batch of this step has written the block's gradient yet, and the buffer was not
    zeroed.
    """

    layer: int
    size: int
    writes_first: bool = False
    gradient_is_unwritten: bool = False


@dataclass(frozen=True)
class ParameterRole:
    """The role of one parameter.

    block: the expert block that the parameter belongs to, or None.
    index: the parameter's position in its block.
    optimizer: "muon" or "adamw"; None until it is assigned.
    lr_mult, weight_decay_mult: factors of the run's learning rate and weight decay.
    matrices: (b, m, n) under Muon: the parameter is b matrices of m x n, each orthogonalised by itself. None under
    AdamW.
    """

    block: ExpertBlock | None = None
    index: int = 0
    optimizer: str | None = None
    lr_mult: float = 1.0
    weight_decay_mult: float = 1.0
    matrices: tuple[int, int, int] | None = None


_NO_ROLE = ParameterRole()


def role_of(parameter: Tensor) -> ParameterRole:
    """Return the role attached to `parameter`; the default one if there is none."""
    return getattr(parameter, "zaya_role", _NO_ROLE)

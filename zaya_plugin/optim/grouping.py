# SPDX-License-Identifier: Apache-2.0
"""Which optimizer updates which parameter: Muon the matrices, AdamW the rest, and what a recipe says by name pattern.

ZAYA1 trained its 2-D weights with Muon and convolutions, embedding (the tied head), norms, residual scales and
temperatures with AdamW (arXiv 2511.17127, as quoted by the Primus port of ZAYA1; arXiv 2605.05365, section III). The
router's matrices, its 17 x 256 head included, are 2-D weights and follow that rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fnmatch import fnmatchcase

from torch import Tensor

from zaya_plugin.config.optimizer_override import Override
from zaya_plugin.optim.parameter_role import ParameterRole, role_of


def assign(
    parameters: Iterable[tuple[str, Tensor]],
    overrides: Iterable[Override] = (),
    split_gate_up: bool = False,
    default: str = "muon",
) -> dict[str, ParameterRole]:
    """Return the role of every parameter with its optimizer and multipliers, by name; nothing is attached.

    Args:
        parameters: names and parameters of the whole model.
        overrides: later ones win over earlier ones.
        split_gate_up: orthogonalise the gate and the up half of a fused fc1 weight separately.
        default: "muon" for the rule above, "adamw" for AdamW on everything that no override gives to Muon.

    Raises:
        ValueError: an override matches nothing or asks for Muon on what is no matrix; a parameter that no rule covers.
    """
    overrides = list(overrides)
    unused = {override.pattern for override in overrides}
    result = {}
    for name, parameter in parameters:
        optimizer, lr_mult, weight_decay_mult = None, 1.0, 0.0 if parameter.dim() <= 1 else 1.0
        for override in overrides:
            if fnmatchcase(name, override.pattern):
                unused.discard(override.pattern)
                optimizer = override.optimizer or optimizer
                lr_mult = lr_mult if override.lr_mult is None else override.lr_mult
                weight_decay_mult = (
                    weight_decay_mult if override.weight_decay_mult is None else override.weight_decay_mult
                )
        if optimizer is None:
            optimizer = _rule(name, parameter) if default == "muon" else "adamw"
        result[name] = replace(
            role_of(parameter),
            optimizer=optimizer,
            lr_mult=lr_mult,
            weight_decay_mult=weight_decay_mult,
            matrices=_matrices(name, parameter, split_gate_up) if optimizer == "muon" else None,
        )
    if unused:
        raise ValueError(
            f"optim.overrides: no parameter matches {', '.join(sorted(unused))}; the names are those that "
            "`zaya train ... explain_optim=true` prints"
        )
    return result


def _rule(name: str, parameter: Tensor) -> str:
    """The published rule by shape and role."""
    if parameter.dim() <= 1 or is_embedding(name, parameter) or is_convolution(name):
        return "adamw"
    if parameter.dim() == 2 or is_expert_stack(name, parameter):
        return "muon"
    raise ValueError(
        f"{name} has shape {tuple(parameter.shape)}: neither a matrix, a vector, a convolution nor a stack of expert "
        f"matrices; say which optimizer it gets: optim.overrides=['{name} optimizer=adamw']"
    )


def is_embedding(name: str, parameter: Tensor) -> bool:
    """The word embedding or the output layer: Megatron marks both."""
    return getattr(parameter, "is_embedding_or_output_parameter", False) or name.endswith("word_embeddings.weight")


def is_convolution(name: str) -> bool:
    return any(part.startswith("conv") for part in name.split("."))


def is_expert_stack(name: str, parameter: Tensor) -> bool:
    """A [experts, m, n] weight, as some grouped GEMMs keep it: b matrices, which a rule of `dim() == 2` would miss."""
    return parameter.dim() == 3 and "experts" in name.split(".")


def _matrices(name: str, parameter: Tensor, split_gate_up: bool) -> tuple[int, int, int]:
    if parameter.dim() not in (2, 3) or (parameter.dim() == 3 and not is_expert_stack(name, parameter)):
        raise ValueError(
            f"{name} has shape {tuple(parameter.shape)}: Muon takes matrices and stacks of expert matrices only; "
            f"allowed: optimizer=adamw"
        )
    b = parameter.shape[0] if parameter.dim() == 3 else 1
    m, n = parameter.shape[-2:]
    if split_gate_up and "experts" in name.split(".") and "linear_fc1" in name:
        if m % 2:
            raise ValueError(f"optim.muon_split_gate_up: {name} has {m} rows, which two halves cannot share")
        b, m = 2 * b, m // 2
    return b, m, n

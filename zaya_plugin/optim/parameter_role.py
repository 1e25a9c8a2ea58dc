# SPDX-License-Identifier: Apache-2.0
"""The role of a parameter for the optimizer and for the layout of DDP's buffers: one object, attached to the parameter.

The model sets `ParameterRole.block` when it builds its experts; `tag_parameters` sets the other fields by rule and
recipe. A role is frozen, so a parameter and its fp32 copy or shard share one: `main.zaya_role = role_of(parameter)`.

Adapters (zaya_plugin/model/low_rank.py) are under AdamW. For all other parameters the rule is that of ZAYA1: its 2-D
weights, the router's matrices and head among them, were trained with Muon; convolutions, the embedding (the tied head),
norms, residual scales and temperatures with AdamW (arXiv 2511.17127, as quoted by the Primus port of ZAYA1; arXiv
2605.05365, section III).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor, nn

from zaya_plugin.config.entries import Override
from zaya_plugin.ground.errors import mistake


@dataclass(eq=False)
class ExpertBlock:
    """The matrices of one weight (fc1 or fc2) of all experts of a layer on this rank, which lie one after another in
    memory. The first micro-batch of a step writes their gradients, and later ones add to them.

    layer: number of the layer in the whole model, from 1.
    size: number of matrices.
    gradient_is_unwritten: no micro-batch of this step has written the block's gradient yet, and the buffer was not
    zeroed.
    """

    layer: int
    size: int
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


def tag_parameters(
    model: nn.Module, overrides: Iterable[Override] = (), split_gate_up: bool = False, default: str = "muon"
) -> dict[str, ParameterRole]:
    """Attach each parameter's role, before DDP lays out its buffers; return all roles by name. Arguments, and errors:
    as `assign`.
    """
    roles = assign(model.named_parameters(), overrides, split_gate_up, default)
    for name, parameter in model.named_parameters():
        parameter.zaya_role = roles[name]
    return roles


def assign(
    parameters: Iterable[tuple[str, Tensor]],
    overrides: Iterable[Override] = (),
    split_gate_up: bool = False,
    default: str = "muon",
) -> dict[str, ParameterRole]:
    """Return the role of every parameter with its optimizer and multipliers, by name; nothing is attached.

    Args:
        parameters: names and parameters, the names as in the whole model.
        overrides: a later one takes precedence over an earlier one.
        split_gate_up: orthogonalise the gate and the up half of a fused fc1 weight separately.
        default: "muon" for the rule above, "adamw" for AdamW on every parameter without an override.

    Raises:
        ValueError: an override matches no parameter or assigns Muon to a parameter that is no matrix; no rule covers a
            parameter.
    """
    overrides = list(overrides)
    unused = {override.pattern for override in overrides}
    result = {}
    for name, parameter in parameters:
        chosen = {"lr_mult": 1.0, "weight_decay_mult": 0.0 if parameter.dim() <= 1 else 1.0}
        for override in overrides:
            if fnmatchcase(name, override.pattern):
                unused.discard(override.pattern)
                chosen |= {
                    key: value for key, value in vars(override).items() if key != "pattern" and value is not None
                }
        if "optimizer" not in chosen:
            chosen["optimizer"] = _rule(name, parameter) if default == "muon" else "adamw"
        matrices = _matrices(name, parameter, split_gate_up) if chosen["optimizer"] == "muon" else None
        result[name] = replace(role_of(parameter), matrices=matrices, **chosen)
    if unused:
        raise mistake(
            "optim.overrides",
            problem=f"no parameter matches {', '.join(sorted(unused))}",
            allowed="patterns of the names that `zaya train ... explain_optim=true` prints",
        )
    return result


def _rule(name: str, parameter: Tensor) -> str:
    """Return the optimizer of a parameter by the published rule."""
    if (
        parameter.dim() <= 1
        or _is_embedding(name, parameter)
        or any(part.startswith("conv") or part == "adapters" for part in name.split("."))
    ):
        return "adamw"
    if parameter.dim() == 2 or _is_expert_stack(name, parameter):
        return "muon"
    raise mistake(
        "optim.overrides",
        problem=f"{name} has shape {tuple(parameter.shape)}, and no rule gives it an optimizer",
        allowed="matrices, vectors, convolutions and stacks of expert matrices without an override",
        fix=f"optim.overrides=['{name} optimizer=adamw']",
    )


def _is_embedding(name: str, parameter: Tensor) -> bool:
    """Return whether the weight is the word embedding or the output layer, both of which Megatron marks."""
    return getattr(parameter, "is_embedding_or_output_parameter", False) or name.endswith("word_embeddings.weight")


def _is_expert_stack(name: str, parameter: Tensor) -> bool:
    """Return whether the weight is [experts, m, n], the shape that some grouped GEMMs need."""
    return parameter.dim() == 3 and "experts" in name.split(".")


def _matrices(name: str, parameter: Tensor, split_gate_up: bool) -> tuple[int, int, int]:
    """Return (b, m, n) of a Muon parameter."""
    embedding = _is_embedding(name, parameter)
    if embedding or parameter.dim() != 2 and not _is_expert_stack(name, parameter):
        raise mistake(
            "optim.overrides",
            problem=f"optimizer=muon matches {name}{', a table of rows,' if embedding else ''} of shape "
            f"{tuple(parameter.shape)}",
            allowed="Muon takes matrices and stacks of expert matrices",
            fix=f"optim.overrides=['{name} optimizer=adamw']",
        )
    b = parameter.shape[0] if parameter.dim() == 3 else 1
    m, n = parameter.shape[-2:]
    if split_gate_up and "experts" in name.split(".") and "linear_fc1" in name:
        if m % 2:
            raise mistake(
                "optim.muon_split_gate_up",
                True,
                problem=f"{name} has {m} rows, which cannot be halved",
                fix="optim.muon_split_gate_up=false",
            )
        b, m = 2 * b, m // 2
    return b, m, n

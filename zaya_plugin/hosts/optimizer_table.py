# SPDX-License-Identifier: Apache-2.0
"""Print the optimizer, learning rate and weight decay of every parameter: `zaya train ... explain_optim=true`.

The model is the real one, built without memory (on torch's meta device) in this process; nothing is launched.
`zaya train` runs this file in its own process, as `python -m zaya_plugin.hosts.optimizer_table <recipe.yaml>` would.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schema import Recipe
from zaya_plugin.hosts import rank_layout
from zaya_plugin.optim.parameter_role import ParameterRole


@dataclass(frozen=True)
class Row:
    """Parameters that differ only in layer and expert number."""

    name: str
    shape: tuple[int, ...]
    role: ParameterRole
    count: int

    @property
    def numel(self) -> int:
        """Return the number of elements of all parameters of this row."""
        return self.count * torch.Size(self.shape).numel()


def main(argv: list[str]) -> int:
    """Print the table for the recipe in the file argv[0], and return 0. Raise ValueError, as a run does, for overrides
    that do not fit the model.
    """
    from zaya_plugin.training.optimizer import assign_optimizers

    recipe = load_recipe(argv[0])
    with contextlib.redirect_stdout(io.StringIO()):
        model = model_without_memory(recipe)
    for line in table(recipe, rows(model, assign_optimizers(recipe, model))):
        print(line)
    return 0


def model_without_memory(recipe: Recipe) -> nn.Module:
    """Build the recipe's model on the meta device, with this process as the only rank."""
    args = rank_layout.arguments(recipe, 1)
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from zaya_plugin.hosts import stage_model
    from zaya_plugin.model.build import groups_of_one

    groups_of_one()
    model_parallel_cuda_manual_seed(recipe.seed, force_reset_rng=True)
    with torch.device("meta"):
        return stage_model.build_model(args, stage_model.model_config(args))


def rows(model: nn.Module, roles: dict[str, ParameterRole]) -> list[Row]:
    """Return one row for all trained parameters that differ only in layer and expert number, in the model's order."""
    counts: dict[tuple, int] = {}
    for name, parameter in ((name, p) for name, p in model.named_parameters() if p.requires_grad):
        general = re.sub(r"\.layers\.\d+\.", ".layers.*.", re.sub(r"(linear_fc[12]\.weight)\d+", r"\1*", name))
        key = (general, tuple(parameter.shape), replace(roles[name], block=None, index=0))
        counts[key] = counts.get(key, 0) + 1
    return [Row(*key, count) for key, count in counts.items()]


def table(recipe: Recipe, rows: list[Row]) -> Iterable[str]:
    """Yield the lines to print."""
    optim = recipe.optim
    width = max(len(row.name) for row in rows)
    yield f"{'parameter':{width}}  {'count':>5}  {'shape':15}  {'optimizer':32}  {'lr':>9}  {'weight decay':>12}"
    for row in rows:
        role = row.role
        what = role.optimizer
        if role.matrices is not None:
            b, m, n = role.matrices
            scale = optim.muon_rms_scale * max(m, n) ** 0.5
            what += f" {f'{b} x ' if b > 1 else ''}{m} x {n}, scale {scale:.3g}"
        yield (
            f"{row.name:{width}}  {row.count:>5}  {' x '.join(map(str, row.shape)):15}  {what:32}  "
            f"{optim.lr * role.lr_mult:>9.3g}  {optim.weight_decay * role.weight_decay_mult:>12.3g}"
        )
    yield ""
    momentum = 4 if optim.muon_momentum_dtype == "fp32" else 2
    for name, state in (("muon", momentum), ("adamw", 8)):
        chosen = [row for row in rows if row.role.optimizer == name]
        numel = sum(row.numel for row in chosen)
        master = 4 if recipe.cluster.dtype == "bf16" else 0
        yield (
            f"{name:6} {sum(row.count for row in chosen):>6,} parameters, {numel:>14,} elements, "
            f"{numel * (state + master) / 2**30:8.2f} GiB of state and fp32 weights, shared by the data-parallel ranks"
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

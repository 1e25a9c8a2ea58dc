# SPDX-License-Identifier: Apache-2.0
"""What goes wrong in Primus without a word, made into errors that name the key, the value and what is allowed.

Each was found in Primus v26.5 (commit fd1eeabb). Plain functions over the arguments that Primus made and the recipe; only
`known_keys` imports Primus.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from pathlib import Path

from zaya_plugin.config.arguments import BATCH_ARGUMENTS, OWN_ARGUMENTS
from zaya_plugin.config.schema import Recipe

# Keys of ours in an experiment.
RECIPE_KEY, TOLERATED_KEY = "zaya_recipe", "zaya_tolerated_patches"
OUR_KEYS = frozenset({RECIPE_KEY, TOLERATED_KEY, "stage", "spec", *OWN_ARGUMENTS, *BATCH_ARGUMENTS})
# Not of any experiment.
ADDED_BY_PRIMUS = frozenset({"model", "rank", "world_size", "local_rank"})

# key -> value it must have, and what happens otherwise.
FIXED = {
    "stage": ("zaya_pretrain", "another stage trains another model"),
    "model_type": ("gpt", "other types ignore the trainer's model, data and forward step"),
    "auto_continue_train": (
        False,
        "nothing reads it since Primus #851; the plugin itself goes on from the newest checkpoint",
    ),
    "disable_primus_topk_router": (True, "megatron.moe.primus_topk_router puts another router into every MoE layer"),
    "use_turbo_grouped_gemm": (
        False,
        "it keeps experts as one 3-D tensor, which its Muon passes over and leaves to Adam",
    ),
    "moe_router_force_load_balancing": (False, "a benchmark setting: tokens go to experts at random"),
    "mock_data": (False, "a benchmark setting: random tokens"),
    "optimizer": (
        "adam",
        "the plugin puts its own optimizers where Megatron builds Adam; optim.name of the recipe says which",
    ),
    "dataloader_type": ("single", "pre_trainer.yaml says cyclic, which shuffles again and has no place to resume at"),
    "finetune": (False, "pre_trainer.yaml says true, which drops the optimizer's state and the step at every resume"),
}


def recipe_path(args) -> Path:
    """The recipe that the experiment names.

    Raises:
        ValueError: none, or no such file.
    """
    path = getattr(args, RECIPE_KEY, None)
    if not path or not Path(path).is_file():
        raise ValueError(
            f"{RECIPE_KEY} = {path!r}: allowed: a recipe.yaml as `zaya export primus` writes it beside the experiment"
        )
    return Path(path)


def known_keys() -> set[str]:
    """Keys that something reads: Megatron's arguments, the presets of Primus' configs, and ours. Imports Primus."""
    from primus.backends.megatron.argument_builder import _load_megatron_defaults
    from primus.core.config.preset_loader import PresetLoader

    presets = [("pre_trainer.yaml", "modules"), ("language_model.yaml", "models")]
    found = {key for name, kind in presets for key in PresetLoader.load(name, "megatron", kind)}
    return found | set(_load_megatron_defaults()) | OUR_KEYS


def check(args, recipe: Recipe, known: Collection[str], failed_patches: Collection[str]) -> None:
    """All checks that need no model; raises one ValueError with everything that is wrong."""
    problems = [*fixed_values(args), *unknown_keys(args, known), *failures(failed_patches, args), *places(args, recipe)]
    if problems:
        raise ValueError("\n".join(problems))


def fixed_values(args) -> list[str]:
    """Keys with a value that would train something else."""
    problems = []
    for key, (allowed, otherwise) in FIXED.items():
        value = getattr(args, key, None)
        if value != allowed and not (not value and not allowed):
            problems.append(f"{key} = {value!r}: allowed: {allowed!r}; {otherwise}")
    return problems


def unknown_keys(args, known: Collection[str]) -> list[str]:
    """Keys of the experiment or of the command line that nothing reads: Primus hands them on without a word."""
    problems = []
    for key in sorted(set(vars(args)) - set(known) - ADDED_BY_PRIMUS):
        near = difflib.get_close_matches(key, known, 1)
        hint = f"; nearest: {near[0]}" if near else ""
        problems.append(f"{key} = {getattr(args, key)!r}: neither Megatron nor Primus nor the plugin reads it{hint}")
    return problems


def failures(failed_patches: Collection[str], args) -> list[str]:
    """Patches of Primus that failed and that the experiment does not tolerate by name."""
    tolerated = getattr(args, TOLERATED_KEY, None) or []
    return [
        f"Primus' patch {name} failed, which Primus only logs: mend it, or name it in {TOLERATED_KEY} if this run can do without"
        for name in dict.fromkeys(failed_patches)
        if name not in tolerated
    ]


def places(args, recipe: Recipe) -> list[str]:
    """Primus saves to <workspace>/<work_group>/<user_name>/<exp_name>/checkpoints, whatever `save` says."""
    wanted = os.path.join(os.path.abspath(recipe.run_dir), "checkpoints")
    if args.save is None or os.path.abspath(args.save) != wanted:
        return [
            f"save = {args.save!r}: allowed: {wanted}, where the recipe's run and its hand-overs are. Primus makes it of workspace, "
            "work_group, user_name and exp_name: leave them as exported, or export with another run_dir"
        ]
    return []


def check_flops(function) -> None:
    """Raises ValueError unless Megatron's FLOPs formula is ours: patches of Primus replace it for other models."""
    from zaya_plugin.patches.megatron_flops import zaya_flops

    if function is not zaya_flops:
        raise ValueError(
            f"megatron.training.training.num_floating_point_operations is {getattr(function, '__module__', function)}'s: TFLOP/s would be "
            "of another model. Set PRIMUS_PATCHES to leave that patch out"
        )


def check_assignments(model, recipe: Recipe) -> None:
    """Raises ValueError if experts fell out of Muon: a grouped GEMM may keep them as one tensor of another shape."""
    if recipe.optim.name != "muon":
        return
    from zaya_plugin.optim.parameter_role import role_of

    given_away = any("optimizer=adamw" in entry.split() for entry in recipe.optim.overrides)
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() > 1 and role_of(parameter).matrices is None and not given_away:
            raise ValueError(
                f"{name} of shape {tuple(parameter.shape)} would be trained by AdamW: optim.name = muon gives experts to Muon"
            )

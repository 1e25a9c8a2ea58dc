# SPDX-License-Identifier: Apache-2.0
"""Checks for settings that Primus accepts silently and that train another model or lose a checkpoint.

Each is in Primus v26.5 (commit fd1eeabb). The checks are functions of Primus' arguments and the recipe; only
`known_keys` imports Primus.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection
from pathlib import Path

from zaya_plugin.config.arguments import OWN_ARGUMENTS
from zaya_plugin.config.run_directory import checkpoint_path
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import message, mistake

# Keys of ours in an experiment.
RECIPE_KEY, TOLERATED_KEY = "zaya_recipe", "zaya_tolerated_patches"
OUR_KEYS = frozenset({RECIPE_KEY, TOLERATED_KEY, "stage", "spec", *OWN_ARGUMENTS})
# Keys that Primus adds itself.
ADDED_BY_PRIMUS = frozenset({"model", "rank", "world_size", "local_rank"})

# key -> the allowed value, and what happens with another one.
FIXED_KEYS = {
    "stage": ("zaya_pretrain", "another stage trains another model"),
    "model_type": ("gpt", "other types ignore the trainer's model, data and forward step"),
    "auto_continue_train": (
        False,
        "no code reads it since Primus #851; the plugin itself resumes from the newest checkpoint",
    ),
    "disable_primus_topk_router": (True, "megatron.moe.primus_topk_router puts another router into every MoE layer"),
    "use_turbo_grouped_gemm": (False, "it keeps experts as one 3-D tensor, which Primus' Muon leaves to Adam"),
    "moe_router_force_load_balancing": (False, "a benchmark setting: tokens go to experts at random"),
    "mock_data": (False, "a benchmark setting: random tokens"),
    "optimizer": (
        "adam",
        "the plugin builds its optimizers where Megatron builds Adam; optim.name of the recipe chooses",
    ),
    "dataloader_type": ("single", "pre_trainer.yaml sets cyclic, which shuffles again and cannot resume"),
    "finetune": (False, "pre_trainer.yaml sets true, which drops the optimizer's state and the step at every resume"),
}


def recipe_path(args) -> Path:
    """Return the path of the recipe that the experiment names.

    Raises:
        ValueError: it names none, or the file does not exist.
    """
    path = getattr(args, RECIPE_KEY, None)
    if not path or not Path(path).is_file():
        raise mistake(
            RECIPE_KEY,
            path,
            problem="the recipe does not exist",
            allowed="the recipe.yaml that `zaya export primus` writes next to the experiment",
            fix="zaya export primus experiment=<name> run_dir=<run directory>",
        )
    return Path(path)


def known_keys() -> set[str]:
    """Return the keys that are read: Megatron's arguments, the presets of Primus' configs, and ours. Imports Primus."""
    from primus.backends.megatron.argument_builder import _load_megatron_defaults
    from primus.core.config.preset_loader import PresetLoader

    presets = [("pre_trainer.yaml", "modules"), ("language_model.yaml", "models")]
    keys = {key for name, kind in presets for key in PresetLoader.load(name, "megatron", kind)}
    return keys | set(_load_megatron_defaults()) | OUR_KEYS


def check(args, recipe: Recipe, known: Collection[str], failed_patches: Collection[str]) -> None:
    """Run all checks that need no model; raise one ValueError that lists all problems."""
    problems = [*fixed_values(args), *unknown_keys(args, known), *failures(failed_patches, args), *places(args, recipe)]
    if problems:
        raise ValueError("\n".join(problems))


def fixed_values(args) -> list[str]:
    """Return a message for each key of FIXED_KEYS that has another value."""
    problems = []
    for key, (allowed, otherwise) in FIXED_KEYS.items():
        value = getattr(args, key, None)
        if value != allowed and not (not value and not allowed):
            typed = str(allowed).lower() if isinstance(allowed, bool) else allowed
            problems.append(
                message(key, value, problem=otherwise, allowed=typed, fix=f"{key}: {typed} in the experiment")
            )
    return problems


def unknown_keys(args, known: Collection[str]) -> list[str]:
    """Return a message for each key of the experiment or command line that is not read; Primus accepts such keys
    silently.
    """
    problems = []
    for key in sorted(set(vars(args)) - set(known) - ADDED_BY_PRIMUS):
        near = difflib.get_close_matches(key, known, 1)
        problems.append(
            message(
                key,
                getattr(args, key),
                problem="neither Megatron nor Primus nor the plugin reads it",
                allowed=f"{near[0]} is the nearest known key" if near else "",
                fix=f"remove {key}",
            )
        )
    return problems


def failures(failed_patches: Collection[str], args) -> list[str]:
    """Return a message for each failed patch of Primus that the experiment does not tolerate by name."""
    tolerated = getattr(args, TOLERATED_KEY, None) or []
    return [
        message(
            TOLERATED_KEY,
            tolerated,
            problem=f"Primus' patch {name} failed, which Primus only logs",
            fix=f"repair the patch, or add {name} to {TOLERATED_KEY} if this run does not need it",
        )
        for name in dict.fromkeys(failed_patches)
        if name not in tolerated
    ]


def places(args, recipe: Recipe) -> list[str]:
    """Return a message if `save` is not the recipe's; Primus makes
    <workspace>/<work_group>/<user_name>/<exp_name>/checkpoints of four keys.
    """
    save = os.path.abspath(checkpoint_path(recipe))
    if args.save is None or os.path.abspath(args.save) != save:
        return [
            message(
                "save",
                args.save,
                problem=(
                    "the recipe's run is in another directory; Primus makes `save` of workspace, work_group, "
                    "user_name and exp_name"
                ),
                allowed=save,
                fix="keep these keys as exported, or export with another run_dir",
            )
        ]
    return []


def check_flops(function) -> None:
    """Raise ValueError unless Megatron's FLOPs formula is ours; patches of Primus replace it for other models."""
    from zaya_plugin.patches.megatron_flops import zaya_flops

    if function is not zaya_flops:
        raise mistake(
            "megatron.training.training.num_floating_point_operations",
            problem=(
                f"{getattr(function, '__module__', function)} has replaced it, so the TFLOP/s would be of another model"
            ),
            fix="set PRIMUS_PATCHES to leave that patch out",
        )


def check_assignments(model, recipe: Recipe) -> None:
    """Raise ValueError if AdamW would train experts under optim.name=muon; a grouped GEMM may keep them as one tensor
    of another shape.
    """
    if recipe.optim.name != "muon":
        return
    from zaya_plugin.optim.parameter_role import role_of

    by_adamw = any("optimizer=adamw" in entry.split() for entry in recipe.optim.overrides)
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.dim() > 1 and role_of(parameter).matrices is None and not by_adamw:
            raise mistake(
                "optim.name",
                "muon",
                problem=f"{name} of shape {tuple(parameter.shape)} would be trained by AdamW",
                allowed="experts as matrices of their own",
                fix="use_turbo_grouped_gemm: false",
            )

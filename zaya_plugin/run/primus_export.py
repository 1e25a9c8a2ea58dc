# SPDX-License-Identifier: Apache-2.0
"""A recipe as an experiment file for Primus, for the stage of zaya_plugin.hosts.primus.trainer or, with `--spec`, for none.

Every value of the recipe is written out, over Primus' generic presets (a plugin cannot ship one), and so is every
preset's value that would change the run. No Primus and no Megatron import: the file can be made anywhere.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.config.arguments import BATCH_ARGUMENTS, DECIDED_AT_START, OWN_ARGUMENTS, megatron_arguments
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import find_sources
from zaya_plugin.plan.recipe_plan import with_recompute
from zaya_plugin.run.dry_run import tokenizer_arguments
from zaya_plugin.run.megatron_export import SPEC, host_arguments, left_out, placed, write
from zaya_plugin.run.rank_plan import COPY_ENGINES, DETERMINISTIC, HIDDEN_DEVICES, rank_environment

# What Primus' presets (pre_trainer.yaml, language_model.yaml and their parents) set otherwise than Megatron's defaults.
PRESETS_UNDONE = dict(
    dataloader_type="single",
    use_flash_attn=False,
    finetune=False,
    exit_on_missing_checkpoint=False,
    add_position_embedding=True,
    disable_primus_topk_router=True,
    moe_router_force_load_balancing=False,
    mock_data=False,
    # Primus switches Python's collector off for the whole training, and so would Megatron's checkpoints leak.
    manual_gc=True,
    manual_gc_interval=100,
    # no tuned kernels that change modules under the model's feet
    enable_primus_turbo=False,
    use_turbo_grouped_gemm=False,
)
# Arguments of Megatron 0.17 and later; Primus' pin has other ways or none.
NOT_IN_PIN = ("step_batch_size_schedule", "eval_global_batch_size")
LEAST_PARTS = 3
NEEDED_VARIABLES = (
    *HIDDEN_DEVICES,
    "TORCHDYNAMO_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    *DETERMINISTIC,
    *COPY_ENGINES,
)


def experiment(recipe: Recipe, data: dict[str, Any], ranks_here: int, spec: bool = False) -> dict[str, Any]:
    """The document.

    Args:
        recipe: placed (absolute run_dir).
        data: `host_arguments` with `spec`, else Megatron's arguments of the tokenizer.
        ranks_here: ranks of one node.
        spec: for stock Primus: the guest comes in by `spec` and Primus reads the data.

    Raises:
        ValueError: the recipe asks for what Primus' Megatron has not, or run_dir is too short a path.
    """
    values = dict(data) if spec else megatron_arguments(recipe, data)
    if recipe.cluster.graphs == "full_iteration":
        raise ValueError(
            f"cluster.graphs = {recipe.cluster.graphs}: allowed: none, auto; Primus pins Megatron 0.16, which has no such graphs"
        )
    if found := [name for name in NOT_IN_PIN if name in values]:
        raise ValueError(
            f"stage.batch_size_ramp = {recipe.stage.batch_size_ramp!r}: allowed: null; {', '.join(found)} came with Megatron 0.17, and Primus "
            "pins 0.16"
        )
    for name in DECIDED_AT_START:
        values.pop(name, None)
    if spec:
        values["spec"] = list(SPEC)
    else:
        # Flat, so that they become arguments: saved with checkpoints and compared when one is loaded.
        values |= {name: values.get(name) for name in (*OWN_ARGUMENTS, *BATCH_ARGUMENTS)}
        values["stage"] = "zaya_pretrain"
        values["zaya_recipe"] = str(Path(recipe.run_dir) / "recipe.yaml")
    undone = dict(PRESETS_UNDONE)
    undone["disable_tensorboard"] = not recipe.logger.tensorboard
    undone["disable_wandb"] = not recipe.logger.wandb
    parts = Path(recipe.run_dir).parts
    if len(parts) <= LEAST_PARTS:  # the root is a part
        raise ValueError(
            f"run_dir = {recipe.run_dir}: allowed: a path of at least {LEAST_PARTS} folders, since Primus saves to "
            "<workspace>/<work_group>/<user_name>/<exp_name>/checkpoints"
        )
    *workspace, group, user, name = parts
    return {
        "work_group": group,
        "user_name": user,
        "exp_name": name,
        "workspace": str(Path(*workspace)),
        # Repeated in every file: Primus takes it from the experiment itself, not from what it extends.
        "env": environment(recipe, ranks_here),
        "modules": {
            "pre_trainer": {
                "framework": "megatron",
                "config": "pre_trainer.yaml",
                "model": "language_model.yaml",
                "overrides": dict(sorted({**undone, **{key: _plain(value) for key, value in values.items()}}.items())),
            }
        },
    }


def environment(recipe: Recipe, ranks_here: int) -> dict[str, str]:
    """The ranks' variables that are not Primus' own business (threads, log prefixes).

    Raises:
        ValueError: a value with ${...}, which Primus would take for one of its own variables.
    """
    variables = rank_environment(recipe, ranks_here, {})
    kept = {
        name: value
        for name, value in variables.items()
        if name in recipe.cluster.environment or name in NEEDED_VARIABLES
    }
    for name, value in kept.items():
        if "${" in value:
            raise ValueError(
                f"cluster.environment.{name} = {value!r}: allowed: plain text; Primus would look up what is in ${{}}"
            )
    return dict(sorted(kept.items()))


def text(recipe: Recipe, document: dict[str, Any]) -> str:
    """The file."""
    return (
        f"# Written by `zaya export primus`: {recipe.name}. Change the recipe and export again; keys that nothing reads are refused.\n"
        + yaml.safe_dump(document, sort_keys=False, default_flow_style=False, width=1000)
    )


def launcher() -> Path:
    """The script for `primus-cli direct --script`."""
    return Path(__file__).parents[1] / "primus" / "zaya_primus.py"


def export_primus(recipe: Recipe, world_size: int, spec: bool = False) -> str:
    """Writes primus.yaml and recipe.yaml to the run directory; returns how to start it.

    Raises:
        ValueError: see `experiment`; and with `spec` what a host that reads its own data cannot do.
    """
    recipe, chosen = placed(recipe), None
    nodes = recipe.cluster.num_nodes
    here = min(world_size, recipe.cluster.gpus_per_node) if nodes > 1 else world_size
    if spec:
        data = host_arguments(recipe, find_sources(recipe))
    else:
        recipe, chosen = with_recompute(recipe, world_size)
        data = tokenizer_arguments(recipe)  # a login node may not have the data
    path = write(recipe, "primus.yaml", text(recipe, experiment(recipe, data, here, spec)))
    notes = [note for note in left_out(recipe) if spec or note.startswith(("logger", "resume"))]
    lines = [f"# {chosen}"] if chosen else []
    lines += [
        f"# written: {path} and {path.with_name('recipe.yaml')}",
        *(f"# not done there: {note}" for note in notes),
    ]
    script = "" if spec else f"--script {shlex.quote(str(launcher()))} "
    lines.append(f"primus-cli direct {script}-- train pretrain --config {shlex.quote(str(path))}")
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value

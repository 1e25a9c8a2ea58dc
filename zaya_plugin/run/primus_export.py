# SPDX-License-Identifier: Apache-2.0
"""`zaya export primus`: a recipe as an experiment for Primus, with the stage of zaya_plugin.hosts.primus.trainer or,
with `--spec`, without.

The file holds every value of the recipe, over Primus' generic presets (a plugin cannot ship a preset), and every preset
value that would change the run. No Primus and no Megatron import: the file can be made on any machine.
"""

import shlex
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.config.arguments import DECIDED_AT_START, OWN_ARGUMENTS, arguments_with_event_files
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import find_sources
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan.expected_step import COPY_ENGINES
from zaya_plugin.plan.recipe_plan import with_recompute
from zaya_plugin.run.dry_run import tokenizer_arguments
from zaya_plugin.run.megatron_export import SPEC, host_arguments, left_out, placed, ranks_of_node, write, written
from zaya_plugin.run.rank_plan import DETERMINISTIC, FULL_FP32, HIDDEN_DEVICES, rank_environment

# Megatron's defaults where Primus' presets (pre_trainer.yaml, language_model.yaml and their parents) have other values.
PRESETS_UNDONE = dict(
    dataloader_type="single",
    use_flash_attn=False,
    finetune=False,
    exit_on_missing_checkpoint=False,
    add_position_embedding=True,
    disable_primus_topk_router=True,
    moe_router_force_load_balancing=False,
    mock_data=False,
    # Primus disables Python's garbage collector for the whole training; Megatron's checkpoints would leak.
    manual_gc=True,
    manual_gc_interval=100,
    # no tuned kernels that replace modules of the model
    enable_primus_turbo=False,
    use_turbo_grouped_gemm=False,
)
# Arguments of Megatron 0.17 and later; Primus' pin does not have them.
NOT_IN_PIN = ("step_batch_size_schedule", "eval_global_batch_size")
LEAST_PARTS = 3
NEEDED_VARIABLES = (
    *HIDDEN_DEVICES,
    "TORCHDYNAMO_DISABLE",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    *DETERMINISTIC,
    *FULL_FP32,
    *COPY_ENGINES,
)


def experiment(recipe: Recipe, data: dict[str, Any], local_ranks: int, spec: bool = False) -> dict[str, Any]:
    """Return the experiment.

    Args:
        recipe: placed (absolute run_dir).
        data: `host_arguments` with `spec`, else Megatron's arguments for the tokenizer.
        local_ranks: ranks of one node.
        spec: for stock Primus: the plugin is installed by `spec`, and Primus reads the data.

    Raises:
        ValueError: the recipe needs something that Primus' Megatron does not have, or run_dir is too short a path.
    """
    values = dict(data) if spec else arguments_with_event_files(recipe, data)
    if recipe.cluster.graphs == "full_iteration":
        raise mistake(
            "cluster.graphs",
            recipe.cluster.graphs,
            problem="Primus pins Megatron 0.16, which has no such graphs",
            allowed="none, auto",
            fix="cluster.graphs=none",
        )
    if unsupported := [name for name in NOT_IN_PIN if name in values]:
        raise mistake(
            "stage.batch_size_ramp",
            recipe.stage.batch_size_ramp,
            problem=f"{', '.join(unsupported)} came with Megatron 0.17, and Primus pins 0.16",
            allowed="null",
            fix="stage.batch_size_ramp=null",
        )
    for name in DECIDED_AT_START:
        values.pop(name, None)
    if spec:
        values["spec"] = list(SPEC)
    else:
        # Top-level keys become arguments, which are saved with checkpoints and compared when one is loaded.
        values |= {name: values.get(name) for name in OWN_ARGUMENTS}
        values |= {"stage": "zaya_pretrain", "zaya_recipe": str(Path(recipe.run_dir) / "recipe.yaml")}
    loggers = {"disable_tensorboard": not recipe.logger.tensorboard, "disable_wandb": not recipe.logger.wandb}
    overrides = PRESETS_UNDONE | loggers | {name: _plain(value) for name, value in values.items()}
    parts = Path(recipe.run_dir).parts
    if len(parts) <= LEAST_PARTS:  # the root is a part
        raise mistake(
            "run_dir",
            recipe.run_dir,
            problem="Primus saves to <workspace>/<work_group>/<user_name>/<exp_name>/checkpoints",
            allowed=f"a path of at least {LEAST_PARTS} folders",
            fix="run_dir=<workspace>/<group>/<user>/<name>",
        )
    *workspace, group, user, name = parts
    return {
        "work_group": group,
        "user_name": user,
        "exp_name": name,
        "workspace": str(Path(*workspace)),
        # Repeated in every file: Primus reads it from the experiment itself, not from files that it extends.
        "env": environment(recipe, local_ranks),
        "modules": {
            "pre_trainer": {
                "framework": "megatron",
                "config": "pre_trainer.yaml",
                "model": "language_model.yaml",
                "overrides": dict(sorted(overrides.items())),
            }
        },
    }


def environment(recipe: Recipe, local_ranks: int) -> dict[str, str]:
    """Return the ranks' variables without those that Primus sets itself (threads, log prefixes).

    Raises:
        ValueError: a value contains ${...}, which Primus would expand.
    """
    variables = rank_environment(recipe, local_ranks, {})
    kept = {
        name: value
        for name, value in variables.items()
        if name in recipe.cluster.environment or name in NEEDED_VARIABLES
    }
    for name, value in kept.items():
        if "${" in value:
            problem = "Primus would expand what is in ${}"
            raise mistake(f"cluster.environment.{name}", value, problem=problem, allowed="plain text")
    return dict(sorted(kept.items()))


def text(recipe: Recipe, document: dict[str, Any]) -> str:
    """Return the text of the file."""
    return (
        f"# Written by `zaya export primus`: {recipe.name}. Change the recipe and export again; keys that nothing "
        "reads are refused.\n" + yaml.safe_dump(document, sort_keys=False, default_flow_style=False, width=1000)
    )


def launcher() -> Path:
    """Return the path of the script for `primus-cli direct --script`."""
    return Path(__file__).parents[1] / "primus" / "zaya_primus.py"


def export_primus(recipe: Recipe, world_size: int, spec: bool = False) -> str:
    """Write primus.yaml and recipe.yaml to the run directory and return the command that starts the run.

    Raises:
        ValueError: see `experiment`; with `spec` see `host_arguments`.
    """
    recipe, chosen, notes = placed(recipe), None, left_out(recipe)
    if spec:
        data = host_arguments(recipe, find_sources(recipe))
    else:
        recipe, chosen = with_recompute(recipe, world_size)
        data = tokenizer_arguments(recipe)  # the data may not be on a login node
        notes = [note for note in notes if note.startswith(("logger", "resume"))]
    path = write(recipe, "primus.yaml", text(recipe, experiment(recipe, data, ranks_of_node(recipe, world_size), spec)))
    script = "" if spec else f"--script {shlex.quote(str(launcher()))} "
    command = f"primus-cli direct {script}-- train pretrain --config {shlex.quote(str(path))}"
    return "\n".join([*([f"# {chosen}"] if chosen else []), *written(path, notes), command])


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value

# SPDX-License-Identifier: Apache-2.0
"""`zaya export slurm|megatron|primus`: a recipe as a batch script, or in the form of another host. No torch import."""

import argparse

from zaya_plugin.commands.parser import command, option
from zaya_plugin.config.validate import validate
from zaya_plugin.handover.published import compose_published
from zaya_plugin.plan.bucket_plan import with_bucket_plan
from zaya_plugin.run import sbatch
from zaya_plugin.run.megatron_export import export_megatron, instructions
from zaya_plugin.run.primus_export import export_primus
from zaya_plugin.run.rank_plan import planned_ranks
from zaya_plugin.run.stages import compose_curriculum


@command(
    "export slurm",
    option("--curriculum", action="store_true", help="the script runs all stages of a curriculum"),
    option("--submitit", action="store_true", help="submit the job through the package submitit; print its id"),
    behind_dashes="SBATCH_OPTION",
    recipe=True,
)
def slurm(options: argparse.Namespace) -> None:
    """Prints a batch script for SLURM, or submits the job.

    The script sets the cluster's environment and starts with srun one `zaya train` (or one `zaya curriculum --only` for
    each stage) for each device. It resumes from the last checkpoint, so the same script is submitted again after a time
    limit. Options of sbatch follow `--`.

    examples:
      zaya export slurm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web -- --partition=mi300x \\
          --time=2-00:00:00 > run.sbatch
      zaya export slurm --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web > zaya1.sbatch
      zaya export slurm --submitit experiment=zaya1_base cluster=mi300x_8 data.path=data/web
    """
    overrides = options.overrides
    if options.curriculum:
        whole = compose_curriculum(overrides)
        recipe, recipes = whole.recipe, [stage.recipe for stage in whole.stages]
        commands = [["zaya", "curriculum", "--only", stage.name, *overrides] for stage in whole.stages]
    else:
        resumed = overrides if any(item.startswith("resume=") for item in overrides) else [*overrides, "resume=auto"]
        recipe = compose_published(resumed)
        recipes, commands = [recipe], [["zaya", "train", *resumed]]
    for stage_recipe in recipes:
        validate(stage_recipe, stage_recipe.cluster.num_nodes * stage_recipe.cluster.gpus_per_node)
    recipe.cluster.sbatch = [*recipe.cluster.sbatch, *options.behind_dashes]
    sbatch.check_slurm(recipe)
    if options.submitit:
        print(f"submitted as job {sbatch.submit(recipe, commands)}")
    else:
        sbatch.create_run_dir(recipe)
        print(sbatch.script(recipe, commands), end="")


@command("export megatron", recipe=True)
def megatron(options: argparse.Namespace) -> None:
    """Writes a recipe for Megatron-LM (docs/megatron.md): <run_dir>/megatron.args, the words for its own
    pretrain_gpt.py.

    The parser of the installed Megatron checks them, so use the host's Python. The plugin reads recipe.yaml next to
    them when the host has started. Settings that the host ignores are printed; settings that it cannot carry out are
    errors.

    examples:
      zaya export megatron experiment=cpu_demo run_dir=runs/guest
    """
    for recipe, ranks in _validated([compose_published(options.overrides)]):
        print(instructions(recipe, ranks, export_megatron(recipe)))


@command(
    "export primus",
    option("--curriculum", action="store_true", help="one experiment for each stage, in <run_dir>/<stage>"),
    option("--spec", action="store_true", help="for stock Primus, in place of the stage zaya_pretrain"),
    recipe=True,
)
def primus(options: argparse.Namespace) -> None:
    """Writes a recipe for Primus (docs/primus.md): <run_dir>/primus.yaml, an experiment for primus-cli.

    The plugin reads the recipe.yaml next to it when the host has started. Settings that the host ignores are printed;
    settings that it cannot carry out are errors.

    examples:
      zaya export primus experiment=zaya1_base cluster=mi300x_8 data.path=data/corpus run_dir=runs/zaya1
      zaya export primus --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/corpus run_dir=runs/zaya1
    """
    if options.curriculum:
        recipes = [stage.recipe for stage in compose_curriculum(options.overrides).stages]
    else:
        recipes = [compose_published(options.overrides)]
    for recipe, ranks in _validated(recipes):
        print(export_primus(recipe, ranks, options.spec))


def _validated(recipes: list) -> list[tuple]:
    """Return the recipes with their numbers of ranks; all are valid, before anything is written."""
    sized = [(with_bucket_plan(recipe, planned_ranks(recipe))[0], planned_ranks(recipe)) for recipe in recipes]
    for recipe, ranks in sized:
        validate(recipe, ranks)
    return sized

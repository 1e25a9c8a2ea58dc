# SPDX-License-Identifier: Apache-2.0
"""The commands `zaya curriculum` and `zaya slurm`. No torch import."""

from __future__ import annotations

import os
from pathlib import Path

CURRICULUM_HELP = """\
zaya curriculum: the stages of a curriculum, one after the other

  zaya curriculum experiment=<name> [key=value ...] [<stage>:key=value ...] [--only STAGE] [--dry-run] [--config-dir DIR]

The experiment lists its stages in curriculum.stages; each is an experiment of its own and runs in <run_dir>/<stage> as
`zaya train` would. It begins with the weights, the optimizer's state and the place in the data that the stage before ended with, and
with its own context, RoPE base, layout, batch and schedule. What is finished is not done again: after a kill give the same
command. key=value holds for all stages, <stage>:key=value for one.

EXAMPLES
  zaya curriculum experiment=cpu_demo                                      three tiny stages on this machine's CPU, after:
                                                                           zaya data prepare --input stdlib --output data/stdlib
  zaya curriculum experiment=cpu_demo --dry-run                            every stage's command, environment and Megatron arguments
  zaya curriculum experiment=zaya1_base cluster=mi300x_8 pretrain_4k:data.path=data/web midtrain_32k:data.path=data/long
  zaya slurm --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web > zaya1.sbatch
  srun zaya curriculum --only pretrain_4k_2 experiment=zaya1_base ...      one stage, in the ranks that srun has started

Exit codes: 0 all stages done, 2 a mistake in a recipe, else that of the stage that stopped.
"""

SLURM_HELP = """\
zaya slurm: a batch script for SLURM, on stdout

  zaya slurm [--curriculum] experiment=<name> cluster=<name> [key=value ...] [--config-dir DIR] [-- SBATCH OPTIONS] > run.sbatch
  zaya slurm --submitit [--curriculum] ...      submit through the package submitit instead

The script sets the cluster's environment and starts one `zaya train` (or one `zaya curriculum --only` a stage) a device with srun. It
goes on from the last checkpoint, so the same script is submitted again after a time limit. Options of your site come last:

  zaya slurm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web -- --partition=mi300x --time=2-00:00:00 > run.sbatch
"""


def curriculum(argv: list[str]) -> int:
    """`zaya curriculum`; returns its exit code, raises ValueError for what a user can mend."""
    if not argv or any(flag in argv for flag in ("-h", "--help")):
        print(CURRICULUM_HELP, end="")
        return 0 if argv else 2
    from zaya_plugin.run.curriculum import compose_curriculum
    from zaya_plugin.run.curriculum_run import describe, run_curriculum

    argv, dry = without_flag(argv, "--dry-run")
    argv, only = option(argv, "--only")
    whole = compose_curriculum(overrides_of(argv, "curriculum"))
    if dry or whole.recipe.dry_run:
        print(describe(whole))
        return 0
    return run_curriculum(whole, only)


def slurm(argv: list[str]) -> int:
    """`zaya slurm`; returns its exit code, raises ValueError for what a user can mend."""
    if not argv or any(flag in argv for flag in ("-h", "--help")):
        print(SLURM_HELP, end="")
        return 0 if argv else 2
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run import sbatch
    from zaya_plugin.run.curriculum import compose_curriculum

    of_site = argv[argv.index("--") + 1 :] if "--" in argv else []
    argv = argv[: argv.index("--")] if "--" in argv else argv
    argv, of_curriculum = without_flag(argv, "--curriculum")
    argv, with_submitit = without_flag(argv, "--submitit")
    overrides = overrides_of(argv, "slurm")
    if of_curriculum:
        whole = compose_curriculum(overrides)
        recipe, recipes = whole.recipe, [stage.recipe for stage in whole.stages]
        commands = [["zaya", "curriculum", "--only", stage.name, *overrides] for stage in whole.stages]
    else:
        resumed = overrides if any(item.startswith("resume=") for item in overrides) else [*overrides, "resume=auto"]
        recipe = compose(resumed)
        recipes, commands = [recipe], [["zaya", "train", *resumed]]
    for each in recipes:
        validate(each, each.cluster.num_nodes * each.cluster.gpus_per_node)
    recipe.cluster.sbatch = [*recipe.cluster.sbatch, *of_site]
    sbatch.check_slurm(recipe)
    if with_submitit:
        print(f"submitted as job {sbatch.submit(recipe, commands)}")
    else:
        print(sbatch.script(recipe, commands), end="")
    return 0


def overrides_of(argv: list[str], command: str) -> list[str]:
    """Overrides of a command line on which only they and --config-dir are left."""
    from zaya_plugin.config.compose import open_overrides

    argv, folder = option(argv, "--config-dir")
    for item in argv:
        if item.startswith("-") or "=" not in item:
            raise ValueError(
                f"zaya {command}: {item!r}: allowed: key=value, and the options that zaya {command} --help names"
            )
    if folder is not None:
        if not os.path.isdir(folder):
            raise ValueError(f"--config-dir {folder}: no such directory")
        argv = [*argv, f"hydra.searchpath=[file://{Path(folder).resolve()}]"]
    return open_overrides(argv)


def without_flag(argv: list[str], flag: str) -> tuple[list[str], bool]:
    return [item for item in argv if item != flag], flag in argv


def option(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """`argv` without `name VALUE` or `name=VALUE`, and the value."""
    for index, item in enumerate(argv):
        if item.startswith(f"{name}="):
            return argv[:index] + argv[index + 1 :], item.partition("=")[2]
        if item == name:
            if index + 1 == len(argv):
                raise ValueError(f"{name} needs a value")
            return argv[:index] + argv[index + 2 :], argv[index + 1]
    return argv, None

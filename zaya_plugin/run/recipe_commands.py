# SPDX-License-Identifier: Apache-2.0
"""The commands `zaya curriculum`, `zaya slurm` and `zaya export`, and the parser that commands with recipe overrides
share. No torch import.
"""

import argparse
import sys
from collections.abc import Sequence

from zaya_plugin.config.compose import compose, open_overrides, say_repeated
from zaya_plugin.config.config_dir import OPTIONS, with_search_path
from zaya_plugin.config.train_help import DEMO_DATA
from zaya_plugin.config.validate import validate
from zaya_plugin.config.words import check_flag, check_override
from zaya_plugin.ground import phases
from zaya_plugin.ground.errors import mistake
from zaya_plugin.run import megatron_export, primus_export, sbatch
from zaya_plugin.run.curriculum import compose_curriculum
from zaya_plugin.run.curriculum_run import dry_run, run_curriculum

CURRICULUM = """\
Runs the stages of a curriculum one after the other.

The experiment lists its stages in curriculum.stages; each is an experiment of its own and runs in <run_dir>/<stage>
as `zaya train` would. It starts from the weights, the optimizer state and the place in the data at which the previous
stage ended, with its own context, RoPE base, layout, batch and schedule. Finished stages are skipped: after a kill
give the same command again.
<stage>:key=value sets a key for one stage, key=value for all."""
CURRICULUM_EXAMPLES = f"""\
examples:
  zaya curriculum experiment=cpu_demo                     three tiny stages on this machine's CPU, after:
    {DEMO_DATA}
  zaya curriculum experiment=cpu_demo --dry-run           whether and what would run, by stage
  zaya curriculum experiment=zaya1_base cluster=mi300x_8 pretrain_4k:data.path=data/web midtrain_32k:data.path=data/long
  zaya slurm --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web > zaya1.sbatch
  srun zaya curriculum --only pretrain_4k_2 experiment=zaya1_base ...      one stage, in the ranks that srun has started

Exit codes: 0 all stages done, 2 a mistake in a recipe, else that of the stage that stopped."""

SLURM = """\
Prints a batch script for SLURM, or submits the job.

The script sets the cluster's environment and starts with srun one `zaya train` (or one `zaya curriculum --only` for
each stage) for each device. It resumes from the last checkpoint, so the same script is submitted again after a time
limit. Options of sbatch follow `--`."""
SLURM_EXAMPLES = """\
examples:
  zaya slurm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web -- --partition=mi300x --time=2-00:00:00 \\
      > run.sbatch
  zaya slurm --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web > zaya1.sbatch
  zaya slurm --submitit experiment=zaya1_base cluster=mi300x_8 data.path=data/web"""

EXPORT = """\
Writes a recipe in the form of another host (docs/hosts.md).

megatron writes <run_dir>/megatron.args, the words for Megatron-LM's own pretrain_gpt.py; it asks the parser of the
installed Megatron, so use the host's Python. primus writes <run_dir>/primus.yaml, an experiment for primus-cli.
recipe.yaml is written beside each; the plugin reads it when the host has started. Settings that the host ignores are
printed; settings that it cannot carry out are errors."""
EXPORT_EXAMPLES = """\
examples:
  zaya export megatron experiment=cpu_demo run_dir=runs/guest
  zaya export primus experiment=zaya1_base cluster=mi300x_8 data.path=data/corpus run_dir=runs/zaya1
  zaya export primus --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/corpus run_dir=runs/zaya1"""


class Parser(argparse.ArgumentParser):
    """The options of a command that takes recipe overrides; a mistake raises ValueError."""

    def __init__(self, name: str, description: str, examples: str):
        super().__init__(
            f"zaya {name}",
            description=description,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def read(self, argv: Sequence[str]) -> argparse.Namespace | None:
        """Return the options of `argv`, `overrides` among them; without words print the help and return None."""
        self.add_argument(
            *OPTIONS, metavar="DIR", help="folder with your own recipes, as my_recipes/experiment/mine.yaml"
        )
        self.add_argument(
            "overrides",
            nargs="*",
            metavar="key=value",
            help="experiment=<name>, <group>=<option> and recipe keys; `zaya train --help` lists them",
        )
        if not argv:
            return self.print_help()
        argv = with_search_path(argv)
        for position, word in enumerate(argv):
            check_flag(word, argv[position + 1 :], self._option_string_actions)
        options = self.parse_intermixed_args(argv)
        for word in options.overrides:
            check_override(word)
        say_repeated(options.overrides)
        options.overrides = open_overrides(options.overrides)
        return options

    def error(self, message: str) -> None:
        """Raise a mistake that names the help."""
        raise mistake(self.prog, problem=message, fix=f"{self.prog} --help")


def curriculum(argv: list[str]) -> int:
    """Run `zaya curriculum` and return its exit code; raises ValueError for a user's mistake."""
    parser = Parser("curriculum", CURRICULUM, CURRICULUM_EXAMPLES)
    parser.add_argument(
        "--only", metavar="STAGE", help="run this stage alone, also in ranks that torchrun or srun has started"
    )
    parser.add_argument("--dry-run", action="store_true", help="print whether and what would run, and stop")
    parser.add_argument("--verbose", action="store_true", help="with --dry-run: everything")
    if (options := parser.read(argv)) is None:
        return 2
    whole = compose_curriculum(options.overrides)
    if options.dry_run or whole.recipe.dry_run:
        phases.show(sys.stderr)
        text, problems = dry_run(whole, options.only, options.verbose)
        phases.show(None)
        print(text, flush=True)
        if problems:
            raise ValueError("\n".join(problems))
        return 0
    return run_curriculum(whole, options.only)


def slurm(argv: list[str]) -> int:
    """Run `zaya slurm` and return its exit code; raises ValueError for a user's mistake."""
    parser = Parser("slurm", SLURM, SLURM_EXAMPLES)
    parser.add_argument("--curriculum", action="store_true", help="the script runs all stages of a curriculum")
    parser.add_argument(
        "--submitit", action="store_true", help="submit the job through the package submitit; print its id"
    )
    end = argv.index("--") if "--" in argv else len(argv)
    if (options := parser.read(argv[:end])) is None:
        return 2
    overrides = options.overrides
    if options.curriculum:
        whole = compose_curriculum(overrides)
        recipe, recipes = whole.recipe, [stage.recipe for stage in whole.stages]
        commands = [["zaya", "curriculum", "--only", stage.name, *overrides] for stage in whole.stages]
    else:
        resumed = overrides if any(item.startswith("resume=") for item in overrides) else [*overrides, "resume=auto"]
        recipe = compose(resumed)
        recipes, commands = [recipe], [["zaya", "train", *resumed]]
    for stage_recipe in recipes:
        validate(stage_recipe, stage_recipe.cluster.num_nodes * stage_recipe.cluster.gpus_per_node)
    recipe.cluster.sbatch = [*recipe.cluster.sbatch, *argv[end + 1 :]]
    sbatch.check_slurm(recipe)
    if options.submitit:
        print(f"submitted as job {sbatch.submit(recipe, commands)}")
    else:
        print(sbatch.script(recipe, commands), end="")
    return 0


def export(argv: list[str]) -> int:
    """Run `zaya export` and return its exit code; raises ValueError for a user's mistake."""
    parser = Parser("export", EXPORT, EXPORT_EXAMPLES)
    parser.add_argument("host", choices=("megatron", "primus"), help="the host that the files are for")
    parser.add_argument(
        "--curriculum", action="store_true", help="primus: one experiment for each stage, in <run_dir>/<stage>"
    )
    parser.add_argument(
        "--spec", action="store_true", help="primus: for stock Primus, in place of the stage zaya_pretrain"
    )
    if (options := parser.read(argv)) is None:
        return 2
    if options.host == "megatron" and (options.curriculum or options.spec):
        raise mistake(
            "zaya export megatron",
            problem="--curriculum and --spec are for primus",
            fix="export each stage by its experiment",
        )
    if options.curriculum:
        recipes = [stage.recipe for stage in compose_curriculum(options.overrides).stages]
    else:
        recipes = [compose(options.overrides)]
    world_sizes = [recipe.nproc or recipe.cluster.num_nodes * recipe.cluster.gpus_per_node for recipe in recipes]
    for recipe, ranks in zip(recipes, world_sizes, strict=True):  # all, before anything is written
        validate(recipe, ranks)
    for recipe, ranks in zip(recipes, world_sizes, strict=True):
        if options.host == "megatron":
            print(megatron_export.instructions(recipe, ranks, megatron_export.export_megatron(recipe)))
        else:
            print(primus_export.export_primus(recipe, ranks, options.spec))
    return 0

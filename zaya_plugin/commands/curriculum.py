# SPDX-License-Identifier: Apache-2.0
"""`zaya curriculum`: the stages of a curriculum one after the other, or one of them. No torch import."""

import argparse
import sys

from zaya_plugin.commands.parser import DRY_RUN, VERBOSE, command, option
from zaya_plugin.ground import phases


@command(
    "curriculum",
    option("--only", metavar="STAGE", help="run this stage alone, also in ranks that torchrun or srun has started"),
    DRY_RUN,
    VERBOSE,
    recipe=True,
)
def curriculum(options: argparse.Namespace) -> int:
    """Runs the stages of a curriculum one after the other.

    The experiment lists its stages in curriculum.stages; each is an experiment of its own and runs in <run_dir>/<stage>
    as `zaya train` would. It starts from the weights, the optimizer state and the place in the data at which the
    previous stage ended, with its own context, RoPE base, layout, batch and schedule. Finished stages are skipped: the
    same command continues an interrupted curriculum. <stage>:key=value sets a key for one stage, key=value for all.

    examples:
      zaya curriculum experiment=cpu_demo                     three tiny stages on this machine's CPU, after:
        zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1
      zaya curriculum experiment=cpu_demo --dry-run           whether and what would run, by stage
      zaya curriculum experiment=zaya1_base cluster=mi300x_8 pretrain_4k:data.path=data/web midtrain_32k:data.path=data/long
      zaya export slurm --curriculum experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web > zaya1.sbatch
      srun zaya curriculum --only pretrain_4k_2 experiment=zaya1_base ...      one stage, in the ranks that srun has started

    Exit codes: 0 all stages done, 2 a mistake in a recipe, else that of the stage that stopped.
    """
    from zaya_plugin.run.curriculum_run import dry_run, run_curriculum
    from zaya_plugin.run.stages import compose_curriculum

    whole = compose_curriculum(options.overrides, download=not options.dry_run)
    if not (options.dry_run or whole.recipe.dry_run):
        return run_curriculum(whole, options.only)
    phases.show(sys.stderr)
    text, problems = dry_run(whole, options.only, options.verbose)
    phases.show(None)
    print(text, flush=True)
    if problems:
        raise ValueError("\n".join(problems))
    return 0

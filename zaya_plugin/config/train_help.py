# SPDX-License-Identifier: Apache-2.0
"""Make the text of `zaya train --help` from the recipes and the schema."""

import re
from importlib import resources

from zaya_plugin.config.messages import schema
from zaya_plugin.ground.errors import as_typed

# The data of the CPU demo: also in the Makefile, README.md and docs/, which a test compares with it.
DEMO_PATH = "data/stdlib"  # recipes/data/stdlib.yaml
DEMO_DATA = f"zaya data prepare --input stdlib --output {DEMO_PATH} --train-bpe 2048 --valid-fraction 0.1"
GROUPS = ("experiment", "model", "stage", "data", "optim", "parallel", "cluster", "logger")
MOST_USED = (
    *("run_dir", "resume", "nproc", "dry_run", "seed", "data.path", "stage.train_iters", "stage.seq_length"),
    *("stage.micro_batch_size", "stage.global_batch_size", "optim.lr", "optim.lr_warmup_iters", "cluster.dtype"),
    *("checkpoint.save_interval", "parallel.recompute_granularity", "logger.wandb_mode", "profile.enabled"),
)
SELF_EXPLAINED = ("resume", "logger.wandb_mode")  # their help names the choices

TEXT = """\
zaya train: compose a recipe and train it

  zaya train experiment=<name> [group=<option> ...] [key=<value> ...]

An experiment selects an option of every group and sets keys; options and keys on the command line override it. An
unknown key, a missing value or a wrong value is an error before the run starts.

EXPERIMENTS
{experiments}

GROUPS AND THEIR OPTIONS
{groups}

KEYS USED MOST, with the schema's defaults (all keys: zaya train experiment=<name> --cfg job)
{keys}
  any further Megatron argument: megatron.<name>=<value>

EXAMPLES
  {demo_data}
                                                               the data of the CPU demo
  zaya train experiment=cpu_demo                               the CPU demo
  zaya train experiment=cpu_demo --dry-run                     whether it can start, what would run (--verbose: all)
  zaya train experiment=zaya1_base explain_optim=true          every parameter's optimizer, learning rate and decay
  zaya train experiment=cpu_demo --cfg job                     the composed recipe
  zaya train experiment=cpu_demo optim.lr=8e-3 name=slower     other values, another run directory
  zaya train experiment=cpu_demo resume=auto                   continue from the last checkpoint, if there is one
  zaya train experiment=cpu_demo optim.lr=8e-3,1.6e-2 -m       one run after the other, in <run_dir>/0 and <run_dir>/1
  zaya train experiment=mine --config-dir my_recipes           your own recipes: my_recipes/experiment/mine.yaml
  torchrun --nnodes 2 ... -m zaya_plugin.cli train ...         several nodes; or: srun zaya train ...

Ctrl-C, SIGTERM or a batch system's SIGUSR1, SIGUSR2, SIGXCPU saves a checkpoint and stops; the same signal again stops
without saving. Exit codes: 0 done, 2 a mistake in the recipe, 75 ended early by a signal and saved, 130 or 143 stopped
by a signal without a save, otherwise the exit code of the rank that failed first. Hydra's own flags: --hydra-help.
"""


def options(group: str) -> list[str]:
    """Return the names of the options of a recipe group."""
    folder = resources.files("zaya_plugin.recipes") / group
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def comments(group: str, option: str) -> list[str]:
    """Return the first comment lines of a recipe, without Hydra's header. The first one is the command that runs it."""
    text = (resources.files("zaya_plugin.recipes") / group / f"{option}.yaml").read_text()
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        if not re.match(r"#\s*@", line):
            lines.append(line.lstrip("# ").rstrip())
    return lines


def train_help() -> str:
    """Return the whole text."""
    fields = schema()

    def key_line(path: str) -> str:
        field = fields[path]
        choices = [as_typed(choice) for choice in field.metadata["choices"]]
        allowed = f" ({', '.join(choices)})" if choices and path not in SELF_EXPLAINED else ""
        return f"  {path:32}{as_typed(field.default):16}{field.metadata['help']}{allowed}"

    return TEXT.format(
        demo_data=DEMO_DATA,
        experiments="\n".join(f"  {name:20}{comments('experiment', name)[1]}" for name in options("experiment")),
        groups="\n".join(f"  {group:20}{', '.join(options(group))}" for group in GROUPS if group != "experiment"),
        keys="\n".join(key_line(path) for path in MOST_USED),
    )

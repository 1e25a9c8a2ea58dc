# SPDX-License-Identifier: Apache-2.0
"""The table of commands: for each one the function that returns its parser and what it does, under headings."""

import importlib
import shlex
from collections.abc import Sequence

from zaya_plugin.ground.errors import mistake, nearest_name

# Heading -> command -> function of zaya_plugin.commands that returns its parser, and what the command does. A command
# without a function has others below it.
HEADINGS: dict[str, dict[str, tuple[str, str]]] = {
    "Train": {
        "train": ("train:train", "train a recipe: compose it, check it, start or join the ranks"),
        "curriculum": ("curriculum:curriculum", "run the stages of a curriculum one after the other"),
        "export": ("", "write a recipe for SLURM or for another host"),
        "export slurm": ("export:slurm", "print a batch script, or submit it"),
        "export megatron": ("export:megatron", "write the words for Megatron-LM's own pretrain_gpt.py"),
        "export primus": ("export:primus", "write an experiment for Primus"),
    },
    "Data and checkpoints": {
        "data": ("", "make, pack, inspect and warm corpora"),
        "data prepare": ("data:prepare", "make a dataset from text, JSON lines or Python's standard library"),
        "data pack": ("data:pack", "put whole documents into bins of one length, with long chains of thought trimmed"),
        "data check": ("data:check", "compare every byte of datasets with their checksums"),
        "data inspect": ("data:inspect", "print decoded samples with source, length and loss mask"),
        "data bundle": ("data:bundle", "join many small datasets, and report the random reads of a planned run"),
        "data warm": ("data:warm", "read the data that a run needs next into the page cache"),
        "data mixture": (
            "data:mixture",
            "print tokens and epochs of each source that a blend draws, for one stage or several",
        ),
        "checkpoint": ("", "look at a run's checkpoints, and convert them from and to published weights"),
        "checkpoint list": ("checkpoint:list_", "print each checkpoint, and whether it is complete"),
        "checkpoint show": (
            "checkpoint:show",
            "print the contents of a checkpoint's manifest: the run that wrote it, its data and files",
        ),
        "checkpoint verify": (
            "checkpoint:verify",
            "read all files of a checkpoint that has a manifest and compare them; they are then in the page cache",
        ),
        "checkpoint prune": ("checkpoint:prune", "remove old checkpoints that are complete and have a manifest"),
        "checkpoint adopt": ("checkpoint:adopt", "trust a checkpoint as it is, and write its manifest"),
        "checkpoint reshape": ("checkpoint:reshape", "write a checkpoint in another number of files"),
        "checkpoint import": ("weights:import_", "write a checkpoint of step 0 from published weights"),
        "checkpoint export": ("weights:export", "write weights for transformers, vLLM or SGLang"),
        "checkpoint roundtrip": ("weights:roundtrip", "import, export and compare in a temporary folder"),
    },
    "Models": {
        "generate": ("generate:generate", "continue prompts with a checkpoint or a published model"),
        "eval": ("evaluation:evaluate", "run evaluation tasks, compute perplexity by domain"),
    },
    "Runs": {
        "runs": ("", "look at runs: as pictures, live in the terminal, as a table"),
        "runs plot": ("runs:plot", "draw a run or several as one HTML page or a PNG"),
        "runs watch": ("runs_watch:watch", "show a run in the terminal while it trains"),
        "runs list": ("runs:list_", "print the runs below a folder: state, step, loss, speed, what differs"),
    },
    "Machines": {
        "doctor": ("machines:doctor", "report installed packages, devices, known problems and host changes"),
        "verify": (
            "machines:verify",
            "examine this machine, or several nodes: software, kernels, rates, a short training",
        ),
        "plan": ("", "check, predict and choose a recipe's sizes and settings before an hour of a device is spent"),
        "plan check": ("plan:check", "check sizes, memory, products, links and checkpoints of a recipe by rules"),
        "plan run": (
            "plan:run",
            "predict time, memory and communication of a step, from a fit or from a measured step",
        ),
        "plan fit": (
            "plan:fit",
            "search micro-batch, recomputation, layout, buckets and optimizer instances for a cluster",
        ),
        "plan sizes": ("plan:sizes", "name faster sizes near the recipe's, and compare widths of experts"),
        "bench": ("", "measure a step, a device, collectives, storage and a loader"),
        "bench step": ("bench:step", "measure a few steps of a recipe, and the share of each part of the step"),
        "bench collectives": (
            "bench:collectives",
            "measure and check collectives by size and group, and recommend gradient buckets",
        ),
        "bench storage": ("bench:storage", "measure random reads, writes and fsync of a path"),
        "bench data": ("bench:data", "measure the batches a second of a recipe's loader"),
        "bench hbm": ("bench:hbm", "measure the bandwidth of a device's memory by size"),
        "bench gemm": ("bench:gemm", "measure a recipe's matrix products and what better sizes give"),
        "bench mlp": ("bench:mlp", "measure a chain of MLPs against the published rate of MI300X"),
        "bench tune": ("bench:tune", "choose the library's kernels for a recipe's matrix products"),
    },
    "Long runs": {
        "aegis": ("", "supervise a long run: watch, restart, exchange nodes, report"),
        "aegis run": (
            "aegis_run:run",
            "start the ranks of a command on this node, watch them, and restart, exchange or stop",
        ),
        "aegis status": ("aegis:status", "show a supervised run in the terminal, once or live"),
        "aegis report": ("aegis:report", "effective training time, failures and their cost, as tables or one page"),
        "aegis explain": (
            "aegis:explain",
            "read a folder of logs, name the cause of a failure, and say what would have been done",
        ),
    },
}
COMMANDS = {command: row for rows in HEADINGS.values() for command, row in rows.items()}
# Command, or command and option, of an earlier version -> what to type now.
RENAMED = {
    "zaya convert": "zaya checkpoint",
    "zaya slurm": "zaya export slurm",
    "zaya checkpoint warm": "zaya checkpoint verify",
    "zaya bench expect": "zaya plan run --from",
    "zaya aegis preflight": "zaya verify --nodes",
    "zaya aegis lab": "make lab, in a checkout of the repository",
    "zaya aegis --explain": "zaya aegis explain",
    "zaya eval --out": "--output",
    "zaya verify --out": "--output",
    "zaya aegis run --dir": "--output",
    "zaya aegis report --html": "--output",
    "zaya checkpoint roundtrip --folder": "TMPDIR=DIR in front of the command",
    "zaya train --shell-completion": "zaya --completion bash",
    "zaya train --version": "zaya --version",
    "zaya train --resolve": "--cfg job, which always resolves",
}
SAME_WORDS = (
    "zaya convert",
    "zaya slurm",
    "zaya checkpoint warm",
    "zaya bench expect",
    "zaya aegis --explain",
)  # behind the new name
HELP = ("-h", "--help")


def parser_of(command: str):
    """Return the parser of a command that has no others below it."""
    module, _, function = COMMANDS[command][0].partition(":")
    return getattr(importlib.import_module(f"zaya_plugin.commands.{module}"), function)()


def below(command: str) -> list[str]:
    """Return the names of the commands below one."""
    return [name.partition(" ")[2] for name in COMMANDS if name.startswith(f"{command} ")]


def overview() -> str:
    """Return the text of `zaya --help`."""
    lines = ["zaya: ZAYA1 pretraining as a Megatron-core plugin", ""]
    lines.append("  zaya train experiment=cpu_demo    train a small ZAYA on this machine's CPU")
    for heading, rows in HEADINGS.items():
        lines += ["", heading]
        for command, (_, purpose) in rows.items():
            if " " not in command:
                lines.append(f"  zaya {command:10}  {purpose}")
                if names := below(command):
                    lines.append(f"{'':19}{', '.join(names)}")
    lines += ["", "zaya COMMAND --help explains a command's options, with examples. zaya --version prints the version;"]
    return "\n".join([*lines, 'eval "$(zaya --completion bash)" completes commands and options (zsh, tcsh too).'])


def help_of(command: str) -> str:
    """Return the help of a command that has others below it."""
    lines = [f"zaya {command}: {COMMANDS[command][1]}", ""]
    lines += [f"  zaya {command} {name:10}  {COMMANDS[f'{command} {name}'][1]}" for name in below(command)]
    return "\n".join([*lines, "", f"zaya {command} COMMAND --help explains a command's options, with examples."])


def split(words: Sequence[str]) -> tuple[str, list[str]]:
    """Return the command that `words` begin with, one or two of them, and the words after it.

    Raises:
        ValueError: there is no such command, or it has another name now.
    """
    first, *rest = words
    for command in (f"zaya {first}", f"zaya {first} {rest[0]}" if rest else ""):
        if command in RENAMED:
            more = words[len(command.split()) - 1 :] if command in SAME_WORDS else []
            raise mistake(
                command, problem="has another name now", fix=" ".join([RENAMED[command], shlex.join(more)]).strip()
            )
    if first not in COMMANDS:
        raise unknown("zaya", first)
    names = below(first)
    if not names or not rest or rest[0] in HELP:
        return first, rest
    if rest[0] not in names:
        raise unknown(f"zaya {first}", rest[0])
    return f"{first} {rest[0]}", rest[1:]


def unknown(command: str, name: str) -> ValueError:
    """Return the error of a command that does not exist, with the one that was probably meant, of this level or
    another.
    """
    from zaya_plugin.config.train_help import options

    known = below(command.removeprefix("zaya ")) if command != "zaya" else [row for row in COMMANDS if " " not in row]
    rows = sorted(COMMANDS, key=lambda row: " " not in row)  # of equal names that without another above it
    elsewhere = {row.rpartition(" ")[2]: f"zaya {row}" for row in rows}
    fix = f"{command} --help"
    if f"{name}s" in known:
        fix = f"{command} {name}s"
    elif name in elsewhere:
        fix = elsewhere[name]
    elif close := nearest_name(name, known):
        fix = f"{command} {close}"
    elif command == "zaya export":
        fix = "zaya checkpoint export CKPT --output DIR, for transformers, vLLM or SGLang"
    elif "=" in name:
        fix = f"zaya train {name}"
    elif name in options("experiment"):
        fix = f"zaya train experiment={name}"
    elif (close := nearest_name(name, elsewhere)) and close[0] == name[0]:
        fix = elsewhere[close]
    return mistake(f"{command} {name}", problem="no such command", allowed=f"{', '.join(known)}, --help", fix=fix)

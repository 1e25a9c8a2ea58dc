# SPDX-License-Identifier: Apache-2.0
"""The settings of a supervised run, which the keeper, the agent and the decider read from a file in memory: other users
of the node can read command lines, and a hook or a command may hold a secret.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from zaya_plugin.aegis.journal import NAME


@dataclass(frozen=True)
class Settings:
    """One supervised run, on one node.

    command: the words that are started. start_per: "rank" or "node", once for each of which they are started.
    node: this node's name. nodes, spares: how many train, and how many more wait.
    sizes: numbers of nodes with which the command can train, the largest first.
    ranks_per_node: ranks on each node.
    group: how many nodes hold one copy of the model; they are neighbours in the order of nodes.
    folder: of the journal and the logs, on a file system that all nodes share.
    host, port: the address of the decider.
    secret_file: with the key of all messages of the run.
    grace: seconds from SIGTERM to SIGKILL when healthy ranks are to save. restarts: allowed without a new step.
    checkpoints: folder of the run's checkpoints, of `zaya train` only.
    kernel_log: the kernel's messages, or a file in their place. links: network interfaces to watch, () for all.
    exclude: nodes that the run does not use.
    rules, hook: files with rows of the user's own, and the words of the user's command for alerts.
    skip_steps: data.skip_steps of the recipe.
    requeue: whether the job is given back to SLURM when too few nodes are left.
    """

    command: tuple[str, ...]
    start_per: str
    node: str
    nodes: int
    spares: int
    sizes: tuple[int, ...]
    ranks_per_node: int
    folder: Path
    host: str
    port: int
    secret_file: Path | None = None
    group: int = 1
    grace: float = 10.0
    restarts: int = 10
    checkpoints: Path | None = None
    kernel_log: Path = Path("/dev/kmsg")
    links: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    hook: tuple[str, ...] = ()
    requeue: bool = False
    skip_steps: tuple[str, ...] = ()

    @property
    def journal(self) -> Path:
        return self.folder / NAME

    def to_file(self) -> int:
        """Return an open file in memory with the settings, for the stdin of a program."""
        file = os.memfd_create("settings")
        os.write(file, json.dumps(asdict(self), default=str).encode())
        os.lseek(file, 0, os.SEEK_SET)
        return file

    @classmethod
    def from_json(cls, text: str | bytes) -> Settings:
        """Return the settings that `to_file` wrote."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(text).items()}
        for name in ("folder", "secret_file", "checkpoints", "kernel_log"):
            values[name] = None if values[name] is None else Path(values[name])
        return cls(**values)


def words_of(command: Sequence[str], name: str) -> list[str] | None:
    """Return the words after `zaya <name>`, or after `python -m zaya_plugin.cli <name>`; None: another command."""
    command = list(command)
    program = 0 if Path(command[0]).name == "zaya" else [*command, "zaya_plugin.cli"].index("zaya_plugin.cli")
    return command[program + 2 :] if command[program + 1 : program + 2] == [name] else None


def is_train(command: Sequence[str]) -> bool:
    """Whether the command trains one recipe: `zaya train`, or `zaya curriculum --only` for a stage."""
    return words_of(command, "train") is not None or only(command) is not None


def only(command: Sequence[str]) -> str | None:
    """Return the stage that `zaya curriculum --only` names; None: another command, or all stages."""
    if (words := words_of(command, "curriculum")) is None:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--only")
    try:
        return parser.parse_known_args(words)[0].only
    except argparse.ArgumentError:  # without a name: the command reports it itself
        return None


def resumed(settings: Settings, skips: Sequence[tuple[int, int]] = ()) -> list[str]:
    """Return the command of a later attempt: training continues from its newest checkpoint, and leaves out the data of
    `skips`, first and last steps, as well as those that the recipe leaves out.
    """
    if not is_train(settings.command):
        return list(settings.command)
    stage = only(settings.command)
    added = {} if stage else {"resume": "auto"}  # a curriculum continues by itself
    key = f"{stage}:data.skip_steps" if stage else "data.skip_steps"
    if skips:
        steps = [*settings.skip_steps, *(f"{first}-{last}" for first, last in skips)]
        added[key] = f"[{','.join(steps)}]"
    kept = [word for word in settings.command if word.lstrip("+").partition("=")[0] not in added]
    return kept + [f"{name}={value}" for name, value in added.items()]

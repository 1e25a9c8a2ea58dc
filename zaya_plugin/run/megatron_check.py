# SPDX-License-Identifier: Apache-2.0
"""Megatron's own validation of a recipe, and its optim.overrides, before any rank starts. No torch import.

Torch and Megatron are imported in a process of its own without a device (zaya_plugin.hosts.argument_check), which
answers for all recipes of one command. A recipe that was accepted is remembered in a folder of the user, so that a
restart does not pay for the process again; a refused one is checked at every start.
"""

import atexit
import contextlib
import hashlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zaya_plugin import compat
from zaya_plugin.config.compose import save_recipe, to_yaml
from zaya_plugin.config.schema import LoggerConfig, MachineConfig, Recipe
from zaya_plugin.data.sources import vocabulary_of
from zaya_plugin.ground import phases
from zaya_plugin.ground.errors import mistake
from zaya_plugin.handover.predecessor import saved_step
from zaya_plugin.run.rank_plan import HIDDEN_DEVICES, Plan

PROGRAM = "zaya_plugin.hosts.argument_check"
# off: the ranks alone validate, some seconds later; for many short runs.
SWITCH = "ZAYA_CHECK"
# Folder of what was accepted; unset: zaya_plugin in XDG_CACHE_HOME or ~/.cache.
FOLDER = "ZAYA_CACHE"
# Without an answer for so long the check has failed: imports take seconds, from a slow file system minutes.
ANSWER_SECONDS = 600.0
END_SECONDS = 10.0
KEPT_RECIPES = 1000  # accepted recipes; the oldest are removed
# With one of these installed, or another version of it, Megatron may answer otherwise.
PACKAGES = ("torch", "megatron-core", "numpy", "transformers", "transformer-engine", "transformer-engine-torch", "apex")
# Variables that Megatron and the libraries below it read.
VARIABLES = ("CUDA_", "HIP_", "ROC", "NCCL_", "RCCL_", "NVTE_", "TORCH", "PYTORCH", "MEGATRON", "HIP_OPS", "PYTHONPATH")
REQUIRED = ("torch", "megatron.training")

_server: "_Server | None" = None


def skipped() -> str | None:
    """Return why the check is not made on this machine, or None."""
    if os.environ.get(SWITCH) == "off":
        return f"{SWITCH}=off"
    if not all(map(compat.has_module, REQUIRED)) or not compat.zaya_train_fits():
        return "no torch or Megatron 0.19 on this machine"
    return None


def check(recipe: Recipe, plan: Plan) -> None:
    """Raise ValueError for what Megatron refuses, unless `skipped()`. recipe: without `auto`."""
    if skipped() is not None:
        return
    if recipe.handover.from_hf is not None and saved_step(Path(recipe.run_dir)) is not None:
        recipe = replace(recipe, handover=replace(recipe.handover, from_hf=None))  # has begun: is read no more
    file = folder() / f"{_digest(recipe, plan)}.accepted"
    # Files that are not of the data set may have changed since.
    named = recipe.data.tokenizer is not None and not (Path(recipe.data.tokenizer) / "tokenizer.json").is_file()
    if file.is_file() and not named and recipe.handover.from_hf is None:
        with contextlib.suppress(OSError):
            os.utime(file)
        return
    global _server
    phases.begin("Megatron checks the recipe, in a process of its own")
    if _server is None:
        _server = _Server(plan)
        atexit.register(close)
    refused = _server.ask(recipe, plan)
    phases.end()
    if refused is not None:
        raise ValueError(refused)
    _keep(file)


def close() -> None:
    """End the process, which holds some hundred MB; the next check starts another."""
    global _server
    if _server is not None:
        _server.end()
    _server = None


def folder() -> Path:
    """Return the folder of what was accepted."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zaya_plugin"


def _keep(file: Path) -> None:
    with contextlib.suppress(OSError):  # without a folder that can be written every start checks
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        known = sorted(file.parent.glob("*.accepted"), key=lambda path: path.stat().st_mtime)
        for old in known[:-KEPT_RECIPES]:
            old.unlink(missing_ok=True)


def _digest(recipe: Recipe, plan: Plan) -> str:
    """Return a digest of all that the answer depends on; name and places of a run, and what it logs, are left out."""
    same = replace(recipe, name="", run_dir="", resume="auto", dry_run=False, data=replace(recipe.data, path=""))
    same = replace(same, logger=LoggerConfig(), machine=MachineConfig())
    environment = {**os.environ, **plan.environment}
    parts = [to_yaml(same), str(plan.world_size), str(vocabulary_of(recipe)), sys.version, sys.executable]
    parts += [f"{name}={environment[name]}" for name in sorted(environment) if name.startswith(VARIABLES)]
    parts += [f"{name} {compat.distribution_version(name) or ''}" for name in PACKAGES]
    parts += _sources()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _sources() -> Iterator[str]:
    """Yield size and time of the files that answer: this package's, and Megatron's arguments and configuration."""
    for package, pattern in (
        ("zaya_plugin", "**/*.py"),
        ("zaya_plugin.patches", "*.py"),
        ("hip_ops", "*.py"),
        ("megatron.core", "*.py"),
        ("megatron.core", "transformer/*.py"),
        ("megatron.training", "**/*.py"),
    ):
        for home in importlib.util.find_spec(package).submodule_search_locations or ():
            for path in sorted(Path(home).glob(pattern)):
                stat = path.stat()
                yield f"{path} {stat.st_size} {stat.st_mtime_ns}"


class _Server:
    """The process, and the file with what it writes to stderr."""

    def __init__(self, plan: Plan):
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, **plan.environment, **dict.fromkeys(HIDDEN_DEVICES, "")},
            start_new_session=True,  # a group of processes, for `end`
        )

    def ask(self, recipe: Recipe, plan: Plan) -> str | None:
        """Return the message with which Megatron refuses the recipe, or None."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "recipe.yaml"
            save_recipe(replace(recipe, run_dir=folder), path)
            asked = {"recipe": str(path), "ranks": plan.world_size, "environment": plan.environment}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(asked), file=self.process.stdin, flush=True)
            # An answer is one line, which is written at once: nothing of an earlier one is left in the buffer.
            if not select.select([self.process.stdout], [], [], ANSWER_SECONDS)[0]:
                close()
                raise mistake(
                    "recipe",
                    problem=f"Megatron's parsing of its arguments (python -m {PROGRAM}) gave no answer in "
                    f"{ANSWER_SECONDS:.0f} s and was ended",
                    allowed="an answer within that time",
                    fix=f"look whether the storage of {sys.prefix} hangs, or of the files that the recipe names; "
                    f"{SWITCH}=off leaves the check to the ranks",
                )
            answer = self.process.stdout.readline()
        if answer:
            return json.loads(answer)
        self.errors.seek(0)
        return f"recipe: Megatron's parsing of its arguments failed:\n{self.errors.read().rstrip()[-2000:]}"

    def end(self) -> None:
        """End the process and those that it has forked; it has nothing to save."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a call to storage that hangs ends when that answers
            self.process.wait(END_SECONDS)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()

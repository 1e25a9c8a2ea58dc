# SPDX-License-Identifier: Apache-2.0
"""Starts the comparison of two stages' losses by position in a process of its own, with the environment of the recipe. No torch import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.run.rank_failure import last_words
from zaya_plugin.run.rank_plan import rank_environment

RESULT = "loss_by_position.json"  # as zaya_plugin.hosts.position_loss writes it


def compare(short_run: Path, long_run: Path) -> int:
    """Prints the comparison, writes it to <long_run>/loss_by_position.json, and returns the exit code of the process that does it:
    1 where the longer stage's model is not the better one past the shorter context."""
    recipe = load_recipe(Path(long_run) / "recipe.yaml")
    (Path(long_run) / RESULT).unlink(missing_ok=True)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **rank_environment(recipe, 1, os.environ), **alone}
    command = [sys.executable, "-m", "zaya_plugin.hosts.position_loss", str(short_run), str(long_run)]
    log = Path(long_run) / "logs" / "position_loss.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "w") as stderr:
        code = subprocess.run(command, env=environment, stderr=stderr).returncode
    if not (Path(long_run) / RESULT).is_file():
        print(
            f"zaya: loss by position failed:\n{last_words(log.read_text())}\nzaya: everything that it wrote: {log}",
            file=sys.stderr,
        )
        return code or 1
    return code

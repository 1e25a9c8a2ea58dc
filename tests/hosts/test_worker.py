# SPDX-License-Identifier: Apache-2.0
"""A rank that failed ends, even where something it should wait for never comes."""

import subprocess
import sys

from tests.running import MICRO
from zaya_plugin.config.compose import compose, save_recipe

RANK = """
import atexit, sys, time
from zaya_plugin.hosts import worker

worker.EXIT_SECONDS = 1
def stuck(*of_rank):
    atexit.register(time.sleep, 600)
    raise RuntimeError('the capture failed')
sys.exit(worker.main(sys.argv[1:], stuck))
"""


def test_a_failed_rank_that_cannot_leave_is_ended(tmp_path):
    save_recipe(compose([*MICRO, "data.path=x", f"run_dir={tmp_path / 'run'}"]), tmp_path / "recipe.yaml")
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "1",
        "PATH": "/bin",
    }
    command = [sys.executable, "-c", RANK, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1 and "RuntimeError: the capture failed" in done.stderr

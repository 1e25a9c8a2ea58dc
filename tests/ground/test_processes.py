# SPDX-License-Identifier: Apache-2.0
"""Processes are known by a variable of their environment, also in sessions of their own and without their parent."""

import os
import subprocess
import sys

from zaya_plugin.ground import processes

# Starts a child in a session of its own, waits until it runs (during execve it shows no environment), prints its number
# and ends.
PARENT = """
import subprocess, sys
words = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]
child = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid)
"""


def test_a_process_without_its_parent_is_known_and_killed(tmp_path):
    variable = f"ZAYA_TEST_MARK={tmp_path}"
    environment = {**os.environ, "ZAYA_TEST_MARK": str(tmp_path)}
    parent = subprocess.run([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout)
    assert processes.started_with(variable) == [child] and processes.state(child) not in ("", "Z")
    assert processes.started_with(variable[:-1]) == [], "the whole value counts"
    calls = []
    assert processes.kill_all(variable, 60, lambda: calls.append(1)) == []
    assert processes.state(child) in ("", "Z") and len(calls) >= processes.EMPTY_SCANS

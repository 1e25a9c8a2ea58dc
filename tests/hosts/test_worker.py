# SPDX-License-Identifier: Apache-2.0
"""Errors of a rank are one line, and a rank that failed ends, even where something it should wait for never comes."""

import os
import subprocess
import sys

from tests.running import MICRO
from zaya_plugin.config.compose import compose, save_recipe

FAULTS = """
import atexit, os, pickle, sys, time
import torch
from zaya_plugin.ground.errors import RunEndedError
from zaya_plugin.hosts import worker

def full(*of_rank):
    with open("/dev/full", "w") as file:
        file.write("x")
def missing(*of_rank):
    open("/absent/tokens.bin")
def memory(*of_rank):
    torch.empty(2**60, dtype=torch.uint8)
def device(*of_rank):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
def damaged(*of_rank):
    pickle.loads(b"cposix")
def ended(*of_rank):
    raise RunEndedError("step 3: the loss is not finite")
def early(*of_rank):
    return 75
def bus(*of_rank):
    raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that ...")
def stuck(*of_rank):
    atexit.register(time.sleep, 600)
    raise RuntimeError('the capture failed')
for fault in (full, missing, memory, device, damaged, ended, early, bus):
    print("==", fault.__name__, file=sys.stderr)
    print(worker.main(sys.argv[1:], fault), file=sys.stderr)
with open(sys.argv[1]) as file:
    text = file.read()
with open(sys.argv[1], "w") as file:
    file.write(text.replace("context_parallel_size: 1", "context_parallel_size: 3"))
print("== edited", file=sys.stderr)
print(worker.main(sys.argv[1:], early), file=sys.stderr)
import zaya_plugin.run.launch
print("== launched", file=sys.stderr)
print(worker.main(sys.argv[1:], early), file=sys.stderr)
print("== stuck", file=sys.stderr)
worker.EXIT_SECONDS = 1
sys.exit(worker.main(sys.argv[1:], stuck))
"""


def test_errors_of_the_machine_are_one_line_with_path_space_and_log(tmp_path):
    """The last of them cannot leave, and is ended."""
    run_dir = tmp_path / "run"
    save_recipe(compose([*MICRO, "data.path=x", f"run_dir={run_dir}"]), tmp_path / "recipe.yaml")
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-W", "ignore", "-c", FAULTS, str(tmp_path / "recipe.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    errors, _, stuck = done.stderr.partition("== stuck\n")
    assert done.returncode == 1 and "RuntimeError: the capture failed" in stuck
    assert "Traceback" not in errors, errors
    told = {}
    for part in ("\n" + errors).split("\n== ")[1:]:
        name, *lines = part.splitlines()
        told[name] = lines[-2] if len(lines) > 1 else "", int(lines[-1])
    log = f" Log: {run_dir}/logs/rank0.log"
    codes = {**dict.fromkeys(told, 1), "early": 75, "edited": 2, "launched": 75}
    assert {name: code for name, (_, code) in told.items()} == codes
    full = "zaya: storage: No space left on device, at <string>:8 (full); the error names no file ("
    assert told["full"][0].startswith(f"{full}{run_dir}: ") and " KiB free" in told["full"][0]
    assert told["missing"][0].startswith("zaya: /absent/tokens.bin: No such file or directory (")
    assert told["memory"][0].startswith("zaya: memory: a rank has run out of it: ")
    assert "Tried to allocate 2.00 GiB" in told["device"][0]
    assert told["damaged"][0].startswith(f"zaya: {run_dir}: a file that was read is damaged: ")
    assert all(told[name][0].endswith(log) for name in ("full", "missing", "memory", "device", "damaged"))
    assert told["bus"][0].startswith("zaya: data.path=x: "), "the file that a data loader met is looked for"
    # A recipe.yaml that was edited by hand is validated in the rank, unless its process is the launcher, which has done it.
    problem = "1 ranks: cannot be divided by tensor x pipeline x context parallel size = 3; "
    assert told["edited"][0].startswith(problem), "the last of several lines"
    assert told["ended"][0] == "zaya: step 3: the loss is not finite"
    assert (run_dir / "logs" / "rank0.log").read_text().count("Traceback") >= 6, "the log has the whole errors"

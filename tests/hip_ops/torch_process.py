# SPDX-License-Identifier: Apache-2.0
"""Runs Python text in processes of its own that have torch: forks of one process, which has imported nothing else."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hip_ops.cpu_kernels import ROOT

SERVER = """
import json, os, sys, torch, traceback

def run(program, arguments, environment, files):
    for number, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    code = 1
    try:
        exec(program, {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)

for line in sys.stdin:
    pid = os.fork() or run(*json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@functools.cache
def _server() -> subprocess.Popen:
    """The process that forks; it ends when this one's end closes its stdin."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_with_torch(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Run `program` with these words in sys.argv and these variables besides this process's."""
    server, env = _server(), {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        server.stdin.write(json.dumps([program, [*map(str, arguments)], env, files]) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(program, code, *(Path(file).read_text() for file in files))

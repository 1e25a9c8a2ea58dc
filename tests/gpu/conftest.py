# SPDX-License-Identifier: Apache-2.0
"""Training runs on an accelerator through the user's commands, and their losses."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.runtime.choice import missing
from tests.running import descendants

ROOT = Path(__file__).resolve().parents[2]


# Minutes each on an H200: begun first, they do not hold up the end.
LONG = tuple(f"tests/gpu/test_{name}.py" for name in ("hip_ops_training", "demo", "graphs", "generate", "verify"))


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))
    for item in items:
        if item.nodeid.startswith("tests/gpu/"):
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"))


@pytest.fixture(params=["triton", "hip"])
def chosen(request):
    """Selects a version of hip_ops' operators by name; skips the test where it is not available."""
    reason = missing(request.param, torch.device("cuda"), named=True)
    if reason:
        pytest.skip(reason)
    with use_kernels(request.param):
        yield request.param


@pytest.fixture(scope="session")
def zaya():
    """Runs the console script and fails with its output, which it prints where pytest's limit ends it; stdout is
    returned.
    """

    def run(*arguments):
        # The ranks must find this checkout wherever they are started.
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "zaya_plugin.cli", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            # Without a timeout it would lose what it has read when pytest's limit ends it.
            output, _ = process.communicate(timeout=1e6)
        except BaseException:  # pytest's limit, or Ctrl-C
            for pid in (*descendants(process.pid), process.pid):  # ranks that hang would keep the devices
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            print(f"not done: zaya {' '.join(map(str, arguments))}\n{process.communicate()[0][-4000:]}")
            raise
        assert process.returncode == 0, output[-4000:]
        return output

    return run


@pytest.fixture(scope="session")
def corpus(zaya, tmp_path_factory):
    """The demo's corpus."""
    path = tmp_path_factory.mktemp("data") / "stdlib"
    zaya("data", "prepare", "--input", "stdlib", "--output", path, "--quiet")
    return path


@pytest.fixture(scope="session")
def demo(zaya, corpus):
    """`zaya train experiment=cpu_demo` on one rank with `overrides`; returns {step: loss} of its metrics.jsonl."""

    def run(run_dir, *overrides):
        zaya(
            "train",
            "experiment=cpu_demo",
            "optim=adamw",  # its losses stay within 1e-5 of other devices' for longer
            "optim.lr=2e-3",
            "logger=none",
            f"data.path={corpus}",
            "nproc=1",
            "stage.eval_iters=0",
            "checkpoint.keep_last=0",
            f"run_dir={run_dir}",
            *overrides,
        )
        rows = map(json.loads, (Path(run_dir) / "metrics.jsonl").read_text().splitlines())
        return {row["step"]: row["loss"] for row in rows}

    return run

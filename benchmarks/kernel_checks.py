# SPDX-License-Identifier: Apache-2.0
"""Measure how long a start checks the kernels, with an empty and with a full cache of Triton, and what
`python -m hip_ops info --check` takes. Each runs in a process of its own.

    python3 benchmarks/kernel_checks.py [--commit HASH] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_record import HERE, RESULTS, described, device_name, file_part, write

# What `zaya train` checks before the first step, except core attention: seconds of each operator.
START = """
import json, time, torch
from hip_ops.runtime.operator import all_operators
device, seconds = torch.device("cuda", 0), {}
torch.ones(1, device=device).sum().item()
for operator in all_operators():
    began = time.perf_counter()
    operator.running(device)
    torch.cuda.synchronize()
    seconds[operator.name] = round(time.perf_counter() - began, 2)
print(json.dumps(seconds))
"""


def run(caches: str, *arguments: str) -> tuple[str, float]:
    """Return a Python process's output and its seconds."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH")))),
        "TRITON_CACHE_DIR": f"{caches}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
    }
    began = time.perf_counter()
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.stdout, round(time.perf_counter() - began, 1)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--commit", help="of the tree that runs, where it is no checkout")
    options.add_argument("--out", type=Path, default=RESULTS, help="folder of the results file")
    given = options.parse_args()
    record = described(given.commit)
    with tempfile.TemporaryDirectory() as caches:
        for name in ("empty cache", "full cache"):
            operators = json.loads(run(caches, "-c", START)[0])
            record[name] = {"seconds": round(sum(operators.values()), 1), "by operator": operators}
            print(f"{name}: {record[name]['seconds']} s", flush=True)
        text, seconds = run(caches, "-m", "hip_ops", "info", "--check")
    by_operator = {name: float(took) for name, took in re.findall(r"^cuda:0: (\w+) \(.*\) ([\d.]+) s$", text, re.M)}
    record["info --check"] = {"seconds": seconds, "by operator": by_operator}
    write(record, f"kernel_checks-{file_part(device_name())}", given.out)


if __name__ == "__main__":
    main()

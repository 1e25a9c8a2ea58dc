# SPDX-License-Identifier: Apache-2.0
"""Describe how the figures of a results file were made, and write the file."""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
RESULTS = HERE / "results"


def commit_of(given: str | None) -> str:
    """Return `given`, otherwise the checkout's commit, or "unknown" outside a checkout."""
    if given:
        return given
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return found.stdout.strip() or "unknown"


def device_name() -> str:
    """Return the name of the accelerator, otherwise the processor's architecture."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}"


def script() -> str:
    """Return the path of the running script in the repository."""
    name = Path(sys.argv[0]).name
    return str(next(HERE.rglob(name), HERE / name).relative_to(HERE.parent))


def described(commit: str | None, device: str | None = None) -> dict:
    """Return device, date, commit, command and versions. commit: the value of the option --commit."""
    return {
        "device": device or device_name(),
        "date": datetime.date.today().isoformat(),
        "commit": commit_of(commit),
        "command": shlex.join(["python3", script(), *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda or torch.version.hip,
        },
    }


def file_part(device: str) -> str:
    """Return a device's name as part of a file's name."""
    return device.replace(" ", "_").lower()


def write(record: dict, name: str, folder: Path = RESULTS) -> None:
    """Print `record` as one line, and write it to <folder>/<name>.json."""
    print(json.dumps(record))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")

# SPDX-License-Identifier: Apache-2.0
"""`zaya verify --bundle RUN_DIR`: one archive with what a question about a run needs. Secrets are removed by patterns,
which cannot know all of them.
"""

import errno
import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.secrets import cleaned, of_data
from zaya_plugin.machines.checks import DOCTOR, DOCTOR_ALL, checks_of
from zaya_plugin.machines.examination import VARIABLES, examine

# Files of a run directory; checkpoints, traces, TensorBoard's and W&B's files are left out.
PATTERNS = ("recipe.yaml", "*.args", "primus.yaml", "metrics.jsonl", "step.json", "logs/**/*", "bench/step.json")
MAX_FILE_BYTES, MAX_BYTES = 2 * 2**20, 64 * 2**20  # of a longer file the end, and of many logs the newest
# Further than VARIABLES; SLURM's other variables name users and their accounts.
LAUNCHER_VARIABLES = re.compile(
    r"(MASTER_ADDR|MASTER_PORT|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|GLOO_\w+|MKL_NUM_THREADS|PYTHONPATH|VIRTUAL_ENV"
    r"|SLURM_(JOB_ID|JOB_NUM_NODES|STEP_ID|NNODES|NODEID|NTASKS|NTASKS_PER_NODE|PROCID|LOCALID|CPUS_PER_TASK"
    r"|GPUS_ON_NODE|RESTART_COUNT))$"
)


def pack(run_dir: Path, record: Path) -> Path:
    """Write support-<name>.tar.gz into the folder of `record` (a verify.json, which need not exist); return its path.

    Raises ValueError where `run_dir` is not a run's.
    """
    if not (run_dir / "recipe.yaml").is_file():
        raise mistake(
            "--bundle",
            run_dir,
            problem="not a run directory: it has no recipe.yaml",
            allowed="the run_dir of a run",
            fix="--bundle runs/<name>",
        )
    target = record.resolve().parent / f"support-{run_dir.resolve().name}.tar.gz"
    left, notes = MAX_BYTES, []
    with tarfile.open(target, "w:gz") as archive:
        for name, data in contents(run_dir, record):
            if isinstance(data, OSError):
                notes.append(f"not readable: {name} ({data.strerror})")
                continue
            content = data.encode()[-MAX_FILE_BYTES:]
            if len(content) > left:
                notes.append(f"left out: {name}")
                continue
            left -= len(content)
            notes.append(f"{len(content):>9} {name}" + (" (its end)" if len(content) == MAX_FILE_BYTES else ""))
            add(archive, name, content)
        add(archive, "contents.txt", "\n".join([*notes, ""]).encode())
    return target


def contents(run_dir: Path, record: Path) -> Iterator[tuple[str, str | OSError]]:
    """Yield names and cleaned texts, the most useful first; in place of a text the error of a file that cannot be read,
    since the run may still write and the disk may be the question.
    """
    if record.is_file():
        yield "verify.json", read(record)
    report = examine(checks_of(DOCTOR, DOCTOR_ALL), "zaya doctor --json")
    yield "doctor.json", json.dumps(of_data(report), indent=1, default=str)
    kept = {
        name: value for name, value in os.environ.items() if VARIABLES.match(name) or LAUNCHER_VARIABLES.match(name)
    }
    yield "environment.json", json.dumps(of_data(kept), indent=1)
    seen = set()
    for pattern in PATTERNS:
        for path in sorted(run_dir.glob(pattern), key=lambda path: -path.lstat().st_mtime):
            if path not in seen and not path.is_dir():
                seen.add(path)
                yield f"run/{path.relative_to(run_dir)}", read(path, run_dir)


def read(path: Path, run_dir: Path | None = None) -> str | OSError:
    """Return the end of a file, cleaned, or why it cannot be read. One more block is read, so that no secret is cut in
    two at the beginning. run_dir: the folder that a link may not leave.
    """
    try:
        if run_dir is not None and not path.resolve().is_relative_to(run_dir.resolve()):
            return OSError(errno.EXDEV, "a link out of the run's folder")
        if not path.is_file():
            return OSError(errno.EINVAL, "not a regular file")
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 2 * MAX_FILE_BYTES))
            return cleaned(file.read().decode(errors="replace"))
    except OSError as error:
        return error


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime = len(content), int(time.time())
    archive.addfile(entry, io.BytesIO(content))

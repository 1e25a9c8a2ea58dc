# SPDX-License-Identifier: Apache-2.0
"""One mistake in a shipped kernel source, made by substitution."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hip_ops.build import CSRC
from tests.hip_ops.cpu_kernels import CpuKernels, build_cpu_library


@dataclass(frozen=True)
class Bug:
    """In `file`, `right` becomes `wrong`; `case` fails then and passes else. schedule: whether only some orders of the threads show it."""

    file: str
    right: str
    wrong: str
    case: Any
    schedule: bool = False


def source(file: str, bug: Bug | None = None) -> str:
    """Text of a file of csrc/, with `bug` if it is the one."""
    text = (CSRC / file).read_text()
    if bug is None or bug.file != file:
        return text
    assert text.count(bug.right) == 1, f"{file} says {text.count(bug.right)} times: {bug.right}"
    return text.replace(bug.right, bug.wrong)


def write_source(folder: Path, bug: Bug, name: str) -> Path:
    """csrc/<name>.hip in `folder`, beside copies of the headers it includes; one of them has the bug."""
    for file in ("row_vectors.h", "vocabulary.h", f"{name}.hip"):
        (folder / file).write_text(source(file, bug))
    return folder / f"{name}.hip"


def cpu_copy(folder: Path, bug: Bug, name: str):
    """The library of `write_source` alone, as hip_ops.library gives it."""
    path = write_source(folder, bug, name)
    return CpuKernels(build_cpu_library(path), [path]).library

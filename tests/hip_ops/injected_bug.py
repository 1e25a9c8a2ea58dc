# SPDX-License-Identifier: Apache-2.0
"""One mistake in a shipped kernel source, made by substitution."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.hip_ops.cpu_kernels import CpuKernels, build_cpu_library
from tests.hip_ops.kernel_files import kernel_source


@dataclass(frozen=True)
class Bug:
    """In `file`, `right` becomes `wrong`; then `case` fails, and it passes without the bug. schedule: whether only
    some orders of the threads show it.
    """

    file: str
    right: str
    wrong: str
    case: Any
    schedule: bool = False


def source(file: str, bug: Bug | None = None) -> str:
    """Return the text of a file of csrc/, with `bug` if it belongs to the file."""
    text = kernel_source(file).read_text()
    if bug is None or bug.file != file:
        return text
    assert text.count(bug.right) == 1, f"{file} says {text.count(bug.right)} times: {bug.right}"
    return text.replace(bug.right, bug.wrong)


def write_source(folder: Path, bug: Bug, name: str) -> Path:
    """csrc/<name>.hip in `folder`, next to copies of the headers it includes; one of them has the bug."""
    for file in ("row_vectors.h", "vocabulary.h", f"{name}.hip"):
        (folder / file).write_text(source(file, bug))
    return folder / f"{name}.hip"


def cpu_copy(folder: Path, bug: Bug, name: str):
    """The library of `write_source` alone, as hip_ops.runtime.launchers gives it."""
    path = write_source(folder, bug, name)
    return CpuKernels(build_cpu_library(path), [path]).library


def triton_copy(folder: Path, shipped: ModuleType, bugs: dict[str, tuple[str, str]], name: str | None) -> ModuleType:
    """A copy of a module of Triton kernels with the bug `name` of `bugs`, (right, wrong); None for none."""
    text = Path(shipped.__file__).read_text()
    if name is not None:
        right, wrong = bugs[name]
        assert text.count(right) == 1, f"the source says {text.count(right)} times: {right}"
        text = text.replace(right, wrong)
    path = folder / f"{Path(shipped.__file__).stem}_{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where dataclasses look their module up
    spec.loader.exec_module(module)
    return module

# SPDX-License-Identifier: Apache-2.0
"""The declarations of what operators keep for their backward passes, for plans that are made without torch."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def declared(operator: str) -> ModuleType:
    """`hip_ops/<operator>/saved.py`, loaded by its path: importing the operator would import torch."""
    path = Path(__file__).resolve().parents[1] / operator / "saved.py"
    spec = importlib.util.spec_from_file_location(f"hip_ops.{operator}.saved", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

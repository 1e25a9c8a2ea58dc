# SPDX-License-Identifier: Apache-2.0
"""Loads the operators' declarations of the bytes that they keep for their backward passes, without torch."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def declared(operator: str) -> ModuleType:
    """Loads `hip_ops/ops/<operator>/saved.py` by its path, because importing the operator would import torch."""
    path = Path(__file__).resolve().parents[1] / "ops" / operator / "saved.py"
    spec = importlib.util.spec_from_file_location(f"hip_ops.ops.{operator}.saved", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

# SPDX-License-Identifier: Apache-2.0
"""A checkout of Megatron-LM, for the tests that need one."""

import os
import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of its Python files next to the compiled module of the installed wheel: nothing is compiled, and the
    checkout stays as it is.
    """
    if not (given := os.environ.get("ZAYA_MEGATRON_LM")):
        pytest.skip("ZAYA_MEGATRON_LM names no checkout of Megatron-LM (0.19 or 0.20)")
    copy = tmp_path_factory.mktemp("megatron_lm")
    for script in ("pretrain_gpt.py", "gpt_builders.py", "model_provider.py"):
        shutil.copy(Path(given) / script, copy)
    shutil.copytree(Path(given) / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    import megatron.core.datasets.helpers_cpp as compiled

    shutil.copy(compiled.__file__, copy / "megatron" / "core" / "datasets")  # newer than its source there
    return copy

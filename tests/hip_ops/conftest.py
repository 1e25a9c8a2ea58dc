# SPDX-License-Identifier: Apache-2.0
"""What the tests of hip_ops share."""

import pytest
import torch
from torch.overrides import _pop_mode, _push_mode

from hip_ops import backend


@pytest.fixture(params=["torch", "hip"])
def chosen(request):
    """The name of a back end of hip_ops that runs on a CPU, in use."""
    with backend.use_backend(request.param):
        yield request.param


@pytest.fixture
def no_function_modes():
    """As on an accelerator: without the mode that zaya_plugin's patches for CPUs put up for the whole process, if another test did."""
    modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    yield
    for mode in reversed(modes):
        _push_mode(mode)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """A kernel cache of the test's own, empty."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("HIP_OPS_CACHE", str(folder))
    return folder


@pytest.fixture
def fresh_backend(monkeypatch):
    """No choice of a backend made yet and none asked for; what the test chooses is forgotten."""
    for name in ("HIP_OPS_BACKEND", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(backend, "_choices", {})
    monkeypatch.setattr(backend, "_asked_in_code", [])


@pytest.fixture
def no_compilers(tmp_path, monkeypatch):
    """A machine without any compiler: nothing on PATH, no ROCm and no CUDA where they are looked for."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("PATH", "ROCM_PATH", "HIP_PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(empty))
    monkeypatch.setattr("hip_ops.compilers.NVCC_FOLDERS", ())
    monkeypatch.setattr("hip_ops.compilers.ROCM_FOLDERS", ())

# SPDX-License-Identifier: Apache-2.0
"""Shares fixtures among the tests of hip_ops."""

import itertools
import sys
import types

import pytest
import torch
from torch.overrides import _pop_mode, _push_mode

from hip_ops import use_kernels, versions
from hip_ops.runtime import rocm
from hip_ops.runtime.operator import OPERATORS, Operator
from hip_ops.versions import VERSIONS

NUMBERS = itertools.count(1000)  # names of one width, for tables


@pytest.fixture(params=["reference", "hip"])
def chosen(request):
    """Selects a version that runs on a CPU, and returns its name."""
    with use_kernels(request.param):
        yield request.param


@pytest.fixture
def no_function_modes():
    """Removes the mode that zaya_plugin's patches for CPUs set for the whole process if another test applied them."""
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
def nothing_selected(monkeypatch):
    """Requests no version, and resets the test's selection afterwards."""
    for name in ("HIP_OPS_KERNELS", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(versions, "_stack", [])
    versions._from_environment.cache_clear()
    yield
    versions._from_environment.cache_clear()


@pytest.fixture
def make_operator(monkeypatch):
    """make_operator(reference, hip=..., triton=..., **options): an `Operator` of which these functions are the
    versions.

    As if reference.py, hip.py and triton.py of a folder of hip_ops held them. compiled=True adds that version. The
    operator gets a name of its own and is forgotten after the test.
    """
    made = []

    def make(reference, *, compiled=False, **options):
        name = f"made_{next(NUMBERS)}"
        given = {version: options.pop(version) for version in ("hip", "triton") if version in options}
        module = f"tests.hip_ops.{name}"
        for version, function in given.items():
            file = types.ModuleType(f"{module}.{version}")
            setattr(file, name, function)
            monkeypatch.setitem(sys.modules, file.__name__, file)
        monkeypatch.setitem(VERSIONS, name, (*given, *["compiled"] * compiled))
        code, closure = reference.__code__, reference.__closure__
        copied = types.FunctionType(code, reference.__globals__, name, reference.__defaults__, closure)
        copied.__annotations__, copied.__module__ = reference.__annotations__, f"{module}.reference"
        made.append(name)
        return Operator(copied, **options)

    yield make
    for name in made:
        OPERATORS.pop(name, None)


@pytest.fixture
def no_compilers(tmp_path, monkeypatch):
    """Simulates a machine without any compiler: none on PATH, no ROCm and no CUDA in their default folders."""
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ("PATH", *rocm.VARIABLES, "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(empty))
    monkeypatch.setattr("hip_ops.runtime.compilers.NVCC_FOLDERS", ())
    monkeypatch.setattr(rocm, "DEFAULT_FOLDERS", ())

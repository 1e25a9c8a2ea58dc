# SPDX-License-Identifier: Apache-2.0
"""Which backend is chosen, why, and what is said where one cannot be had."""

import logging

import pytest
import torch

from hip_ops import backend
from tests.hip_ops.cpu_kernels import run_python

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


class FakeDevice:
    """What torch tells of a GPU; a machine of every kind is not at hand."""

    def __init__(self, monkeypatch, hip=None, gcn_arch_name="", capability=(9, 0)):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        properties = type("Properties", (), {"gcnArchName": gcn_arch_name})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)


def test_auto_on_the_cpu_is_torch_and_said_once(fresh_backend, caplog):
    caplog.set_level(logging.INFO, "hip_ops")
    assert backend.backend_for(CPU) == backend.backend_for(CPU) == "torch"
    assert [record.getMessage() for record in caplog.records] == ["hip_ops: backend torch on cpu (auto)"]


@pytest.mark.parametrize("name", ["hip", "torch"])
def test_environment(fresh_backend, monkeypatch, name):
    monkeypatch.setenv("HIP_OPS_BACKEND", name)
    choice = backend.choose(CPU)
    assert choice.order == (name,) and choice.explicit and choice.reason.startswith(f"HIP_OPS_BACKEND={name}")


def test_an_unknown_name(fresh_backend, monkeypatch):
    monkeypatch.setenv("HIP_OPS_BACKEND", "cuda")
    with pytest.raises(ValueError, match="HIP_OPS_BACKEND is 'cuda'; allowed are auto, hip, triton, torch"):
        backend.choose(CPU)
    with pytest.raises(ValueError, match=r"set_backend\(\.\.\.\) is 'rocm'"):
        backend.set_backend("rocm")


def test_code_goes_before_the_environment(fresh_backend, monkeypatch):
    monkeypatch.setenv("HIP_OPS_BACKEND", "hip")
    with backend.use_backend("torch"):
        assert backend.backend_for(CPU) == "torch" and backend.choose(CPU).reason == "set in code"
        with backend.use_backend("hip"):
            assert backend.backend_for(CPU) == "hip"
        assert backend.backend_for(CPU) == "torch"
    assert backend.backend_for(CPU) == "hip"
    backend.set_backend("auto")
    assert backend.backend_for(CPU) == "torch" and not backend.choose(CPU).explicit
    backend.set_backend(None)
    assert backend.backend_for(CPU) == "hip"


def test_triton_on_the_cpu_cannot_be_had(fresh_backend, monkeypatch):
    monkeypatch.setenv("HIP_OPS_BACKEND", "triton")
    with pytest.raises(
        ValueError,
        match=r"backend 'triton' \(HIP_OPS_BACKEND=triton\) cannot be had on cpu: Triton (compiles for GPUs|is not installed)",
    ):
        backend.choose(CPU)


def test_hip_without_a_compiler_cannot_be_had(fresh_backend, no_compilers, empty_cache, monkeypatch):
    monkeypatch.setenv("HIP_OPS_BACKEND", "hip")
    with pytest.raises(
        ValueError,
        match=r"backend 'hip' .* cannot be had on cpu: g\+\+ is not on PATH.*the cache holds no library for cpu",
    ):
        backend.choose(CPU)


def test_rocm_takes_hip_where_hipcc_is_else_triton_else_torch(
    fresh_backend, no_compilers, empty_cache, tmp_path, monkeypatch
):
    FakeDevice(monkeypatch, hip="7.1", gcn_arch_name="gfx942:sramecc+:xnack-")
    found = {"triton": object()}
    monkeypatch.setattr(backend.importlib.util, "find_spec", found.get)
    without = backend.choose(GPU)
    assert (
        without.order == ("triton", "torch")
        and "no hip: neither hipcc nor a clang++ that knows gfx942" in without.reason
    )
    backend._choices.clear()
    found.clear()
    assert backend.choose(GPU).order == ("torch",)
    backend._choices.clear()
    hipcc = tmp_path / "empty" / "hipcc"
    hipcc.write_text("#!/bin/sh\necho HIP version: 7.1\n")
    hipcc.chmod(0o755)
    assert backend.choose(GPU).order == ("hip", "torch")


def test_rocm_with_another_architecture(fresh_backend, monkeypatch):
    FakeDevice(monkeypatch, hip="7.1", gcn_arch_name="gfx1100")
    assert "cuda:0 is gfx1100; the kernels need waves of 64 and MFMA: gfx90a, gfx942, gfx950" in backend.unavailable(
        "hip", GPU
    )
    assert "hip" not in backend.choose(GPU).order


def test_nvidia_takes_triton_and_hip_only_by_name(fresh_backend, monkeypatch, tmp_path):
    FakeDevice(monkeypatch, capability=(9, 0))
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: object())
    assert backend.choose(GPU).order == ("triton", "torch")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho release 13.0\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with backend.use_backend("hip"):
        choice = backend.choose(GPU)
        assert choice.order == ("hip",) and "slow, to verify the kernels" in choice.reason


def test_a_device_of_another_kind(fresh_backend):
    assert "not on device meta" in backend.unavailable("hip", torch.device("meta"))


def test_the_public_names_are_lazy():
    program = """
import sys, hip_ops
assert "torch" not in sys.modules and set(hip_ops.__all__) <= set(dir(hip_ops))
import hip_ops.newton_schulz
assert callable(hip_ops.newton_schulz), "the function, not the module of that name"
for name in hip_ops.__all__:
    assert callable(getattr(hip_ops, name)), name
try:
    hip_ops.nothing
except AttributeError as error:
    print(error)
"""
    done = run_python(program)
    assert done.returncode == 0 and "module 'hip_ops' has no attribute 'nothing'" in done.stdout, done.stdout

# SPDX-License-Identifier: Apache-2.0
"""Compares hip_ops' versions on AITER with their references without a GPU, on AITER's own Triton kernels.

    python benchmarks/research/aiter_in_emulator.py CLONE v0.1.18 v0.1.19.post2 v0.1.20.post1

CLONE is a clone or bare mirror of github.com/ROCm/aiter. For each tag the installed Triton compiles its unmodified
kernels for gfx942, and the emulator of tests/gfx942 runs them behind AITER's host functions and hip_ops/ops/grouped_product/aiter.py. The
operators run their self-checks, then the cases of tests/hip_ops/grouped_cases.py against fp64. At the end nptgmm takes
ptgmm's place, whose defect the self-check must find.

Not AITER on a device: the emulator has no time and no caches, and its three programs stand for 304 compute units. It
has no scratch memory either, which AITER's tiles of 256 x 256 spill to under Triton 3.7.1, so gmm has tiles of 64 x 64
in this file, and ptgmm without accumulation 128 x 128. The other settings are AITER's.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import triton

from hip_ops.runtime import aiter as runtime_aiter
from hip_ops.runtime.aiter import Function
from hip_ops.runtime.operator import Operator
from tests.gfx942.emulator import Device
from tests.gfx942.triton_objects import triton_code_object
from tests.hip_ops.expert_path_device import to_numpy
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows

NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32"}
CONFIG = "aiter/ops/triton/configs/gfx942-GMM.json"
PROGRAMS = 3
TILES = {
    ("gmm", False): dict(BLOCK_SIZE_M=64, BLOCK_SIZE_K=64, BLOCK_SIZE_N=64, num_warps=4),
    ("ptgmm", False): dict(BLOCK_SIZE_M=64, BLOCK_SIZE_K=128, BLOCK_SIZE_N=128),
    ("nptgmm", False): dict(BLOCK_SIZE_M=64, BLOCK_SIZE_K=128, BLOCK_SIZE_N=128),
}
PRODUCTS = (Grouped((0, 3, 0, 37, 5), 48, 40), Grouped((70, 1), 32, 64, "fp16", padding_rows=0))


class Mi300x:
    """What Triton's driver tells of the device."""

    arch, backend, warp_size = "gfx942", "hip", 64

    def get_current_target(self):
        return self

    def get_current_device(self) -> int:
        return 0


class Emulated:
    """A kernel of AITER that is launched in the emulator."""

    def __init__(self, kernel):
        self.computed = {}
        while not isinstance(kernel, triton.JITFunction):
            self.computed |= getattr(kernel, "values", {})  # of triton.heuristics
            kernel = kernel.fn
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(*positional, num_warps: int = 4, num_stages: int = 2, **named):
            values = dict(zip(self.kernel.arg_names, positional, strict=False)) | named
            values |= {name: compute(values) for name, compute in self.computed.items()}
            constants = {
                each.name: values[each.name]
                for each in self.kernel.params
                if each.is_constexpr or values[each.name] is None
            }
            device, signature, given, aligned, written = Device(), {}, [], [], []
            for name in (name for name in self.kernel.arg_names if name not in constants):
                value = values[name]
                if isinstance(value, torch.Tensor):
                    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
                    flat = value.as_strided((1 + last,), (1,)) if value.numel() else value.new_zeros(1)
                    written.append((flat, device.put(to_numpy(flat))))
                    given.append(written[-1][1])
                    signature[name] = NAMES[value.dtype]
                else:
                    signature[name] = "i32" if isinstance(value, int) else "fp32"
                    given.append(np.int32(value) if isinstance(value, int) else np.float32(value))
                if isinstance(value, torch.Tensor) or isinstance(value, int) and value % 16 == 0:
                    aligned.append(name)
            options = dict(num_warps=num_warps, num_stages=num_stages, divisible_by_16=aligned)
            code = triton_code_object(self.kernel, signature, constants, **options)
            programs = (*(grid(values) if callable(grid) else grid), 1, 1)[:3]
            code.launch(device, programs, given)
            for flat, buffer in written:
                flat.copy_(torch.from_numpy(buffer.read().copy()).view(flat.dtype))

        return launch


def load(clone: Path, tag: str, folder: Path) -> None:
    """Import AITER's Triton host functions of a tag with emulated kernels, without aiter/__init__.py, which builds C++."""
    archive = subprocess.run(
        ["git", "-C", clone, "archive", tag, "aiter/ops/triton", "aiter/jit/utils"], stdout=-1, check=True
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as packed:
        packed.extractall(folder, filter="data")
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    for name in ("aiter", "aiter.ops", "aiter.jit"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder / name.replace(".", "/"))]
    gmm = importlib.import_module("aiter.ops.triton.gmm")
    settings = json.loads((folder / CONFIG).read_text())

    def config(kind: str, m: int, k: int, n: int, groups: int, accumulate: bool = False) -> dict:
        chosen = settings[kind]["accumulate" if accumulate else "default"]
        return chosen | {"GRID_DIM": PROGRAMS} | TILES.get((kind, accumulate), {})

    gmm.get_config = config
    for name, value in list(vars(gmm).items()):
        if isinstance(value, triton.runtime.KernelInterface):
            setattr(gmm, name, Emulated(value))
    runtime_aiter.installed = lambda: tag.removeprefix("v")
    Function._resolved.cache_clear()


def compare(tag: str) -> bool:
    """Run the self-checks and the cases; return whether all passed."""
    products, cases = importlib.import_module("hip_ops.ops.grouped_product"), []
    for case in PRODUCTS:
        for flag in (False, True):
            cases.append((f"rows {case} {flag}", lambda c=case, f=flag: check_rows(products.aiter, c, f)))
            cases.append((f"outer {case} {flag}", lambda c=case, f=flag: check_outer(products.aiter, c, f)))
    for operator in (products._rows, products._outer):
        cases.append((f"self-check of {operator.name}", lambda operator=operator: self_check(operator)))
    passed = [report(tag, name, run) for name, run in cases]
    passed.append(report(tag, "nptgmm", lambda: with_nptgmm(products), defect="it gives nan, torch 0"))
    return all(passed)


def report(tag: str, name: str, run: Callable[[], str | None], defect: str | None = None) -> bool:
    """Run a check and print what it detects. defect: what it has to detect."""
    start = time.perf_counter()
    try:
        found = run()
    except AssertionError as error:
        found = str(error)
    right = found is None if defect is None else defect in (found or "")
    text = ("passed" if right else "FAILED") + (f", seen: {found}" if found else "")
    print(f"{tag:14} {name:48} {text} ({time.perf_counter() - start:.1f} s)", flush=True)
    return right


def self_check(operator: Operator) -> str | None:
    return operator.difference(operator._function_of("aiter"), torch.device("cpu"), "aiter")


def with_nptgmm(products: types.ModuleType) -> str | None:
    """The self-check with nptgmm, which does not write the block of an expert without rows."""
    ptgmm = products.aiter.PTGMM
    try:
        products.aiter.PTGMM = Function(ptgmm.module, "nptgmm", ptgmm.arguments)
        return self_check(products._outer)
    finally:
        products.aiter.PTGMM = ptgmm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, metavar="CLONE")
    parser.add_argument("tags", nargs="+", metavar="TAG")
    options = parser.parse_args()
    triton.runtime.driver.set_active(Mi300x())
    print(f"Triton {triton.__version__}, gfx942, emulator of tests/gfx942")
    passed = []
    for tag in options.tags:
        with tempfile.TemporaryDirectory() as folder:
            load(options.clone, tag, Path(folder))
            passed.append(compare(tag))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Finds ROCm on a machine, and names the ROCm that torch is built for. Imports no torch.

ROCm is installed in a folder (/opt/rocm), or as Python wheels in site-packages: Primus' images since v26.4. Of the
wheels, rocm-sdk-core is the package `_rocm_sdk_core` with programs and libraries, without headers. rocm-sdk-devel adds
the headers: `rocm-sdk init` unpacks it to the package `_rocm_sdk_devel`, which holds everything. `python -m rocm_sdk
path --root` prints the folder of that package, but unpacks gigabytes where that has not happened yet, so it is not
called. Folders of both kinds are laid out alike, but for the places of LLVM and of the device libraries.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from typing import Any

VARIABLES = ("ROCM_PATH", "ROCM_HOME", "HIP_PATH")  # of torch, of Primus' images, of HIP
WHEELS = ("_rocm_sdk_devel", "_rocm_sdk_core")  # packages in site-packages
DEFAULT_FOLDERS = ("/opt/rocm", "/opt/rocm/core")  # the second since ROCm 7.14's packages of Linux distributions
LLVM_FOLDERS = ("llvm/bin", "lib/llvm/bin")
DEVICE_LIBRARY_FOLDERS = ("amdgcn/bitcode", "lib/llvm/amdgcn/bitcode")
SEARCHED = "ROCM_PATH, ROCM_HOME, HIP_PATH, ROCm's Python wheels and /opt/rocm"


def rocm_roots() -> list[Path]:
    """Return the folders that may hold a ROCm, in the order in which they are searched: those that variables name, those
    of the wheels that this Python can import, and the default folders."""
    named = [os.environ.get(name) for name in VARIABLES]
    wheels = (importlib.util.find_spec(name) for name in WHEELS)
    places = [place for wheel in wheels for place in (wheel and wheel.submodule_search_locations) or ()]
    return [Path(place) for place in dict.fromkeys((*filter(None, named), *places, *DEFAULT_FOLDERS))]


def folders(*names: str) -> list[Path]:
    """Return `names` below each root, in the order of the roots."""
    return [root / name for root in rocm_roots() for name in names]


def wheel_without_headers() -> Path | None:
    """Return the folder of the wheel rocm-sdk-core if no unpacked rocm-sdk-devel accompanies it; else None. Its hipcc
    runs, but finds no header."""
    devel, core = (importlib.util.find_spec(name) for name in WHEELS)
    return next((Path(place) for place in core.submodule_search_locations or ()), None) if core and not devel else None


def find_program(name: str) -> str | None:
    """Return the path of a program of ROCm (`amd-smi`), from PATH or from a root; None without one."""
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders("bin"))))


def torch_is_built_for(torch: Any) -> str:
    """Return "ROCm 10.1.0 (HIP 7.16.26341)", "CUDA 13.0" or "CPU". torch: the module.

    ROCm and HIP count apart since ROCm 10. torch.version.rocm is new in torch 2.11; wheels name ROCm in their version
    (2.12.0+rocm7.15.0) before. Where neither does, only HIP's version is known.
    """
    hip = getattr(torch.version, "hip", None)
    if not hip:
        return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    in_name = re.search(r"\+(?:.*\.)?rocm(\d+(?:\.\d+)*)", torch.__version__)
    rocm = getattr(torch.version, "rocm", None) or (in_name and in_name[1])
    return f"ROCm {rocm} (HIP {hip})" if rocm else f"HIP {hip}"

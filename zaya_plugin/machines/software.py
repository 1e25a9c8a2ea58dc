# SPDX-License-Identifier: Apache-2.0
"""The checks `environment` and `hazards`: versions of drivers, firmware and libraries, the libraries that are mapped,
and the code that has been compiled.
"""

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from hip_ops.ops.rms_norm.reference import affine_rms_norm
from hip_ops.runtime import build, choice, code_objects, launchers
from hip_ops.runtime import hazards as scanner
from hip_ops.runtime.compiled import compile_function
from hip_ops.runtime.compilers import AMD_ARCHITECTURES, find_compiler
from hip_ops.runtime.launch import on
from hip_ops.runtime.rocm import find_program, rocm_roots, torch_is_built_for
from hip_ops.versions import NOT_RUN, VERSIONS
from zaya_plugin.ground import secrets
from zaya_plugin.ground.mounts import ROOT
from zaya_plugin.machines import installed
from zaya_plugin.machines.checks import MI300X_TARGET, Outcome, Setting
from zaya_plugin.machines.examination import VARIABLES
from zaya_plugin.machines.hardware import limits
from zaya_plugin.machines.installed import UNKNOWN, answer
from zaya_plugin.plan.known_machine import machine_of

FIRST_DEVICE = torch.device("cuda", 0)
COMMAND_S = 20  # of a tool of the driver; amd-smi waits for ever for a device that hangs
COMMANDS = (
    ("amd-smi", "version"),
    ("amd-smi", "firmware"),
    ("rocm-smi", "--showfwinfo", "--showdriverversion", "--showtoponuma"),
    ("nvidia-smi", "--query-gpu=name,driver_version,vbios_version,pstate,ecc.mode.current", "--format=csv"),
)
FIRMWARE_FILES = (
    "module/amdgpu/version",
    "class/drm/card*/device/vbios_version",
    "class/drm/card*/device/fw_version/*",
)
# Each can hide devices from torch.
VISIBLE = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
MAX_OBJECTS = 400  # of Triton's cache, the newest; one takes a tenth of a second


def environment(setting: Setting) -> Outcome:
    """Collect the environment. Wrong: missing devices, two HIP runtimes in the process, or a shipped library that is
    not the verified one.
    """
    target = answer(lambda: launchers.target_of(FIRST_DEVICE)) if setting.on_rocm else MI300X_TARGET
    figures: dict[str, Any] = {
        "devices": installed.torch_devices(),
        "packages": installed.versions(),
        "host_changes": answer(lambda: installed.host_changes(setting).figures),
        "libc": " ".join(platform.libc_ver()),
        "torch": {"version": torch.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda},
        "rocm_roots": [str(folder) for folder in rocm_roots() if folder.is_dir()],
        "nccl": answer(installed.nccl_version),
        "compilers": {target: answer(lambda target=target: compiler_of(target)) for target in (target, "sm_90", "cpu")},
        "commands": {" ".join(words): output_of(words) for words in COMMANDS if find_program(words[0])},
        "firmware_files": files_below(Path("/sys"), FIRMWARE_FILES),
        "limits": limits(ROOT),
        "variables": secrets.of_data({k: v for k, v in os.environ.items() if VARIABLES.match(k)}),
        "library": answer(lambda: build.library_note(target)),
        "objects": answer(lambda: code_objects.objects_note(target)),
        "code_objects": answer(lambda: code_object_hashes(target)),
    }
    if setting.on_rocm:
        figures["loaded"] = answer(load_library)
    figures["hip_runtimes"] = [str(path) for path in launchers.mapped_runtimes(launchers.own_maps())]
    failures = devices_problem(setting), runtime_problem(torch.version.hip, launchers.own_maps()), library_problem()
    problems = [*filter(None, failures)]
    text = f"{figures['devices']['built_for']}, torch {torch.__version__}"
    text += f", library {figures['loaded']}" if setting.on_rocm else ""
    return Outcome("wrong" if problems else "pass", "; ".join(problems) or text, figures)


def devices_problem(setting: Setting) -> str | None:
    """Say which devices are missing, or return None.

    A machine that a cluster recipe names must have the recipe's number of devices, or as many as the shortest list in
    the VISIBLE variables.
    """
    if setting.chosen == "cpu":
        return None
    if setting.on_cpu:
        text = f"torch is built for {torch_is_built_for(torch)} and finds no device, so all checks run at their CPU sizes. "
        text += "Under SLURM request devices (srun --gpus-per-node=8). To examine the CPU: --device cpu"
        return text if torch.version.hip or torch.version.cuda else None
    if (machine := machine_of(setting.name)) is None:
        return None
    visible = [len(os.environ[name].split(",")) for name in VISIBLE if os.environ.get(name)]
    if setting.devices >= (required := min([machine.devices_per_node, *visible])):
        return None
    variable = VISIBLE[0] if torch.version.hip else VISIBLE[2]
    text = f"{setting.devices} of {required} devices available ({machine.name}). To examine these alone: "
    return text + f"{variable}={','.join(map(str, range(setting.devices)))} zaya verify"


def runtime_problem(hip: str | None, maps: str) -> str | None:
    """Say what is wrong with the HIP runtimes in `maps`, the text of /proc/self/maps, or return None. hip:
    torch.version.hip.
    """
    if hip is None:
        mapped = launchers.mapped_runtimes(maps)
        return f"torch is not built for ROCm, and this process has mapped {mapped[0]}" if mapped else None
    try:
        launchers.the_runtime(hip, maps, launchers.linked_major())
    except ValueError as error:
        return str(error)
    return None


def library_problem() -> str | None:
    """Say why a shipped library, or shipped objects, cannot be used, or return None; HIP_OPS_LIBRARY=source is not a
    problem.
    """
    if os.environ.get(build.LIBRARY_VARIABLE) == "source":
        return None
    kinds = ((build.MANIFEST, build.shipped), (code_objects.OBJECTS_MANIFEST, code_objects.shipped_objects))
    answers = (
        why_not(target)[1]
        for target in AMD_ARCHITECTURES
        for manifest, why_not in kinds
        if (build.shipped_folder(target) / manifest).is_file()
    )
    return next(filter(None, answers), None)


def load_library() -> str:
    """Load the kernels' library and the objects of Triton kernels on the first device, which maps what they need; return
    the target, whether the library is the shipped one or which one was built, and whether the shipped objects run.
    """
    launchers.library(target := launchers.target_of(FIRST_DEVICE))
    loaded = launchers.identity(FIRST_DEVICE) or ""
    with on(FIRST_DEVICE):
        objects = code_objects.loaded_objects(FIRST_DEVICE)
    text = "objects as shipped" if objects else code_objects.shipped_objects(target)[1]
    return f"{target} {'as shipped' if loaded.startswith('shipped') else loaded}, {text}"


def compiler_of(target: str) -> str:
    compiler = find_compiler(target)
    return f"{compiler.program}: {compiler.version.splitlines()[0]}"


def code_object_hashes(target: str) -> list[str]:
    """Return the sha256 of every code object in the library that ships for `target`."""
    content = (build.shipped_folder(target) / build.LIBRARY).read_bytes()
    return [hashlib.sha256(part).hexdigest() for part in scanner.code_objects(content)]


def output_of(words: tuple[str, ...]) -> str:
    """Return the output of a command, at most 20,000 characters, or why it has none."""
    words = (find_program(words[0]) or words[0], *words[1:])
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=COMMAND_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{UNKNOWN}{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip()[:20000]


def files_below(folder: Path, patterns: tuple[str, ...]) -> dict[str, str]:
    """Return the first line of each file."""
    return {
        str(path): answer(lambda path=path: path.read_text(errors="replace").splitlines()[0])
        for pattern in patterns
        for path in sorted(folder.glob(pattern))
    }


def hazards(setting: Setting) -> Outcome:
    """Scan AMD code for missing wait states: the library and the objects that ship for the device, and what Triton has
    compiled on this machine, for hip_ops and for torch.compile. The reason names the setting with which a bad kernel is
    not used. On ROCm a formula is compiled first; without a kernel of torch.compile the check is skipped.
    """
    failure = answer(lambda: compile_formula(FIRST_DEVICE)) if setting.on_rocm else None
    failure = (failure or "").removeprefix(UNKNOWN)
    objects = sorted(scanner.triton_objects(), key=lambda path: path.stat().st_mtime, reverse=True)
    target = answer(lambda: launchers.target_of(FIRST_DEVICE)) if setting.on_rocm else MI300X_TARGET
    folder = build.shipped_folder(target if build.shipped_folder(target).is_dir() else MI300X_TARGET)
    shipped = [folder / build.LIBRARY, *sorted(folder.glob("*.hsaco"))]
    files = [*shipped, *objects[:MAX_OBJECTS]]
    folders, compiled = list(map(str, scanner.triton_folders())), sum(map(scanner.is_inductors, objects[:MAX_OBJECTS]))
    figures: dict[str, Any] = {"folders": folders, "of_torch_compile": compiled, "violations": {}, "unreadable": {}}
    overrides: dict[str, str] = {}
    for number, path in enumerate(files, 1):
        setting.say(f"{number} of {len(files)} files")
        try:
            if violations := scanner.scan(path):
                figures["violations"][str(path)] = [str(violation) for violation in violations]
        except scanner.ToolNotFound as error:
            return Outcome("skipped", str(error))
        except (OSError, RuntimeError, ValueError, subprocess.SubprocessError) as error:
            figures["unreadable"][str(path)] = f"{type(error).__name__}: {error}"
    for path in map(Path, figures["violations"]):
        overrides |= without_kernel(path)
    text = f"{len(shipped)} shipped and {len(files) - len(shipped)} files of Triton's caches, {compiled} of them by "
    text += "torch.compile"
    text += "" if compiled else ": its kernels were not examined" + (f" ({failure})" if failure else "")
    if len(objects) > MAX_OBJECTS:
        text += f"; {len(objects) - MAX_OBJECTS} older ones not scanned"
    text += f"; folders: {', '.join(folders) or 'none'}"
    bad = {**figures["violations"], **figures["unreadable"]}
    if bad:
        first, problem = next(iter(bad.items()))
        text = f"{len(bad)} of {text}: {first}: {problem[0] if isinstance(problem, list) else problem}"
        text += "".join(f"; without it: {name}={value}" for name, value in overrides.items())
    # Without a kernel of torch.compile, which a step on ROCm runs, this check has not read all that runs.
    state = "wrong" if bad else "skipped" if setting.on_rocm and not compiled else "pass"
    return Outcome(state, text, figures, overrides=overrides)


def compile_formula(device: torch.device) -> None:
    """Compile the scaled embedding and its norm, a formula of the model that has no other version, and its gradients,
    so that torch.compile has made kernels on `device`. Raises ValueError where it is disabled, and what it raises.
    """
    if problem := choice.missing("compiled", torch.device("cuda"), named=False):
        raise ValueError(problem)
    embedding = torch.ones(256, 256, device=device, dtype=torch.bfloat16, requires_grad=True)
    vectors = (torch.ones(256, device=device, requires_grad=True) for _ in range(3))
    normed, stream = compile_function(affine_rms_norm)(embedding, *vectors, 1e-5, torch.float32)
    (normed.sum() + stream.sum()).backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def without_kernel(path: Path) -> dict[str, str]:
    """Return the recipe keys with which the kernel in this file does not run; none for a kernel of another package."""
    if path.suffix != ".hsaco":
        return {"cluster.kernels": "triton"}  # the shipped library
    if scanner.is_inductors(path):
        return {"cluster.environment.TORCHDYNAMO_DISABLE": "1"}
    operator = scanner.operator_of(path)
    if operator not in VERSIONS:  # another package's, or decode_step's, which AMD runs by HIP_OPS_KERNELS=triton alone
        return {}
    versions = [version for version in VERSIONS[operator] if version not in NOT_RUN]
    following = versions[versions.index("triton") + 1 :] or ["reference"]
    return {f"cluster.kernel_overrides.{operator}": following[0]}

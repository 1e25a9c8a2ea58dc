# SPDX-License-Identifier: Apache-2.0
"""The check `known_problems` of `zaya doctor`: collects the facts of this environment and applies the rules to them.

The rules are tables (package_rules.py, machine_rules.py). They read facts alone (facts.py), so that each is tested
with facts that have its problem and facts that nearly have it.
"""

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_plugin import compat
from zaya_plugin.ground.mounts import ROOT, mount_of, read
from zaya_plugin.machines.checks import Outcome, Setting
from zaya_plugin.machines.facts import TRITONS, Facts
from zaya_plugin.machines.hardware import limits
from zaya_plugin.machines.installed import (
    NO_DEVICES,
    UNKNOWN,
    answer,
    is_unknown,
    missing_packages,
    nccl_version,
    patches,
    torch_devices,
)
from zaya_plugin.machines.machine_rules import MACHINE_RULES
from zaya_plugin.machines.package_rules import PACKAGE_RULES

RULES = (*PACKAGE_RULES, *MACHINE_RULES)
DISTRIBUTIONS = ("torch", "aiter", "amd-aiter", "primus", "transformer-engine", "transformers", "peft", "wandb")
DISTRIBUTIONS += ("protobuf", *TRITONS)
MODULES = ("triton", "psutil", "primus", "primus.core")


def known_problems(setting: Setting) -> Outcome:
    """Look for known problems. Wrong: one of them is an error, so training cannot start."""
    entries = problems(facts_of_this_environment())
    texts = [f"{entry['severity']}: {entry['name']} ({entry['evidence']})" for entry in entries]
    details = [
        line
        for entry in entries
        for line in (
            f"{entry['severity']:8}{entry['name']}: {entry['evidence']}",
            f"        why   {entry['why']}",
            f"        do    {entry['remedy']}",
            f"        see   {entry['thread']}",
        )
    ]
    wrong = any(entry["severity"] == "error" for entry in entries)
    text = "; ".join(texts) or "none"
    return Outcome("wrong" if wrong else "pass", text, {"problems": entries}, details=details)


def problems(facts: Facts) -> list[dict[str, str]]:
    """Return the known problems that apply, errors first: name, severity, evidence, why, remedy, thread."""
    named = ("name", "severity", "why", "thread")
    applying = [
        {**{name: getattr(rule, name) for name in named}, "evidence": evidence, "remedy": rule.remedy_for(facts)}
        for rule in RULES
        if (evidence := rule.find(facts))
    ]
    return sorted(applying, key=lambda problem: problem["severity"] != "error")


def facts_of_this_environment() -> Facts:
    devices = answer(torch_devices)  # the check `devices` names an error
    imported = not is_unknown(devices)
    devices = devices if imported else NO_DEVICES
    return Facts(
        missing=missing_packages(),
        versions={name: compat.distribution_version(name) for name in DISTRIBUTIONS},
        modules={name: compat.has_module(name) for name in MODULES},
        environ=os.environ,
        core=compat.core_version(),
        training=compat.has_training(),
        mixed=compat.has_module("megatron.training") and not compat.has_training(),
        hip=devices["hip"],
        cuda=devices["cuda"],
        archs=tuple(item["arch"] for item in devices["accelerators"]),
        unfit=tuple(patch.symbol for patch in patches() if patch.applies and not patch.fits),
        outer_torch=outer_torch(Path(sys.prefix)),
        **(facts_of_torch() if imported else {}),
        **facts_of_machine(ROOT),
    )


def facts_of_torch() -> dict[str, Any]:
    """Import Transformer Engine, then ask torch for its cuDNN, RCCL or NCCL, and architectures."""
    import torch

    from hip_ops.runtime.launchers import mapped_runtimes, own_maps

    calls: dict[str, Callable[[], Any]] = {}
    if compat.has_module("transformer_engine"):
        calls["transformer_engine"] = lambda: importlib.import_module("transformer_engine.pytorch")
    if torch.version.cuda:
        calls["cudnn"] = torch.backends.cudnn.version
    answers = {name: answer(call) for name, call in calls.items()}
    nccl = answer(nccl_version)
    return {
        "failures": {name: text.removeprefix(UNKNOWN) for name, text in answers.items() if is_unknown(text)},
        "compiled_archs": tuple(torch.cuda.get_arch_list()),
        "nccl": None if is_unknown(nccl) else nccl,
        "runtimes": tuple(map(str, mapped_runtimes(own_maps()))),
    }


def outer_torch(prefix: Path) -> str | None:
    """Say which torch of another virtual environment, from whose Python `prefix` was made, this process does not see;
    None where there is none, or where it imports that one.
    """
    command = re.search(r"^command = (\S+)/bin/\S+ -m venv ", read(prefix / "pyvenv.cfg"), re.MULTILINE)
    outer = Path(command[1]) if command else prefix
    torch = next(outer.glob("lib/python*/site-packages/torch"), None)
    if outer == prefix or torch is None or not (outer / "pyvenv.cfg").is_file():
        return None
    spec = importlib.util.find_spec("torch")
    seen = spec is not None and spec.origin and Path(spec.origin).parent.samefile(torch)
    return None if seen else f"{prefix} does not see {torch}"


def facts_of_machine(root: Path) -> dict[str, Any]:
    """Read the files of Linux and of AMD's driver below `root`."""
    devices = sorted((root / "sys/bus/pci/drivers/amdgpu").glob("*:*:*.*"))
    modes = {read(device / f"current_{kind}_partition") for device in devices for kind in ("compute", "memory")}
    targets = (
        re.search(r"^gfx_target_version (\d+)", read(file), re.MULTILINE)
        for file in sorted((root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties"))
    )
    caches = {folder: nearest_existing(folder) for folder in kernel_caches()}
    return {
        "kfd": tuple(architecture_of(int(target[1])) for target in targets if target and int(target[1])),
        "kfd_denied": not os.access(root / "dev/kfd", os.R_OK | os.W_OK),
        "partitions": tuple(sorted(modes - {"", "SPX", "NPS1"})),
        "iommu": tuple(read(device / "iommu_group/type") for device in devices),
        "networks": tuple(sorted(path.name for path in (root / "sys/class/infiniband").glob("*"))),
        **limits(root),
        "numa_balancing": read(root / "proc/sys/kernel/numa_balancing") not in ("", "0"),
        "caches": {str(folder): mount_of(parent, root)[0] for folder, parent in caches.items()},
        "noexec": tuple(
            f"{folder} is mounted noexec"
            for folder, parent in caches.items()
            if os.statvfs(parent).f_flag & os.ST_NOEXEC
        ),
    }


def architecture_of(version: int) -> str:
    """Return the architecture of KFD's gfx_target_version: gfx942 for 90402, gfx90a for 90010."""
    major, rest = divmod(version, 10000)
    return f"gfx{major}{rest // 100:x}{rest % 100:x}"


def kernel_caches() -> list[Path]:
    """Return the folders into which Triton and torch.compile compile, those that exist and those that do not yet."""
    from hip_ops.runtime.hazards import inductor_cache, triton_cache

    return [folder.absolute() for folder in (triton_cache(), inductor_cache()) if folder is not None]


def nearest_existing(folder: Path) -> Path:
    """Return `folder` or its nearest parent that exists, without symbolic links, as mounts are listed."""
    folder = folder.resolve()
    return next(path for path in (folder, *folder.parents) if path.exists())

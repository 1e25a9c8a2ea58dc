# SPDX-License-Identifier: Apache-2.0
"""The checks of `zaya doctor`: packages, hosts, devices, kernels and host changes; known_problems.py has the rules."""

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from zaya_plugin import compat
from zaya_plugin.machines.checks import MI300X_TARGET, Outcome, Setting

NO_DEVICES = {"built_for": "CPU", "hip": None, "cuda": None, "accelerators": []}
UNKNOWN = "unknown: "
# distribution, module, its use, how to get it
PACKAGES = (
    ("torch", "torch", "needed", "install the build for your accelerator; for a CPU: pip install 'zaya_plugin[cpu]'"),
    ("megatron-core", "megatron.core", "needed", f"{compat.INSTALL}, or a Megatron-LM checkout"),
    (
        "transformers",
        "transformers",
        "needed for tokenizers and Hugging Face checkpoints",
        "pip install 'transformers>=5.13'",
    ),
    (
        "triton",
        "triton",
        "needed by megatron-core 0.19 at import",
        "part of the ROCm and CUDA builds of torch; for a CPU: pip install triton",
    ),
    ("wandb", "wandb", "optional: Weights & Biases", "pip install wandb"),
    (
        "transformer-engine",
        "transformer_engine",
        "optional: cluster.transformer_impl=transformer_engine",
        "never installed by zaya_plugin. NVIDIA: pip install transformer-engine[pytorch]. ROCm: AMD's Primus or "
        "Megatron containers hold it; source: github.com/ROCm/TransformerEngine",
    ),
    (
        "aiter",
        "aiter",
        "optional: AMD's kernels for MI300X",
        "never installed by zaya_plugin. AMD's Primus containers hold it; source: github.com/ROCm/aiter",
    ),
)


def packages(setting: Setting, use: str) -> Outcome:
    """List the packages whose use begins with "needed" or "optional"; known_problems judges missing ones."""
    installed, details = versions(), []
    rows = [row for row in PACKAGES if row[2].startswith(use)]
    for name, _, purpose, source in rows:
        details.append(f"{name:20}{installed[name] or 'not installed':22}{purpose}")
        details += [] if installed[name] else [f"{'':20}{source}"]
    shown = {name: installed[name] for name, *_ in rows}
    text = f"{sum(map(bool, shown.values()))} of {len(shown)} installed"
    return Outcome("pass", text, {"versions": shown}, details=details)


def versions() -> dict[str, str | None]:
    return {name: version_of(name, module) for name, module, *_ in PACKAGES}


def missing_packages() -> tuple[str, ...]:
    """Return the needed packages that are not installed."""
    return tuple(name for name, module, use, _ in PACKAGES if use[:6] == "needed" and not compat.has_module(module))


def version_of(distribution: str, module: str) -> str | None:
    """Return the version of a package, or None if its module cannot be imported."""
    if not compat.has_module(module):
        return None
    if module == "megatron.core":  # a checkout in front of a wheel has the wheel's metadata
        return str(compat.core_version())
    names = (distribution, module.replace("_", "-"), module)
    known = (version for name in names if (version := compat.distribution_version(name)))
    return next(known, "unknown version")  # a source checkout on PYTHONPATH


def nccl_version() -> str:
    """Return the version of torch's RCCL or NCCL, as 2.30.4; raises where torch has none."""
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


def hosts(setting: Setting) -> Outcome:
    """Say which hosts of docs/megatron.md this environment can be."""
    core, fits = compat.core_version(), compat.zaya_train_fits()
    loop = "with" if compat.has_training() else "without"
    text = f"megatron.core {core} {loop} megatron.training" if core else "no megatron.core"
    primus = compat.has_module("primus.core")
    text_of_primus = "primus.core is installed; it brings its Megatron" if primus else "no primus.core on the path"
    rows = (
        ("zaya train", fits, text),
        ("pretrain_gpt.py --spec", fits, f"{text}; its script comes with a checkout"),
        ("Primus", primus, text_of_primus),
    )
    details = [f"{'can be   ' if possible else 'cannot be'} {name:28}{detail}" for name, possible, detail in rows]
    possible = [name for name, fits, _ in rows if fits]
    return Outcome("pass", ", ".join(possible) or "none", {"possible": possible}, details=details)


@lru_cache
def torch_devices() -> dict[str, Any]:
    """Return the accelerator for which torch is built, and the devices that it has; raises what its import raises."""
    import torch

    from hip_ops.runtime.rocm import torch_is_built_for

    accelerators = []
    # device_count() alone returns 1 where the CPU's patches are applied
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        architecture = getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}"
        gib = round(properties.total_memory / 2**30)
        accelerators.append({"index": index, "name": properties.name, "memory_gib": gib, "arch": architecture})
    built_for = {"built_for": torch_is_built_for(torch), "hip": torch.version.hip, "cuda": torch.version.cuda}
    return {**built_for, "cpu_cores": os.cpu_count(), "accelerators": accelerators}


def devices(setting: Setting) -> Outcome:
    figures = torch_devices()
    details = [
        f"{item['index']}: {item['name']}, {item['memory_gib']} GiB, {item['arch']}" for item in figures["accelerators"]
    ]
    details = details or ["no accelerator: use cluster=cpu"]
    sums = sums_of_gradients() if figures["accelerators"] else "not known without a device"
    details.append(f"fp32 weight gradients, way_of_adding: {sums}")
    text = f"torch is built for {figures['built_for']}; {figures['cpu_cores']} CPU cores"
    return Outcome("pass", text, {**figures, "way_of_adding": sums}, details=details)


def sums_of_gradients() -> str:
    """Say how the first device adds weight gradients in bf16 products to fp32, by a trial of a small product."""
    import torch

    from hip_ops.runtime.main_grad import way_of_adding

    device = torch.device("cuda", 0)
    way = way_of_adding(torch.empty(0, device=device), torch.empty(0, device=device, dtype=torch.bfloat16))
    return {"rounded": "rounded (each micro-batch's gradient is rounded to bf16 before it is added)"}.get(way, way)


def answer(question: Callable[[], Any]) -> Any:
    """Return the answer, or the error as text, so that the other figures are still collected."""
    try:
        return question()
    except Exception as error:
        return f"{UNKNOWN}{type(error).__name__}: {error}"


def is_unknown(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(UNKNOWN)


def kernels(setting: Setting) -> Outcome:
    """List by device the versions of hip_ops' operators, or the error where a requested version is not available; and
    the library of the AMD target.
    """
    import torch

    from hip_ops.runtime.build import library_note
    from hip_ops.runtime.code_objects import objects_note
    from hip_ops.runtime.launchers import target_of
    from hip_ops.runtime.operator import report

    figures: dict[str, list[str]] = {}
    for name in ["cpu"] + ["cuda"] * (not setting.on_cpu):
        try:
            figures[name] = report(name, check=False)
        except ValueError as error:
            figures[name] = [str(error)]
    target = answer(lambda: target_of(torch.device("cuda", 0))) if setting.on_rocm else MI300X_TARGET
    if not is_unknown(target):  # the lines of the device name another architecture
        figures[target] = [f"library of hip: {library_note(target)}", f"kernels of triton: {objects_note(target)}"]
    details = [f"{name:4}  {line}" for name, lines in figures.items() for line in lines]
    return Outcome("pass", "hip_ops; details: `python -m hip_ops info`", figures, details=details)


def patches() -> list:
    """Return the patches of a host; none without torch or megatron-core, which known_problems names."""
    if {"torch", "megatron-core"} & {*missing_packages()} or is_unknown(answer(torch_devices)):
        return []
    from zaya_plugin.patches import describe

    return describe()


def host_changes(setting: Setting) -> Outcome:
    """List the patches of a host and the symbols that a run replaces."""
    from zaya_plugin.patches import hooks

    replaced = {"patches": patches(), "hooks": hooks.describe()}
    details = ["patches of a host, for the whole process"]
    for patch in replaced["patches"]:
        details += _lines(patch, "applies   " if patch.applies else "unused    ", f"{patch.scope}, ")
    details.append("replaced during a run, and restored")
    for hook in replaced["hooks"]:
        details += _lines(hook, "" if hook.fits else "does not fit  ")
    figures = {kind: [change.symbol for change in changes] for kind, changes in replaced.items()}
    text = ", ".join(f"{len(symbols)} {kind}" for kind, symbols in figures.items())
    return Outcome("pass", text, figures, details=details)


def _lines(change: Any, state: str, scope: str = "") -> list[str]:
    return [
        f"{state}{change.symbol}  ({scope}{change.package} {change.versions or 'any'})",
        f"          {change.reason}; until {change.until}",
        f"          {change.upstream}",
    ]

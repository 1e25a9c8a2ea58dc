# SPDX-License-Identifier: Apache-2.0
"""`zaya doctor`: what is installed, which hosts it can be, what is known to go wrong here, devices, and which patches apply and why.

Exit status: 0, training can start; 1, something needed is missing or a known problem is an error (with --strict: or a warning).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from typing import Any

from zaya_plugin import __version__

# distribution, module, what it is for, how to get it
PACKAGES = (
    ("torch", "torch", "needed", "install the build for your accelerator; for a CPU: pip install 'zaya_plugin[cpu]'"),
    (
        "megatron-core",
        "megatron.core",
        "needed",
        "pip install 'megatron-core[training]>=0.19.2', or a Megatron-LM checkout",
    ),
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
        "pip install triton; ROCm builds of torch bring their own",
    ),
    ("wandb", "wandb", "optional: Weights & Biases", "pip install wandb"),
    (
        "transformer-engine",
        "transformer_engine",
        "optional: cluster.transformer_impl=transformer_engine",
        "never installed by zaya_plugin. NVIDIA: pip install transformer-engine[pytorch]. ROCm: AMD's Primus or Megatron "
        "containers hold it; source: github.com/ROCm/TransformerEngine",
    ),
    (
        "aiter",
        "aiter",
        "optional: AMD's kernels for MI300X",
        "never installed by zaya_plugin. AMD's Primus containers hold it; source: github.com/ROCm/aiter",
    ),
)


def main(argv: list[str]) -> int:
    """Prints the report and returns the exit status."""
    parser = argparse.ArgumentParser(prog="zaya doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    arguments = parser.parse_args(argv)
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
    return exit_status(report, arguments.strict)


def exit_status(report: dict[str, Any], strict: bool = False) -> int:
    """1 if something needed is missing or broken, or a known problem is an error (or, with `strict`, any); else 0."""
    missing = any(item["version"] is None and item["use"].startswith("needed") for item in report["packages"])
    broken = any(isinstance(report[part], str) for part in ("devices", "patches"))
    return int(missing or broken or any(strict or item["severity"] == "error" for item in report["problems"]))


def examine() -> dict[str, Any]:
    """The report as plain data: python, packages, hosts, problems, devices, kernels, patches, hooks; imports torch if it is there."""
    packages = [
        {"name": name, "version": _version(name, module), "use": use, "get": get} for name, module, use, get in PACKAGES
    ]
    present = {item["name"] for item in packages if item["version"]}
    report = {
        "zaya_plugin": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "packages": packages,
        "hosts": _hosts(),
        "devices": _ask(_devices) if "torch" in present else "unknown: torch is not installed",
        "kernels": _ask(_kernels) if "torch" in present else "unknown: torch is not installed",
        "hooks": _hooks(),
        "patches": _ask(_patches)
        if {"torch", "megatron-core"} <= present
        else "unknown: torch or megatron-core is not installed",
    }
    report["problems"] = [dataclasses.asdict(problem) for problem in known_problems(report)]
    return report


def known_problems(report: dict[str, Any]) -> list:
    """Of the rules in zaya_plugin.known_problems those that apply to this environment."""
    from zaya_plugin import compat
    from zaya_plugin.known_problems import Facts, problems

    devices = report["devices"] if isinstance(report["devices"], dict) else {"built_for": "CPU", "accelerators": []}
    kind, _, version = devices["built_for"].partition(" ")
    patches = report["patches"] if isinstance(report["patches"], list) else []
    names = ("aiter", "amd-aiter", "primus", "transformer-engine")
    modules = ("triton", "psutil", "transformer_engine", "transformer_engine_torch", "primus", "primus.core")
    return problems(
        Facts(
            versions={name: _distribution_version(name) for name in names},
            modules={name: compat.has_module(name) for name in modules},
            environ=os.environ,
            core=compat.core_version(),
            training=compat.has_training(),
            mixed=compat.has_module("megatron.training") and not compat.has_training(),
            hip=version if kind == "ROCm" else None,
            cuda=version if kind == "CUDA" else None,
            archs=tuple(item["arch"] for item in devices["accelerators"]),
            unfit=tuple(patch["name"] for patch in patches if patch["applies"] and not patch["fits"]),
        )
    )


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    python, devices, patches = report["python"], report["devices"], report["patches"]
    lines = [
        f"zaya_plugin {report['zaya_plugin']}",
        f"Python {python['version']}  {python['executable']}  {python['platform']}",
        "",
        "Packages",
    ]
    for item in report["packages"]:
        lines.append(f"  {item['name']:20}{item['version'] or 'not found':22}{item['use']}")
        if item["version"] is None:
            lines.append(f"  {'':20}{item['get']}")
    lines += ["", "Hosts"]
    lines += [
        f"  {'can be   ' if host['possible'] else 'cannot be'} {host['name']:28}{host['detail']}"
        for host in report["hosts"]
    ]
    lines += ["", "Known problems"]
    lines += [line for problem in report["problems"] for line in _problem_lines(problem)] or [
        "  none of those that are known"
    ]
    lines += ["", "Devices"]
    if isinstance(devices, str):
        lines.append(f"  {devices}")
    else:
        lines.append(f"  torch is built for {devices['built_for']}; {devices['cpu_cores']} CPU cores")
        for item in devices["accelerators"]:
            lines.append(f"  {item['index']}: {item['name']}, {item['memory_gib']} GiB, {item['arch']}")
        if not devices["accelerators"]:
            lines.append("  no accelerator: use cluster=cpu")
    kernels = report["kernels"]
    lines += ["", "Kernels (hip_ops; more by `python -m hip_ops info`)"]
    if isinstance(kernels, str):
        lines.append(f"  {kernels}")
    else:
        lines += [f"  {item['device']:6}{line}" for item in kernels for line in item["versions"]]
    lines += ["", "Patches"]
    if isinstance(patches, str):
        return "\n".join([*lines, f"  {patches}"])
    for patch in patches:
        lines.append(
            f"  {'applies ' if patch['applies'] else 'not here'}  {patch['name']}  ({patch['scope']}, {patch['versions']})"
        )
        lines.append(f"            {patch['reason']}")
    lines += ["", "Replaced while a run lasts, and restored"]
    for hook in report["hooks"]:
        lines.append(f"  {'' if hook['fits'] else 'does not fit  '}{hook['symbol']}  ({hook['versions']})")
        lines.append(f"            {hook['reason']}; until {hook['until']}")
    return "\n".join(lines)


def _problem_lines(problem: dict[str, str]) -> list[str]:
    return [
        f"  {problem['severity']:8}{problem['name']}: {problem['found']}",
        f"          why   {problem['why']}",
        f"          do    {problem['remedy']}",
    ]


def _hosts() -> list[dict[str, Any]]:
    """What docs/hosts.md calls hosts, and whether this environment can be each."""
    from zaya_plugin import compat

    core, training = compat.core_version(), compat.has_training()
    found = (
        f"megatron.core {core}{' with' if training else ' without'} megatron.training" if core else "no megatron.core"
    )
    primus = compat.has_module("primus.core")
    return [
        {"name": "zaya train", "possible": compat.zaya_train_fits(), "detail": found},
        {
            "name": "pretrain_gpt.py --spec",
            "possible": compat.zaya_train_fits(),
            "detail": f"{found}; its script comes with a checkout",
        },
        {
            "name": "Primus",
            "possible": primus,
            "detail": "primus.core is here; it brings its Megatron" if primus else "no primus.core on the path",
        },
    ]


def _ask(question: Callable[[], Any]) -> Any:
    """The answer, or the error as text: a torch that does not import is what a doctor is called for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return question()
        except Exception as error:
            return f"unknown: {type(error).__name__}: {error}"
        finally:
            logging.disable(logging.NOTSET)


def _version(distribution: str, module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return None
    if not found:
        return None
    if module == "megatron.core":  # a checkout in front of a wheel has the wheel's metadata
        from zaya_plugin import compat

        return str(compat.core_version())
    for name in (distribution, module.replace("_", "-"), module):
        if version := _distribution_version(name):
            return version
    return "found, version unknown"  # a source checkout on PYTHONPATH


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    built_for = (
        f"ROCm {torch.version.hip}"
        if torch.version.hip
        else f"CUDA {torch.version.cuda}"
        if torch.version.cuda
        else "CPU"
    )
    accelerators = []
    # device_count() alone answers 1 where the CPU's patches are applied
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        accelerators.append(
            {
                "index": index,
                "name": properties.name,
                "memory_gib": round(properties.total_memory / 2**30),
                "arch": getattr(properties, "gcnArchName", None) or f"sm_{properties.major}{properties.minor}",
            }
        )
    return {"built_for": built_for, "cpu_cores": os.cpu_count(), "accelerators": accelerators}


def _kernels() -> list[dict[str, Any]]:
    """By device: lines that name the versions of hip_ops' operators, or the error where one that is asked for is not available."""
    import torch

    from hip_ops.runtime.operator import report

    found = []
    for name in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        try:
            found.append({"device": name, "versions": report(name, check=False)})
        except ValueError as error:
            found.append({"device": name, "versions": [str(error)]})
    return found


def _patches() -> list[dict[str, Any]]:
    from zaya_plugin import patches

    names = ("name", "reason", "applies", "scope", "versions", "fits")
    return [{name: getattr(patch, name) for name in names} for patch in patches.describe()]


def _hooks() -> list[dict[str, Any]]:
    from zaya_plugin.patches import hooks

    names = ("symbol", "reason", "until", "versions", "fits")
    return [{name: getattr(hook, name) for name in names} for hook in hooks.describe()]

# SPDX-License-Identifier: Apache-2.0
"""`zaya doctor`: reports packages, hosts, known problems, devices, kernels and host changes, and whether training can
start.

The rules of known problems are in known_problems.py. They read facts alone, so that each can be tested anywhere.
"""

import argparse
import importlib
import json
import logging
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

from zaya_plugin import __version__

DESCRIPTION = """\
Says whether training can start, what is installed, which hosts this environment can be, known problems and devices;
with --all also kernels, optional packages, and every change of a host with its reason. Exit status: 0, training can start; 1, a required package is missing or broken, or a known
problem is an error."""
EXAMPLES = """\
examples:
  zaya doctor                           whether training can start, and what matters for it
  zaya doctor --all                     everything
  zaya doctor --json > report.json      for a bug report or a script
  zaya doctor --strict && zaya train experiment=cpu_demo
"""

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


def main(argv: list[str]) -> int:
    """Print the report and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="zaya doctor",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.add_argument("--all", action="store_true", help="print kernels, host changes and optional packages too")
    parser.add_argument("--strict", action="store_true", help="return exit status 1 for warnings too")
    arguments = parser.parse_args(argv)
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else render(report, arguments.all))
    return exit_status(report, arguments.strict)


def exit_status(report: dict[str, Any], strict: bool = False) -> int:
    """Return 1 if a required package is missing or broken, or a known problem is an error (or, with `strict`, any);
    else 0.
    """
    missing = any(item["version"] is None and item["use"].startswith("needed") for item in report["packages"])
    broken = any(isinstance(report[part], str) for part in ("devices", "patches"))
    return int(missing or broken or any(strict or item["severity"] == "error" for item in report["problems"]))


def examine() -> dict[str, Any]:
    """Return the report as plain data; imports torch if it is installed."""
    from zaya_plugin.patches import hooks

    packages = [
        {"name": name, "version": _version(name, module), "use": use, "get": get} for name, module, use, get in PACKAGES
    ]
    present = {item["name"] for item in packages if item["version"]}
    no_torch = "unknown: torch is not installed"
    report = {
        "zaya_plugin": __version__,
        "python": {"version": platform.python_version(), "executable": sys.executable, "platform": platform.platform()},
        "packages": packages,
        "hosts": _hosts(),
        "devices": _ask(_devices) if "torch" in present else no_torch,
        "kernels": _ask(_kernels) if "torch" in present else no_torch,
        "hooks": [_plain(hook) for hook in hooks.describe()],
        "patches": _ask(_patches)
        if {"torch", "megatron-core"} <= present
        else "unknown: torch or megatron-core is not installed",
    }
    report["failures"] = _failures() if "torch" in present else {}
    report["problems"] = _problems(report)
    return report


def _problems(report: dict[str, Any]) -> list[dict[str, str]]:
    """Return the known problems of this environment."""
    from zaya_plugin import compat
    from zaya_plugin.known_problems import TRITONS, Facts, problems

    devices = report["devices"] if isinstance(report["devices"], dict) else {"built_for": "CPU", "accelerators": []}
    kind, _, version = devices["built_for"].partition(" ")
    patches = report["patches"] if isinstance(report["patches"], list) else []
    names = ("aiter", "amd-aiter", "primus", "transformer-engine", *TRITONS)
    modules = ("triton", "psutil", "primus", "primus.core")
    facts = Facts(
        versions={name: _distribution_version(name) for name in names},
        modules={name: compat.has_module(name) for name in modules},
        environ=os.environ,
        core=compat.core_version(),
        training=compat.has_training(),
        mixed=compat.has_module("megatron.training") and not compat.has_training(),
        failures=report.get("failures", {}),
        hip=version if kind == "ROCm" else None,
        cuda=version if kind == "CUDA" else None,
        archs=tuple(item["arch"] for item in devices["accelerators"]),
        unfit=tuple(patch["symbol"] for patch in patches if patch["applies"] and not patch["fits"]),
    )
    return problems(facts)


def render(report: dict[str, Any], everything: bool = True) -> str:
    """Return the report as text: the verdict, and what decides it; or everything."""
    python, count = report["python"], len(report["problems"])
    problems = f"{count} known problem{'s' * (count > 1)}, below" if count else "no known problem"
    verdict = "cannot start" if exit_status(report) else "can start"
    lines = [
        f"training {verdict}: {problems}",
        f"zaya_plugin {report['zaya_plugin']}",
        f"Python {python['version']}  {python['executable']}  {python['platform']}",
    ]
    if not everything:
        needed = [item for item in report["packages"] if item["use"].startswith("needed")]
        report = report | {"packages": needed}
    for title, part, lines_of in SECTIONS:
        content = report[part]
        if everything or part in SHORT or isinstance(content, str):
            lines += ["", title, *([f"  {content}"] if isinstance(content, str) else lines_of(content))]
    return "\n".join(lines if everything else [*lines, "", "--all adds kernels, host changes and optional packages"])


def _package_lines(packages: list[dict[str, Any]]) -> Iterator[str]:
    for item in packages:
        yield f"  {item['name']:20}{item['version'] or 'not found':22}{item['use']}"
        if item["version"] is None:
            yield f"  {'':20}{item['get']}"


def _host_lines(hosts: list[dict[str, Any]]) -> list[str]:
    return [f"  {'can be   ' if host['possible'] else 'cannot be'} {host['name']:28}{host['detail']}" for host in hosts]


def _problem_lines(problems: list[dict[str, str]]) -> list[str]:
    shown = (
        f"  {problem['severity']:8}{problem['name']}: {problem['found']}\n"
        f"          why   {problem['why']}\n          do    {problem['remedy']}"
        for problem in problems
    )
    return [*shown] or ["  none found"]


def _device_lines(devices: dict[str, Any]) -> list[str]:
    shown = (
        f"  {accelerator['index']}: {accelerator['name']}, {accelerator['memory_gib']} GiB, {accelerator['arch']}"
        for accelerator in devices["accelerators"]
    )
    built = f"  torch is built for {devices['built_for']}; {devices['cpu_cores']} CPU cores"
    return [built, *([*shown] or ["  no accelerator: use cluster=cpu"])]


def _kernel_lines(kernels: list[dict[str, Any]]) -> list[str]:
    return [f"  {item['device']:4}  {line}" for item in kernels for line in item["versions"]]


def _patch_lines(patches: list[dict[str, Any]]) -> list[str]:
    return [
        _change_lines(patch, "applies   " if patch["applies"] else "not here  ", f"{patch['scope']}, ")
        for patch in patches
    ]


def _hook_lines(hooks: list[dict[str, Any]]) -> list[str]:
    return [_change_lines(hook, "" if hook["fits"] else "does not fit  ") for hook in hooks]


def _change_lines(change: dict[str, Any], state: str, scope: str = "") -> str:
    return (
        f"  {state}{change['symbol']}  ({scope}{change['package']} {change['versions'] or 'any'})\n"
        f"            {change['reason']}; until {change['until']}\n"
        f"            {change['upstream']}"
    )


# Title, part of the report, and the function of its lines. A part that could not be examined is a text.
SECTIONS = (
    ("Packages", "packages", _package_lines),
    ("Hosts", "hosts", _host_lines),
    ("Known problems", "problems", _problem_lines),
    ("Devices", "devices", _device_lines),
    ("Kernels (hip_ops; details: `python -m hip_ops info`)", "kernels", _kernel_lines),
    ("Patches of a host, for the whole process", "patches", _patch_lines),
    ("Replaced during a run, and restored", "hooks", _hook_lines),
)


SHORT = ("packages", "hosts", "problems", "devices")  # parts that are shown without --all


def _hosts() -> list[dict[str, Any]]:
    """The hosts of docs/hosts.md, and whether this environment can be each."""
    from zaya_plugin import compat

    core, training = compat.core_version(), compat.has_training()
    core_text = (
        f"megatron.core {core}{' with' if training else ' without'} megatron.training" if core else "no megatron.core"
    )
    primus = compat.has_module("primus.core")
    return [
        {"name": "zaya train", "possible": compat.zaya_train_fits(), "detail": core_text},
        {
            "name": "pretrain_gpt.py --spec",
            "possible": compat.zaya_train_fits(),
            "detail": f"{core_text}; its script comes with a checkout",
        },
        {
            "name": "Primus",
            "possible": primus,
            "detail": "primus.core is installed; it brings its Megatron" if primus else "no primus.core on the path",
        },
    ]


def _ask(question: Callable[[], Any]) -> Any:
    """Return the answer, or the error as text: a torch that does not import must be reported, not raised."""
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
    from zaya_plugin import compat

    if not compat.has_module(module):
        return None
    if module == "megatron.core":  # a checkout in front of a wheel has the wheel's metadata
        return str(compat.core_version())
    names = (distribution, module.replace("_", "-"), module)
    versions = (version for name in names if (version := _distribution_version(name)))
    return next(versions, "found, version unknown")  # a source checkout on PYTHONPATH


def _distribution_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    import torch

    hip, cuda = torch.version.hip, torch.version.cuda
    accelerators = []
    # device_count() alone returns 1 where the CPU's patches are applied
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
    built_for = f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU"
    return {"built_for": built_for, "cpu_cores": os.cpu_count(), "accelerators": accelerators}


def _failures() -> dict[str, str]:
    """Import Transformer Engine, then ask torch for its cuDNN; return the errors by name."""
    import torch

    from zaya_plugin import compat

    questions = {}
    if compat.has_module("transformer_engine"):
        questions["transformer_engine"] = lambda: importlib.import_module("transformer_engine.pytorch")
    if torch.version.cuda:
        questions["cudnn"] = torch.backends.cudnn.version
    answers = {name: _ask(question) for name, question in questions.items()}
    unknown = "unknown: "
    return {
        name: answer.removeprefix(unknown)
        for name, answer in answers.items()
        if isinstance(answer, str) and answer.startswith(unknown)
    }


def _kernels() -> list[dict[str, Any]]:
    """By device: lines that name the versions of hip_ops' operators, or the error where a requested version is not
    available; and the library of the AMD target.
    """
    import torch

    from hip_ops.runtime.build import library_note
    from hip_ops.runtime.launchers import target_of
    from hip_ops.runtime.operator import report

    devices = []
    for name in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        try:
            devices.append({"device": name, "versions": report(name, check=False)})
        except ValueError as error:
            devices.append({"device": name, "versions": [str(error)]})
    target = "gfx942"
    if torch.version.hip and torch.cuda.is_available():
        try:
            target = target_of(torch.device("cuda", 0))
        except ValueError:
            return devices  # the lines above name the architecture
    return [*devices, {"device": target, "versions": [f"library of hip: {library_note(target)}"]}]


def _patches() -> list[dict[str, Any]]:
    from zaya_plugin import patches

    return [_plain(patch, "scope", "applies") for patch in patches.describe()]


def _plain(change: Any, *further: str) -> dict[str, Any]:
    names = ("symbol", "reason", "until", "upstream", "package", "versions", "fits", *further)
    return {name: getattr(change, name) for name in names}

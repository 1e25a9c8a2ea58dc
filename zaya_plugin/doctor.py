# SPDX-License-Identifier: Apache-2.0
"""`zaya doctor`: reports packages, hosts, known problems, devices, kernels and host changes, and whether training can
start.

The rules of known problems are plain functions of `Facts`, so that each can be tested without the machine that it is
about.
"""

import argparse
import importlib
import json
import logging
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from zaya_plugin import __version__

DESCRIPTION = """\
Reports what is installed, which hosts this environment can be, known problems, devices, kernels, and every change of
a host with its reason. Exit status: 0, training can start; 1, a required package is missing or broken, or a known
problem is an error."""
EXAMPLES = """\
examples:
  zaya doctor                           the report as text
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


@dataclass(frozen=True)
class Facts:
    """What the rules of known problems read.

    Attributes:
        versions: of distributions as pip knows them, None where absent. modules: by name, whether it can be imported.
        core: version of megatron.core. training: whether its megatron.training is installed.
        mixed: whether megatron.training is that of another installation.
        failures: of an import of transformer_engine.pytorch and of a call of torch.backends.cudnn.version() after it.
        hip, cuda: the version that torch is built for. archs: of the accelerators.
        unfit: patches that apply and are not written for the installed version.
    """

    versions: Mapping[str, str | None] = field(default_factory=dict)
    modules: Mapping[str, bool] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    core: object | None = None
    training: bool = False
    mixed: bool = False
    failures: Mapping[str, str] = field(default_factory=dict)
    hip: str | None = None
    cuda: str | None = None
    archs: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A known problem. severity: "error" (training cannot work) or "warning". find: returns what was found, or an empty
    value.
    """

    name: str
    severity: str
    find: Callable[[Facts], Any]
    why: str
    remedy: str


def _before(version: object | None, release: str) -> bool:
    """Whether `version` is older than `release`; False where it is absent or cannot be read."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(str(version)) < Version(release)
    except InvalidVersion:
        return False


def _unsupported_core(facts: Facts) -> bool:
    from zaya_plugin.compat import FIRST_UNSUPPORTED, OLDEST

    return facts.core is not None and (_before(facts.core, OLDEST) or not _before(facts.core, FIRST_UNSUPPORTED))


def _no_zaya_train(facts: Facts) -> str | None:
    if _before(facts.core, "0.19"):
        return f"megatron.core {facts.core}"
    return f"megatron.core {facts.core} without megatron.training" if facts.core and not facts.training else None


def _devices_hidden(facts: Facts) -> str | None:
    built = f"ROCm {facts.hip}" if facts.hip else f"CUDA {facts.cuda}" if facts.cuda else None
    hidden = [f"{name}=''" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if facts.environ.get(name) == ""]
    return ", ".join([f"torch for {built}, no device", *hidden]) if built and not facts.archs else None


def _wide_stores(facts: Facts) -> str | None:
    """The first Triton that is older than 3.8, on gfx942."""
    if not any(arch.startswith("gfx942") for arch in facts.archs):
        return None
    found = ((name, facts.versions.get(name)) for name in TRITONS)
    return next((f"{name} {version} on gfx942" for name, version in found if _before(version, "3.8")), None)


TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm")  # distributions that hold the module triton
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
RULES = (
    Rule(
        "megatron-release",
        "error",
        lambda facts: _unsupported_core(facts) and f"megatron.core {facts.core}",
        "the plugin is written for 0.16 to 0.20",
        "install megatron-core 0.19.2, or use Primus with its pin",
    ),
    Rule(
        "mixed-megatron",
        "error",
        lambda facts: facts.mixed and f"megatron.core {facts.core} and a megatron.training of another installation",
        "`megatron` is a namespace that two installations can share; their parts do not fit each other",
        "take one of them off PYTHONPATH, or uninstall the wheel",
    ),
    Rule(
        "no-zaya-train",
        "warning",
        _no_zaya_train,
        "`zaya train` calls megatron.training as 0.19 and 0.20 have it",
        "for `zaya train`: pip install 'megatron-core[training]>=0.19.2'; in Primus: `zaya export primus`",
    ),
    Rule(
        "triton",
        "error",
        lambda facts: (
            facts.core
            and not _before(facts.core, "0.18")
            and facts.modules.get("triton") is False
            and f"megatron.core {facts.core} and no triton"
        ),
        "megatron.core imports it unconditionally from 0.18 on",
        "pip install triton; ROCm builds of torch bring their own",
    ),
    Rule(
        "psutil",
        "error",
        lambda facts: facts.core and facts.modules.get("psutil") is False and "no psutil",
        "Megatron needs it to save a checkpoint and does not declare it; the first save would end the run",
        "pip install psutil",
    ),
    Rule(
        "broken-transformer-engine",
        "error",
        lambda facts: (
            "transformer_engine" in facts.failures
            and not facts.failures["transformer_engine"].startswith(IMPORT_ERRORS)
            and f"import transformer_engine.pytorch: {facts.failures['transformer_engine']}"
        ),
        "Megatron falls back to its own modules after an ImportError only; any other error ends Megatron's import",
        "pip uninstall transformer-engine, or install a build for this torch: github.com/ROCm/TransformerEngine, transformer-engine[pytorch]",
    ),
    Rule(
        "no-transformer-engine",
        "warning",
        lambda facts: (
            facts.failures.get("transformer_engine", "").startswith(IMPORT_ERRORS)
            and f"import transformer_engine.pytorch: {facts.failures['transformer_engine']}"
        ),
        "Transformer Engine is installed and cannot be imported; cluster.transformer_impl=transformer_engine is refused",
        "install what is missing, or pip uninstall transformer-engine",
    ),
    Rule(
        "mixed-cudnn",
        "warning",
        lambda facts: facts.failures.get("cudnn") and f"torch.backends.cudnn.version(): {facts.failures['cudnn']}",
        "a library, such as Transformer Engine's, has loaded parts of the system's cuDNN beside torch's; torch then chooses "
        "another attention kernel (1.8 times slower on an H200)",
        "cluster.core_attention=cudnn or flash_attn_4, or remove the system's cuDNN from the loader's path",
    ),
    Rule(
        "wrong-aiter",
        "error",
        lambda facts: (
            facts.versions.get("aiter")
            and not facts.versions.get("amd-aiter")
            and f"aiter {facts.versions['aiter']} of PyPI"
        ),
        "the PyPI package of that name is an asyncio library; AMD's kernels are called amd-aiter",
        "pip uninstall aiter; AMD's Primus containers hold the right one",
    ),
    Rule(
        "wrong-primus",
        "warning",
        lambda facts: (
            facts.modules.get("primus")
            and facts.modules.get("primus.core") is False
            and f"primus {facts.versions.get('primus') or ''} without primus.core"
        ),
        "the PyPI package of that name is not AMD's Primus",
        "pip uninstall primus; clone github.com/AMD-AGI/Primus",
    ),
    Rule(
        "async-save-rocm",
        "warning",
        # of a version such as 7.0.51831-abc only the numbers can be compared
        lambda facts: (
            facts.hip and _before((re.match(r"\d+(\.\d+){0,2}", facts.hip) or ["0"])[0], "7.1") and f"ROCm {facts.hip}"
        ),
        "asynchronous torch_dist saves fork with HIP's pinned memory and crashed before ROCm 7.1 (AMD-AGI/Primus #46, "
        "#267)",
        "set megatron.async_save=false, or use ROCm 7.1",
    ),
    Rule(
        "stale-mha",
        "warning",
        lambda facts: (
            facts.hip
            and facts.versions.get("amd-aiter")
            and _before(facts.versions.get("transformer-engine"), "2.14")
            and f"transformer-engine {facts.versions['transformer-engine']} beside amd-aiter "
            f"{facts.versions['amd-aiter']}"
        ),
        "its libmha_bwd.so crashed the backward pass of AITER attention with head dimension 128 on gfx942 (Primus, "
        "aiter_deepbind_patches.py)",
        "Transformer Engine 2.14, or cluster.core_attention=sdpa",
    ),
    Rule(
        "scratch-reclaim",
        "warning",
        lambda facts: (
            any(arch.startswith("gfx942") for arch in facts.archs)
            and facts.environ.get("HSA_NO_SCRATCH_RECLAIM") != "1"
            and f"HSA_NO_SCRATCH_RECLAIM={facts.environ.get('HSA_NO_SCRATCH_RECLAIM') or 'unset'} on gfx942"
        ),
        "without it MoE training can crash on gfx942 (Primus, base_env.sh)",
        "export HSA_NO_SCRATCH_RECLAIM=1; the recipes cluster=mi300x_* set it",
    ),
    Rule(
        "wide-stores",
        "warning",
        _wide_stores,
        "its LLVM can overwrite the data of a wide store too early, with silently wrong gradients (triton-lang/triton#10711; "
        "LLVM before llvm/llvm-project#197267, and from there to #203770; still open on gfx942: #218550)",
        "Triton 3.8 or newer; `python -m hip_ops scan` checks the kernels in Triton's cache",
    ),
    Rule(
        "devices-hidden",
        "warning",
        _devices_hidden,
        "torch is built for an accelerator and finds none",
        "check the driver, the rights on /dev/kfd and /dev/dri, and *_VISIBLE_DEVICES; or use cluster=cpu",
    ),
    Rule(
        "dynamo-off",
        "warning",
        lambda facts: (
            facts.archs
            and facts.environ.get("TORCHDYNAMO_DISABLE") == "1"
            and "TORCHDYNAMO_DISABLE=1 beside an accelerator"
        ),
        "the model's fused functions then run one operation at a time on an accelerator",
        "unset TORCHDYNAMO_DISABLE for runs on a GPU",
    ),
    Rule(
        "primus-patches",
        "warning",
        lambda facts: (
            facts.environ.get("PRIMUS_PATCHES", "").lower() not in ("", "all")
            and f"PRIMUS_PATCHES={facts.environ['PRIMUS_PATCHES']}"
        ),
        "Primus then skips its own patches without a message",
        "unset PRIMUS_PATCHES, or set it to all",
    ),
    Rule(
        "patch-range",
        "error",
        lambda facts: ", ".join(facts.unfit),
        "the code that they change may be different in this version; a run would stop before it begins",
        "install a version in the patch's range, listed below",
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
    parser.add_argument("--strict", action="store_true", help="return exit status 1 for warnings too")
    arguments = parser.parse_args(argv)
    report = examine()
    print(json.dumps(report, indent=2) if arguments.json else render(report))
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
    report["problems"] = problems(_facts(report))
    return report


def problems(facts: Facts) -> list[dict[str, str]]:
    """Return the known problems that apply, errors first: name, severity, found, why, remedy."""
    named = ("name", "severity", "why", "remedy")
    found = [
        {**{name: getattr(rule, name) for name in named}, "found": found}
        for rule in RULES
        if (found := rule.find(facts))
    ]
    return sorted(found, key=lambda problem: problem["severity"] != "error")


def _facts(report: dict[str, Any]) -> Facts:
    from zaya_plugin import compat

    devices = report["devices"] if isinstance(report["devices"], dict) else {"built_for": "CPU", "accelerators": []}
    kind, _, version = devices["built_for"].partition(" ")
    patches = report["patches"] if isinstance(report["patches"], list) else []
    names = ("aiter", "amd-aiter", "primus", "transformer-engine", *TRITONS)
    modules = ("triton", "psutil", "primus", "primus.core")
    return Facts(
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


def render(report: dict[str, Any]) -> str:
    """Return the report as text."""
    python = report["python"]
    lines = [
        f"zaya_plugin {report['zaya_plugin']}",
        f"Python {python['version']}  {python['executable']}  {python['platform']}",
    ]
    for title, part, lines_of in SECTIONS:
        content = report[part]
        lines += ["", title, *([f"  {content}"] if isinstance(content, str) else lines_of(content))]
    return "\n".join(lines)


def _package_lines(packages: list[dict[str, Any]]) -> Iterator[str]:
    for item in packages:
        yield f"  {item['name']:20}{item['version'] or 'not found':22}{item['use']}"
        if item["version"] is None:
            yield f"  {'':20}{item['get']}"


def _host_lines(hosts: list[dict[str, Any]]) -> list[str]:
    return [f"  {'can be   ' if host['possible'] else 'cannot be'} {host['name']:28}{host['detail']}" for host in hosts]


def _problem_lines(found: list[dict[str, str]]) -> list[str]:
    shown = (
        f"  {problem['severity']:8}{problem['name']}: {problem['found']}\n"
        f"          why   {problem['why']}\n          do    {problem['remedy']}"
        for problem in found
    )
    return [*shown] or ["  none found"]


def _device_lines(devices: dict[str, Any]) -> list[str]:
    shown = (
        f"  {each['index']}: {each['name']}, {each['memory_gib']} GiB, {each['arch']}"
        for each in devices["accelerators"]
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


def _hosts() -> list[dict[str, Any]]:
    """The hosts of docs/hosts.md, and whether this environment can be each."""
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
    found = (version for name in names if (version := _distribution_version(name)))
    return next(found, "found, version unknown")  # a source checkout on PYTHONPATH


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
    from hip_ops.runtime.library import target_of
    from hip_ops.runtime.operator import report

    found = []
    for name in ["cpu"] + (["cuda"] if torch.cuda.is_available() else []):
        try:
            found.append({"device": name, "versions": report(name, check=False)})
        except ValueError as error:
            found.append({"device": name, "versions": [str(error)]})
    target = "gfx942"
    if torch.version.hip and torch.cuda.is_available():
        try:
            target = target_of(torch.device("cuda", 0))
        except ValueError:
            return found  # the lines above name the architecture
    return [*found, {"device": target, "versions": [f"library of hip: {library_note(target)}"]}]


def _patches() -> list[dict[str, Any]]:
    from zaya_plugin import patches

    return [_plain(patch, "scope", "applies") for patch in patches.describe()]


def _plain(change: Any, *further: str) -> dict[str, Any]:
    names = ("symbol", "reason", "until", "upstream", "package", "versions", "fits", *further)
    return {name: getattr(change, name) for name in names}

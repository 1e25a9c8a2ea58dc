# SPDX-License-Identifier: Apache-2.0
"""The known problems of an environment, one `Rule` each, for `zaya doctor`.

A rule reads `Facts` and returns its evidence; tests/machines/test_known_problems.py has facts with and without each
problem.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Facts:
    """The facts that the rules of known problems read.

    Attributes:
        missing: needed packages that are not installed.
        versions: of distributions as pip knows them, None where absent. modules: by name, whether it can be imported.
        core: version of megatron.core. training: whether its megatron.training is installed.
        mixed: whether megatron.training is that of another installation.
        failures: of an import of transformer_engine.pytorch and of a call of torch.backends.cudnn.version() after it.
        hip, cuda: the version that torch is built for. archs: of the accelerators.
        unfit: patches that apply and are not written for the installed version.
    """

    missing: tuple[str, ...] = ()
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
    """A known problem. severity: "error" (training cannot work) or "warning". find: returns the evidence, or an empty
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
    """The first Triton that is older than 3.8, on gfx942 or gfx950."""
    arch = next((arch[:6] for arch in facts.archs if arch.startswith(("gfx942", "gfx950"))), None)
    versions = ((name, facts.versions.get(name)) for name in TRITONS)
    old = (f"{name} {version} on {arch}" for name, version in versions if _before(version, "3.8"))
    return next(old, None) if arch else None


TRITONS = ("triton", "pytorch-triton-rocm", "triton-rocm")  # distributions that hold the module triton
IMPORT_ERRORS = ("ImportError", "ModuleNotFoundError")
RULES = (
    Rule(
        "missing-package",
        "error",
        lambda facts: ", ".join(facts.missing),
        "training imports it at its start",
        "install it; the packages that `zaya doctor` lists name the command",
    ),
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
        "a library, such as Transformer Engine's, has loaded parts of the system's cuDNN in addition to torch's; torch then chooses "
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
            and f"transformer-engine {facts.versions['transformer-engine']} with amd-aiter "
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
            and "TORCHDYNAMO_DISABLE=1 with an accelerator"
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


def problems(facts: Facts) -> list[dict[str, str]]:
    """Return the known problems that apply, errors first: name, severity, evidence, why, remedy."""
    named = ("name", "severity", "why", "remedy")
    applying = [
        {**{name: getattr(rule, name) for name in named}, "evidence": evidence}
        for rule in RULES
        if (evidence := rule.find(facts))
    ]
    return sorted(applying, key=lambda problem: problem["severity"] != "error")

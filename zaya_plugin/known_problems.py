# SPDX-License-Identifier: Apache-2.0
"""Combinations of versions, packages and variables that are known to go wrong, each with why and what to do; for `zaya doctor`.

Plain rules over facts, so that each can be tested without the machine that it is about. No import but the standard library's and
packaging.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from zaya_plugin.compat import FIRST_UNSUPPORTED, OLDEST


@dataclass(frozen=True)
class Facts:
    """What was found.

    versions: of distributions as pip knows them, None where absent. modules: importable or not. core: version of megatron.core.
    training: whether its megatron.training is here; mixed: whether there is one of another installation. hip: torch's ROCm version.
    archs: of the accelerators. unfit: patches that apply and are not written for what is installed.
    """

    versions: Mapping[str, str | None] = field(default_factory=dict)
    modules: Mapping[str, bool] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    core: Version | None = None
    training: bool = False
    mixed: bool = False
    hip: str | None = None
    cuda: str | None = None
    archs: tuple[str, ...] = ()
    unfit: tuple[str, ...] = ()

    def at_least(self, distribution: str, release: str) -> bool | None:
        """Whether it is of that release or later; None if it is absent or has no version that can be read."""
        try:
            return Version(self.versions.get(distribution) or "") >= Version(release)
        except InvalidVersion:
            return None


@dataclass(frozen=True)
class Problem:
    """name: of the rule. severity: "error", training cannot work, or "warning". found, why, remedy: for people."""

    name: str
    severity: str
    found: str
    why: str
    remedy: str


RULES: list[Callable[[Facts], Problem | None]] = []


def problems(facts: Facts) -> list[Problem]:
    """All that apply, errors first."""
    found = [problem for rule in RULES if (problem := rule(facts)) is not None]
    return sorted(found, key=lambda problem: problem.severity != "error")


def _rule(name: str, severity: str, why: str, remedy: str):
    """Makes a rule of a function that says what it found, or None."""

    def made(find: Callable[[Facts], str | None]):
        def rule(facts: Facts) -> Problem | None:
            found = find(facts)
            return None if not found else Problem(name, severity, found, why, remedy)

        RULES.append(rule)
        return rule

    return made


@_rule(
    "megatron-release",
    "error",
    "the plugin is written for 0.16 to 0.20",
    "install megatron-core 0.19.2, or use Primus with its pin",
)
def _megatron_release(facts: Facts) -> str | None:
    if facts.core is not None and not Version(OLDEST) <= facts.core < Version(FIRST_UNSUPPORTED):
        return f"megatron.core {facts.core}"


@_rule(
    "mixed-megatron",
    "error",
    "`megatron` is a namespace that two installations can share; their parts do not fit each other",
    "take one of them off PYTHONPATH, or uninstall the wheel",
)
def _mixed_megatron(facts: Facts) -> str | None:
    return f"megatron.core {facts.core} and a megatron.training of another installation" if facts.mixed else None


@_rule(
    "no-zaya-train",
    "warning",
    "`zaya train` calls megatron.training as 0.19 and 0.20 have it",
    "for `zaya train`: pip install 'megatron-core[training]>=0.19.2'; in Primus: `zaya export primus`",
)
def _no_zaya_train(facts: Facts) -> str | None:
    if facts.core is not None and facts.core < Version("0.19"):
        return f"megatron.core {facts.core}"
    return (
        f"megatron.core {facts.core} without megatron.training"
        if facts.core is not None and not facts.training
        else None
    )


@_rule(
    "triton",
    "error",
    "megatron.core imports it unconditionally from 0.18 on",
    "pip install triton; ROCm builds of torch bring their own",
)
def _triton(facts: Facts) -> str | None:
    if facts.core is not None and facts.core >= Version("0.18") and facts.modules.get("triton") is False:
        return f"megatron.core {facts.core} and no triton"


@_rule(
    "psutil",
    "error",
    "Megatron needs it to save a checkpoint and does not declare it; the first save would end the run",
    "pip install psutil",
)
def _psutil(facts: Facts) -> str | None:
    return "no psutil" if facts.core is not None and facts.modules.get("psutil") is False else None


@_rule(
    "empty-transformer-engine",
    "error",
    "without its compiled part it raises RuntimeError at import, where Megatron expects ImportError and falls back",
    "pip uninstall transformer-engine, or install a build for this torch: github.com/ROCm/TransformerEngine, transformer-engine[pytorch]",
)
def _empty_transformer_engine(facts: Facts) -> str | None:
    if facts.modules.get("transformer_engine") and facts.modules.get("transformer_engine_torch") is False:
        return f"transformer_engine {facts.versions.get('transformer-engine') or ''} without transformer_engine_torch"


@_rule(
    "wrong-aiter",
    "error",
    "the PyPI package of that name is an asyncio library; AMD's kernels are called amd-aiter",
    "pip uninstall aiter; AMD's Primus containers hold the right one",
)
def _wrong_aiter(facts: Facts) -> str | None:
    return (
        f"aiter {facts.versions['aiter']} of PyPI"
        if facts.versions.get("aiter") and not facts.versions.get("amd-aiter")
        else None
    )


@_rule(
    "wrong-primus",
    "warning",
    "the PyPI package of that name has nothing to do with AMD's Primus",
    "pip uninstall primus; clone github.com/AMD-AGI/Primus",
)
def _wrong_primus(facts: Facts) -> str | None:
    if facts.modules.get("primus") and facts.modules.get("primus.core") is False:
        return f"primus {facts.versions.get('primus') or ''} without primus.core"


@_rule(
    "async-save-rocm",
    "warning",
    "asynchronous torch_dist saves fork with HIP's pinned memory and crashed before ROCm 7.1 (AMD-AGI/Primus #46, #267)",
    "leave megatron.async_save off, or use ROCm 7.1",
)
def _async_save_rocm(facts: Facts) -> str | None:
    return f"ROCm {facts.hip}" if facts.hip and _release(facts.hip) < Version("7.1") else None


@_rule(
    "stale-mha",
    "warning",
    "its libmha_bwd.so crashed the backward pass of AITER attention with head dimension 128 on gfx942 (Primus, aiter_deepbind_patches.py)",
    "Transformer Engine 2.14, or cluster.core_attention=sdpa",
)
def _stale_mha(facts: Facts) -> str | None:
    if facts.hip and facts.versions.get("amd-aiter") and facts.at_least("transformer-engine", "2.14") is False:
        return (
            f"transformer-engine {facts.versions['transformer-engine']} beside amd-aiter {facts.versions['amd-aiter']}"
        )


@_rule(
    "scratch-reclaim",
    "warning",
    "without it MoE training can crash on gfx942 (Primus, base_env.sh)",
    "export HSA_NO_SCRATCH_RECLAIM=1; the recipes cluster=mi300x_* set it",
)
def _scratch_reclaim(facts: Facts) -> str | None:
    on_mi300x = any(arch.startswith("gfx942") for arch in facts.archs)
    value = facts.environ.get("HSA_NO_SCRATCH_RECLAIM")
    return f"HSA_NO_SCRATCH_RECLAIM={value or 'unset'} on gfx942" if on_mi300x and value != "1" else None


@_rule(
    "devices-hidden",
    "warning",
    "torch is built for an accelerator and sees none",
    "check the driver, the rights on /dev/kfd and /dev/dri, and *_VISIBLE_DEVICES; or use cluster=cpu",
)
def _devices_hidden(facts: Facts) -> str | None:
    built = f"ROCm {facts.hip}" if facts.hip else f"CUDA {facts.cuda}" if facts.cuda else None
    hidden = [f"{name}=''" for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if facts.environ.get(name) == ""]
    return ", ".join([f"torch for {built}, no device", *hidden]) if built and not facts.archs else None


@_rule(
    "dynamo-off",
    "warning",
    "the model's fused functions then run one operation at a time on an accelerator",
    "unset TORCHDYNAMO_DISABLE for runs on a GPU",
)
def _dynamo_off(facts: Facts) -> str | None:
    return (
        "TORCHDYNAMO_DISABLE=1 beside an accelerator"
        if facts.archs and facts.environ.get("TORCHDYNAMO_DISABLE") == "1"
        else None
    )


@_rule(
    "primus-patches",
    "warning",
    "Primus then leaves its own mendings out, silently",
    "unset PRIMUS_PATCHES, or set it to all",
)
def _primus_patches(facts: Facts) -> str | None:
    value = facts.environ.get("PRIMUS_PATCHES", "")
    return f"PRIMUS_PATCHES={value}" if value.lower() not in ("", "all") else None


@_rule(
    "patch-range",
    "error",
    "what they change may have changed; a run would stop before it begins",
    "install a version in the patch's range, listed below",
)
def _patch_range(facts: Facts) -> str | None:
    return ", ".join(facts.unfit) or None


def _release(version: str) -> Version:
    """Of '7.0.51831-abc' the part that can be compared."""
    return Version((re.match(r"\d+(\.\d+){0,2}", version) or ["0"])[0])

# SPDX-License-Identifier: Apache-2.0
"""Known problems of Python packages: torch, Triton, Megatron, Primus, Transformer Engine, AITER, transformers, W&B.

No remedy replaces the torch or the Triton of an AMD image: those of PyPI are other builds, and pip cannot restore the
image's (tests/machines/test_known_problems.py).
"""

from zaya_plugin import compat
from zaya_plugin.machines.facts import GITHUB, IMPORT_ERRORS, PRIMUS, Facts, Rule, before

NEW_CONTAINER = "start a new container of the image, and install with its packages pinned (docs/mi300x.md, step 1)"


def _unsupported_core(facts: Facts) -> bool:
    return facts.core is not None and (
        before(facts.core, compat.OLDEST) or not before(facts.core, compat.FIRST_UNSUPPORTED)
    )


def _no_zaya_train(facts: Facts) -> str | None:
    if before(facts.core, compat.OLDEST_TRAINING):
        return f"megatron.core {facts.core}"
    return f"megatron.core {facts.core} without megatron.training" if facts.core and not facts.training else None


def _no_triton(facts: Facts) -> str | None:
    needed = facts.core and not before(facts.core, "0.18")
    return f"megatron.core {facts.core} and no triton" if needed and facts.modules.get("triton") is False else None


def _transformer_engine(facts: Facts, import_errors: bool) -> str | None:
    """Return how Transformer Engine's import failed: with an error of importing, or with another one."""
    failure = facts.failures.get("transformer_engine")
    fits = failure and failure.startswith(IMPORT_ERRORS) == import_errors
    return f"import transformer_engine.pytorch: {failure}" if fits else None


def _aiter_backward(facts: Facts) -> str | None:
    if not facts.hip:
        return None
    from hip_ops.runtime.aiter import stale_backward  # core_attention=auto asks it too

    return stale_backward(facts.versions.get("amd-aiter"), facts.versions.get("transformer-engine"))


PACKAGE_RULES = (
    Rule(
        "missing-package",
        "error",
        lambda facts: ", ".join(facts.missing),
        "training imports it at its start",
        "install it; the packages that `zaya doctor` lists name the command",
        GITHUB + "NVIDIA/Megatron-LM/blob/core_v0.19.0/pyproject.toml",
    ),
    Rule(
        "cuda-torch-on-amd",
        "error",
        lambda facts: (
            facts.cuda
            and not facts.archs
            and facts.instincts
            and f"torch {facts.versions.get('torch')} for CUDA {facts.cuda} on a machine with {len(facts.instincts)} x "
            f"{facts.instincts[0]}"
        ),
        "this torch has no code for AMD's devices; an install of another package has replaced the image's, or a "
        "virtual environment hides it",
        NEW_CONTAINER,
        GITHUB + "YanWenKun/ComfyUI-Docker/issues/187",
    ),
    Rule(
        "hidden-torch",
        "warning",
        lambda facts: facts.outer_torch,
        "a virtual environment that was made inside another one does not see the packages of that one, also with "
        "--system-site-packages; pip then downloads another torch",
        "install into the outer environment, or let a .pth file name its site-packages (docs/mi300x.md, step 1)",
        "https://docs.python.org/3/library/venv.html",
    ),
    Rule(
        "megatron-release",
        "error",
        lambda facts: _unsupported_core(facts) and f"megatron.core {facts.core}",
        f"the plugin is written for {compat.SUPPORTED}",
        f"{compat.PACKAGE} (in AMD's image by {compat.INSTALL_IN_IMAGE}), or Primus with its pin",
        GITHUB + "NVIDIA/Megatron-LM/releases",
    ),
    Rule(
        "mixed-megatron",
        "error",
        lambda facts: facts.mixed and f"megatron.core {facts.core} and a megatron.training of another installation",
        "`megatron` is a namespace that two installations can share; their parts do not fit each other",
        "take one of them off PYTHONPATH, or uninstall the wheel",
        GITHUB + "radixark/Megatron-LM/pull/50",
    ),
    Rule(
        "no-zaya-train",
        "warning",
        _no_zaya_train,
        f"`zaya train` calls megatron.training as {compat.TRAINING} has it",
        f"for `zaya train`: pip install '{compat.PACKAGE}'; in Primus: `zaya export primus`",
        GITHUB + "NVIDIA/Megatron-LM/issues/3548",
        f"for `zaya train`: {compat.INSTALL_IN_IMAGE}; in Primus: `zaya export primus`",
    ),
    Rule(
        "triton",
        "error",
        _no_triton,
        "megatron.core imports it unconditionally from 0.18 on",
        "pip install triton",
        GITHUB + "NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/ops/paged_stash.py",
        NEW_CONTAINER,
    ),
    Rule(
        "foreign-triton",
        "warning",
        # AMD's builds have a local version, such as 3.7.1+git0263a6a6.rocm7.15, or another name
        lambda facts: (
            facts.hip
            and (version := facts.versions.get("triton"))
            and "+" not in version
            and f"triton {version} of PyPI, with torch for HIP {facts.hip}"
        ),
        "it replaces the Triton that belongs to a ROCm torch; in Primus' image its import then ends with a "
        "segmentation fault",
        NEW_CONTAINER,
        PRIMUS + "blob/main/docs/01-getting-started/bare-metal-installation.md",
    ),
    Rule(
        "old-triton",
        "warning",
        lambda facts: (
            facts.hip
            and next((f"{name} {version} on ROCm" for name, version in facts.tritons if before(version, "3.5")), None)
        ),
        "for gfx942, 3.4 spills registers in the experts' weight gradient and does not compile two kernels; 3.3 "
        "spills more, does not compile four, and has no tensor descriptors. The shipped objects serve the shapes of the "
        "recipes; other shapes are compiled by this Triton, or run by the next version",
        "an image whose torch is 2.9 or newer (docs/mi300x.md, step 1)",
        GITHUB + "triton-lang/triton/issues/7499",
    ),
    Rule(
        "wide-stores",
        "warning",
        lambda facts: (
            next((f"{name} {version} on {arch}" for name, version in facts.tritons if before(version, "3.8")), None)
            if (arch := next((arch for arch in ("gfx942", "gfx950") if facts.has(arch)), None))
            else None
        ),
        "its LLVM can overwrite the data of a wide store too early, with silently wrong gradients (LLVM before "
        "llvm/llvm-project#197267, and from there to #203770; still open on gfx942: #218550)",
        "`zaya verify --only hazards` reads the kernels that it has compiled. For each bad one it names the override: "
        "cluster.kernel_overrides.<operator>=<another version>, or TORCHDYNAMO_DISABLE=1 for a kernel of "
        "torch.compile. Triton 3.8 only as part of an AMD image",
        GITHUB + "triton-lang/triton/issues/10711",
    ),
    Rule(
        "psutil",
        "error",
        lambda facts: facts.core and facts.modules.get("psutil") is False and "no psutil",
        "Megatron needs it to save a checkpoint and does not declare it; the first save would end the run",
        "pip install psutil",
        GITHUB + "flagos-ai/Megatron-LM-FL/pull/106",
    ),
    Rule(
        "broken-transformer-engine",
        "error",
        lambda facts: _transformer_engine(facts, import_errors=False),
        "Megatron falls back to its own modules after an ImportError only; any other error ends Megatron's import",
        "pip uninstall transformer-engine, or install a build for this torch: transformer-engine[pytorch]",
        GITHUB + "ArcInstitute/evo2/issues/201",
        "pip uninstall transformer-engine, or a build for this torch from github.com/ROCm/TransformerEngine; that of "
        "PyPI is for CUDA",
    ),
    Rule(
        "no-transformer-engine",
        "warning",
        lambda facts: _transformer_engine(facts, import_errors=True),
        "Transformer Engine is installed and cannot be imported; cluster.transformer_impl=transformer_engine is "
        "refused",
        "install what is missing, or pip uninstall transformer-engine",
        GITHUB + "NVIDIA/TransformerEngine/issues/1216",
    ),
    Rule(
        "mixed-cudnn",
        "warning",
        lambda facts: facts.failures.get("cudnn") and f"torch.backends.cudnn.version(): {facts.failures['cudnn']}",
        "a library, such as Transformer Engine's, has loaded parts of the system's cuDNN in addition to torch's; "
        "torch then chooses another attention kernel (1.8 times slower on an H200)",
        "cluster.core_attention=cudnn or flash_attn_4, or remove the system's cuDNN from the loader's path",
        GITHUB + "pytorch/pytorch/issues/80637",
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
        GITHUB + "AMD-Ecosystem/flashinfer/pull/277",
    ),
    Rule(
        "aiter-backward",
        "warning",
        _aiter_backward,
        "this Transformer Engine carries an older libmha_bwd.so, whose functions replace AITER's: on gfx942 the "
        "backward pass of attention with head dimension 128 crashed (Primus v26.3)",
        "cluster.core_attention=sdpa, or an image with Transformer Engine 2.14 or newer",
        PRIMUS + "pull/764",
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
        PRIMUS + "blob/main/README.md",
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
        PRIMUS + "blob/main/docs/03-configuration-reference/environment-variables.md",
    ),
    Rule(
        "patch-range",
        "error",
        lambda facts: ", ".join(facts.unfit),
        "the code that they change may be different in this version; a run would stop before it begins",
        "install a version in the patch's range, listed below",
        GITHUB + "NVIDIA/Megatron-LM/releases",
    ),
    Rule(
        "dynamo-off",
        "warning",
        lambda facts: facts.archs and facts.variables("TORCHDYNAMO_DISABLE", value="1"),
        "the model's fused functions then run one operation at a time on an accelerator",
        "unset TORCHDYNAMO_DISABLE for runs on a GPU",
        GITHUB + "pytorch/pytorch/blob/v2.13.0/torch/_dynamo/eval_frame.py",
    ),
    Rule(
        "no-zaya-in-transformers",
        "warning",
        lambda facts: facts.older("transformers", "5.13"),
        "it has no ZAYA, so it cannot load an export (`zaya checkpoint export --verify` compares with it)",
        "only for exports: pip install 'transformers>=5.13' in an environment of its own; Primus pins an older one",
        GITHUB + "huggingface/transformers/pull/45862",
    ),
    Rule(
        "old-peft",
        "warning",
        lambda facts: (
            facts.versions.get("transformers")
            and not before(facts.versions["transformers"], "5.24")
            and (older := facts.older("peft", "0.22"))
            and f"{older} with transformers {facts.versions['transformers']}"
        ),
        "transformers 5.24 refuses adapters with a peft before 0.22, a release that PyPI did not have when 5.24 came "
        "out",
        "load adapters by peft.PeftModel.from_pretrained, or take transformers 5.23",
        GITHUB + "huggingface/transformers/issues/45405",
    ),
    Rule(
        "wandb-protobuf",
        "warning",
        lambda facts: (
            facts.versions.get("wandb") == "0.26.0"
            and (older := facts.older("protobuf", "6.32.1"))
            and f"wandb 0.26.0 with {older}"
        ),
        "import wandb raises VersionError: its generated code needs protobuf 6.32.1",
        "pip install 'wandb>=0.26.1', or logger=none",
        GITHUB + "wandb/wandb/issues/11758",
    ),
)

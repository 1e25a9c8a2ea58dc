# SPDX-License-Identifier: Apache-2.0
"""The versions of the operators that a recipe selects, core attention among them: they are chosen and checked before
the first step, compared among the ranks, and listed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence

import torch

import hip_ops
from hip_ops.runtime import operator
from hip_ops.runtime.choice import Versions
from hip_ops.runtime.model_sizes import ModelSizes, set_model_sizes
from hip_ops.runtime.operator import OPERATORS, report
from zaya_plugin.checkpoint.restore import gathered
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import mistake

logger = logging.getLogger(__name__)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of cluster.dtype
# Where ranks have different HIP libraries, cluster.kernels=triton makes them equal: Triton's versions do not use the
# library. Where they have different shipped objects or releases of Triton, cluster.kernels=reference does.
KERNELS_WITHOUT = {operator.LIBRARY: "triton", operator.OBJECTS: "reference", operator.TRITON: "reference"}
Choices = dict[str, tuple[str, ...]]  # by operator: the versions that run, best first


def select_kernels(recipe: Recipe) -> None:
    """Select versions by cluster.kernels and cluster.kernel_overrides. HIP_OPS_KERNELS, for scripts without a recipe,
    is not read. The self-checks get the sizes of a rank's model.
    """
    hip_ops.set_kernels(recipe.cluster.kernels, recipe.cluster.kernel_overrides, group="cluster.")
    set_model_sizes(model_sizes_of(recipe))


def model_sizes_of(recipe: Recipe) -> ModelSizes:
    """Return the sizes of one rank's part of the model that kernels depend on."""
    model, parallel = recipe.model, recipe.parallel
    tensor = parallel.tensor_model_parallel_size
    return ModelSizes(
        hidden_size=model.hidden_size,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        num_experts=model.num_experts // parallel.expert_model_parallel_size,
        classes=model.num_experts + 1,
        num_attention_heads=model.num_attention_heads // tensor,
        num_query_groups=model.num_query_groups // tensor,
    )


def warm_up_kernels(recipe: Recipe) -> str:
    """Build and check what this rank's kernels need, before the first step, and compare the choice with the other
    ranks'. It needs the process group; every rank must call it. Return a line with the seconds that it took.

    Raises:
        ValueError: ranks chose different versions, or a version that was requested by name is not available on one of
            them. All ranks raise.
    """
    started, chosen, failed = time.monotonic(), {}, ""
    try:
        chosen = _choices(recipe)
    except ValueError as error:  # raised below, on all ranks: the others would wait for this one in the exchange
        failed = str(error)
    seconds = time.monotonic() - started
    mine = chosen, failed, seconds
    everyone = gathered(mine) if torch.distributed.is_initialized() else [mine]
    for rank, (_, text, _) in enumerate(everyone):
        if text:
            raise ValueError(f"on rank {rank}: {text}" if len(everyone) > 1 else text)
    check_agreement([choices for choices, _, _ in everyone], recipe)
    line = f"kernels checked in {max(duration for _, _, duration in everyone):.1f} s"
    line += f", equal on {len(everyone)} ranks" if len(everyone) > 1 else ""
    logger.info("%s; on this rank in %.1f s", line, seconds)
    return line


def _choices(recipe: Recipe) -> Choices:
    device = _device(recipe)
    chosen = operator.running(device, [attention(recipe)])
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the examples' memory, before the model is built
    return chosen


def attention(recipe: Recipe) -> Versions:
    """Return core attention as the recipe's steps call it, for the heads of one rank."""
    from zaya_plugin.model.core_attention import core_attention  # imports Megatron, which a rank must patch before

    cluster, model, parallel = recipe.cluster, recipe.model, recipe.parallel
    form = "chunks" if parallel.context_parallel_size > 1 else "whole"
    if recipe.data.packing == "documents":
        form = "documents"
    ranks = parallel.tensor_model_parallel_size
    sizes = (model.num_attention_heads // ranks, model.num_query_groups // ranks, model.kv_channels)
    exact = torch.are_deterministic_algorithms_enabled()
    return core_attention(cluster.core_attention, form, DTYPES[cluster.dtype], *sizes, exact)


def check_agreement(everyone: Sequence[Choices], recipe: Recipe) -> None:
    """Compare the choices of all ranks, in their order. A rank that uses no Triton, for example, has no release of it.

    Raises:
        ValueError: they differ.
    """
    cluster, differences, fixes, torch_differs = recipe.cluster, [], {}, False
    operators = {**OPERATORS, "core_attention": attention(recipe)}
    for name in dict.fromkeys(name for choices in everyone for name in choices):
        ranks: dict[tuple[str, ...], list[int]] = {}
        for rank, choices in enumerate(everyone):
            if name in choices:
                ranks.setdefault(choices[name], []).append(rank)
        if len(ranks) == 1:
            continue
        texts = (f"{', then '.join(versions)} on {_ranks(of)}" for versions, of in ranks.items())
        differences.append(f"{name} ({'; '.join(texts)})")
        if len({"blocks" in versions for versions in ranks}) > 1:  # torch's choice by device, which no key makes
            torch_differs = True
            continue
        own = operators.get(name)  # None: a library
        key, version = ("kernels", KERNELS_WITHOUT[name]) if own is None else (own.setting, own.last)
        fixes[f"cluster.{key}"] = version
    if not differences:
        return
    key = "core_attention" if fixes.keys() <= {"cluster.core_attention"} else "kernels"
    references = fixes.get("cluster.kernels"), fixes.get("cluster.kernel_overrides.grouped_product")
    if "reference" in references and cluster.graphs != "none":
        fixes["cluster.graphs"] = "none"  # grouped_product's reference cannot be captured
    words = " ".join(f"{key}={version}" for key, version in fixes.items())
    if "cluster.kernels" in fixes:
        words = f"the same packages on all ranks, or {words}"
    if torch_differs:
        words = f"the same torch and devices on all ranks{', and ' + words if words else ''}"
    raise mistake(
        f"cluster.{key}",
        getattr(cluster, key),
        problem=f"ranks chose different versions: {', '.join(differences)}. The logs of these ranks say why",
        allowed="the same versions on all ranks",
        fix=words,
    )


def _ranks(ranks: Sequence[int]) -> str:
    """Write ascending ranks as `rank 1` or `ranks 0, 2-7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, run)) for run in runs)


def _device(recipe: Recipe) -> torch.device:
    on_cpu = recipe.cluster.device == "cpu"
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def kernel_lines(recipe: Recipe) -> list[str]:
    """Return a line for each operator: its version on this rank's device, and why. Empty on a CPU, where all versions
    are references.

    It builds and compares nothing, which `warm_up_kernels` does. A version that fails there is replaced with a warning.
    """
    if recipe.cluster.device == "cpu":
        return []
    lines = report(_device(recipe), check=False, others=[attention(recipe)])
    lines = ["kernels, each compared with its reference before the first step", *(f"  {line}" for line in lines)]
    if torch.version.cuda and recipe.cluster.core_attention in ("auto", "sdpa"):
        try:
            torch.backends.cudnn.version()
        except RuntimeError as error:
            lines.append(
                f"WARNING: torch's cuDNN does not fit ({str(error).splitlines()[0]}), so torch may choose a slower "
                "attention. Fix: cluster.core_attention=cudnn"
            )
    wants_fp32 = recipe.cluster.transformer_impl == "transformer_engine" and recipe.cluster.dtype == "fp32"
    if wants_fp32 and torch.version.cuda and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        lines.append(
            "WARNING: Transformer Engine's fp32 products are TF32. Fix: NVIDIA_TF32_OVERRIDE=0 in the environment"
        )
    return lines

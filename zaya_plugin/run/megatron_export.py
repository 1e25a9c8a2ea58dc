# SPDX-License-Identifier: Apache-2.0
"""`zaya export`: a recipe in the form that another host takes, and what that host will not do of it.

    zaya export megatron experiment=cpu_demo     -> <run_dir>/megatron.args, words for pretrain_gpt.py
    zaya export primus experiment=zaya1_base     -> <run_dir>/primus.yaml, an experiment for primus-cli

Beside it goes <run_dir>/recipe.yaml, where the guest (hosts/guest.py) finds what the host has no argument for.
"""

from __future__ import annotations

import copy
import os
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zaya_plugin.config.arguments import BATCH_ARGUMENTS, DECIDED_AT_START, OWN_ARGUMENTS, megatron_arguments
from zaya_plugin.config.run_directory import keep_recipe, make_writable
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import DataSources, find_sources
from zaya_plugin.run.rank_plan import rank_environment

SPEC = ("zaya_plugin.spec", "zaya_block")


def data_arguments(sources: DataSources) -> dict[str, Any]:
    """Megatron's arguments of the same samples that `zaya train` reads."""
    from zaya_plugin.data.prefixes import content_name, resolve_blend

    train, valid = resolve_blend(sources.train, "train"), resolve_blend(sources.valid, "valid")
    prefixes = sorted({prefix for blend in (train, valid) if blend for prefix in blend[0]})
    tokenizer = sources.tokenizer_arguments()
    if os.path.isdir(tokenizer["tokenizer_model"]):
        tokenizer["tokenizer_model"] = os.path.abspath(tokenizer["tokenizer_model"])
    return {
        **tokenizer,
        "train_data_path": _words(train),
        "valid_data_path": None if valid is None else _words(valid),
        "data_cache_path": os.path.abspath(os.path.join(sources.cache_path, content_name(prefixes))),
        "create_attention_mask_in_dataloader": False,
    }


def host_arguments(recipe: Recipe, sources: DataSources) -> dict[str, Any]:
    """What the host's parser is given: the run's arguments without ours, with data.

    Raises:
        ValueError: the recipe asks for what a host's own data sets or forward step cannot do.
    """
    if problems := list(_impossible(recipe)):
        raise ValueError("\n".join(problems))
    values = megatron_arguments(recipe, data_arguments(sources))
    for name in (*OWN_ARGUMENTS, *BATCH_ARGUMENTS, *DECIDED_AT_START):
        values.pop(name, None)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _impossible(recipe: Recipe) -> Iterator[str]:
    here = "a host that reads its own data and makes its own batches; `zaya train` does it"
    if recipe.data.packing != "none":
        yield f"data.packing = {recipe.data.packing}: allowed: none in {here}"
    if recipe.data.order != "megatron":
        yield f"data.order = {recipe.data.order}: allowed: megatron in {here}"
    if recipe.handover.first_sample:
        yield (
            f"handover.first_sample = {recipe.handover.first_sample}: allowed: 0 in {here}. It would read again what the stage "
            "before has read; give the stage other data"
        )
    if recipe.parallel.recompute_granularity == "auto":
        yield (
            "parallel.recompute_granularity = auto: allowed: null, full, selective in a host that makes a configuration of its own, which does "
            "not know permute"
        )
    if "permute" in recipe.parallel.recompute_modules:
        yield (
            f"parallel.recompute_modules = {recipe.parallel.recompute_modules}: allowed: core_attn, moe, layernorm in a host that makes a "
            "configuration of its own"
        )
    if recipe.parallel.context_parallel_size > 1 and recipe.parallel.context_parallel_order != "zigzag":
        yield f"parallel.context_parallel_order = {recipe.parallel.context_parallel_order}: allowed: zigzag in {here}"


def left_out(recipe: Recipe) -> list[str]:
    """Keys whose value the host's own loop does not carry out, each with what happens instead."""
    notes = []
    if recipe.stage.eval_at_start:
        notes.append("stage.eval_at_start: validation comes after steps only, and each reads further samples")
    if recipe.handover.planned_samples:
        notes.append("handover.planned_samples: the order of the data is made for this stage alone")
    if recipe.logger.wandb or recipe.logger.tensorboard:
        notes.append(
            "logger: the host logs; no metrics.jsonl, router statistics or MFU. W&B: --wandb-project and its kin"
        )
    if recipe.parallel.nccl_ub:
        notes.append(
            "parallel.nccl_ub: the host's own end, at which NCCL may complain of buffers that are still registered"
        )
    if recipe.resume == "must":
        notes.append("resume=must: as auto")
    return notes


def placed(recipe: Recipe) -> Recipe:
    """A copy with absolute paths, since a host starts in a directory of its own."""
    recipe = copy.deepcopy(recipe)
    recipe.run_dir = os.path.abspath(recipe.run_dir)
    if recipe.handover.from_run is not None:
        recipe.handover.from_run = os.path.abspath(recipe.handover.from_run)
    data = recipe.data
    data.path = os.path.abspath(data.path)
    for name in ("valid_path", "cache_path"):
        if getattr(data, name) is not None:
            setattr(data, name, os.path.abspath(getattr(data, name)))
    if data.tokenizer is not None and os.path.exists(data.tokenizer):  # else the name of one
        data.tokenizer = os.path.abspath(data.tokenizer)
    for name in ("blend", "valid_blend", "consumed"):  # '<number> <path>'
        pairs = [entry.strip().partition(" ") for entry in getattr(data, name)]
        setattr(data, name, [f"{number} {os.path.abspath(path.strip())}" for number, _, path in pairs])
    return recipe


def export_megatron(recipe: Recipe) -> Path:
    """Writes megatron.args and recipe.yaml to the run directory; returns the path of the former. Imports Megatron."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Megatron falls back to without Transformer Engine
        from zaya_plugin.hosts.command_line import command_line

    recipe = placed(recipe)
    lines = [["--spec", *SPEC], *command_line(host_arguments(recipe, find_sources(recipe)))]
    return write(recipe, "megatron.args", "".join(shlex.join(words) + "\n" for words in lines))


def instructions(recipe: Recipe, world_size: int, path: Path) -> str:
    """How to start what `export_megatron` wrote, and what of the recipe will not happen."""
    nodes = recipe.cluster.num_nodes
    here = min(world_size, recipe.cluster.gpus_per_node) if nodes > 1 else world_size
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint <first host>:29500 " if nodes > 1 else ""
    lines = [f"# written: {path} and {path.with_name('recipe.yaml')}"]
    lines += [f"# not done there: {note}" for note in left_out(recipe)]
    lines.append("# in a Megatron-LM checkout" + (", on every node:" if nodes > 1 else ":"))
    lines += [
        f"export {name}={shlex.quote(value)}" for name, value in sorted(rank_environment(recipe, here, {}).items())
    ]
    lines.append(f"xargs -a {shlex.quote(str(path))} torchrun {several}--nproc-per-node {here} pretrain_gpt.py")
    return "\n".join(lines)


def write(recipe: Recipe, name: str, text: str) -> Path:
    """`text` as <run_dir>/name, and the recipe beside it; returns the path of the former."""
    make_writable(recipe.run_dir)
    keep_recipe(recipe, recipe.run_dir)
    path = Path(recipe.run_dir) / name
    path.write_text(text)
    return path


def _words(blend: tuple[list[str], list[float] | None]) -> list[str]:
    prefixes, weights = blend
    if weights is None:
        return [os.path.abspath(prefix) for prefix in prefixes]
    return [
        word
        for weight, prefix in zip(weights, prefixes, strict=True)
        for word in (repr(weight), os.path.abspath(prefix))
    ]

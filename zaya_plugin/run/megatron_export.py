# SPDX-License-Identifier: Apache-2.0
"""`zaya export megatron`: a recipe as words for pretrain_gpt.py, and the parts that the export for Primus shares.

The guest (hosts/guest.py) reads <run_dir>/recipe.yaml, written with the words, for the values that the host has no
argument for.
"""

import copy
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zaya_plugin.config.arguments import DECIDED_AT_START, OWN_ARGUMENTS, arguments_with_event_files
from zaya_plugin.config.entries import parse_blend
from zaya_plugin.config.messages import require
from zaya_plugin.config.run_directory import keep_recipe, make_writable
from zaya_plugin.config.schema import CheckpointConfig, Recipe
from zaya_plugin.data.ledger import parse_ledger
from zaya_plugin.data.sources import DataSources, find_sources
from zaya_plugin.ground.errors import mistake
from zaya_plugin.run.rank_plan import rank_environment

SPEC = ("zaya_plugin.spec", "zaya_block")


def data_arguments(sources: DataSources) -> dict[str, Any]:
    """Return Megatron's arguments for the same samples that `zaya train` reads."""
    from zaya_plugin.data.blend import content_name, resolve_blend

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
    """Return the words for the host's parser: the run's arguments without this plugin's, with those of the data.

    Raises:
        ValueError: the recipe needs something that a host's own data sets or forward step do not support.
    """
    if problems := list(_impossible(recipe)):
        raise ValueError("\n".join(problems))
    values = arguments_with_event_files(recipe, data_arguments(sources))
    for name in (*OWN_ARGUMENTS, *DECIDED_AT_START):
        values.pop(name, None)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _impossible(recipe: Recipe) -> Iterator[str]:
    own_data, own_configuration = "a host that reads its own data", "a host that makes its own configuration"
    data, parallel, first = recipe.data, recipe.parallel, recipe.handover.first_sample
    modules = parallel.recompute_modules
    for key, value, impossible, host, allowed, fix in (
        ("data.packing", data.packing, data.packing != "none", own_data, "none", "data.packing=none"),
        ("data.order", data.order, data.order != "megatron", own_data, "megatron", "data.order=megatron"),
        ("optim.lora.rank", recipe.optim.lora.rank, recipe.optim.lora.rank, own_configuration, "null", "zaya train"),
        # the host would read again what the previous stage has read
        ("handover.first_sample", first, first, own_data, "0", "give the stage other data than the previous stage"),
        (
            "parallel.recompute_granularity",
            parallel.recompute_granularity,
            parallel.recompute_granularity == "auto",
            own_configuration,
            "null, full, selective",
            "parallel.recompute_granularity=full",
        ),
        (
            "parallel.recompute_modules",
            modules,
            "permute" in modules,
            own_configuration,
            "core_attn, moe, layernorm",
            "leave permute out",
        ),
        (
            "parallel.context_parallel_order",
            parallel.context_parallel_order,
            parallel.context_parallel_size > 1 and parallel.context_parallel_order != "zigzag",
            own_data,
            "zigzag",
            "parallel.context_parallel_order=zigzag",
        ),
    ):
        problem = f"is not available in {host}; `zaya train` supports it"
        yield from require(not impossible, key, value, problem=problem, allowed=allowed, fix=fix)


def left_out(recipe: Recipe) -> list[str]:
    """Return the keys that the host's own loop ignores, each with its consequence."""
    notes = (
        (
            recipe.stage.eval_at_start,
            "stage.eval_at_start: validation runs after steps only, and each validation reads further samples",
        ),
        (
            recipe.stage.record_routing or recipe.stage.replay_routing,
            "stage.record_routing, stage.replay_routing: the host reads neither",
        ),
        (recipe.stage.sample_prompts, "stage.sample_prompts: no text is written while it trains"),
        (
            recipe.handover.planned_samples,
            "handover.planned_samples: the order of the data is made for this stage alone",
        ),
        (
            recipe.logger.wandb or recipe.logger.tensorboard,
            "logger: the host logs; no metrics.jsonl, router statistics or MFU. W&B: --wandb-project and related "
            "options",
        ),
        (
            recipe.parallel.nccl_ub,
            "parallel.nccl_ub: at the host's own end NCCL may report buffers that are still registered",
        ),
        (recipe.resume == "must", "resume=must: as auto"),
        (recipe.checkpoint.local_path, "checkpoint.local_path: checkpoints are written to --save at once"),
    )
    return [note for applies, note in notes if applies]


def placed(recipe: Recipe) -> Recipe:
    """Return a copy with absolute paths, since a host starts in another directory.

    Raises:
        ValueError: the checkpoints are not in the run directory, where a host reads the recipe.
    """
    recipe = copy.deepcopy(recipe)
    if recipe.checkpoint.path != CheckpointConfig.path:
        raise mistake(
            "checkpoint.path",
            recipe.checkpoint.path,
            problem="is not available in a host, which reads the recipe from the parent folder of its checkpoints; "
            "`zaya train` supports it",
            allowed=CheckpointConfig.path,
            fix=f"checkpoint.path={CheckpointConfig.path}",
        )
    recipe.run_dir = os.path.abspath(recipe.run_dir)
    if recipe.handover.from_run is not None:
        recipe.handover.from_run = os.path.abspath(recipe.handover.from_run)
    if recipe.handover.from_hf is not None and os.path.isdir(recipe.handover.from_hf):  # else a name
        recipe.handover.from_hf = os.path.abspath(recipe.handover.from_hf)
    data = recipe.data
    data.path = os.path.abspath(data.path)
    for name in ("valid_path", "cache_path"):
        if getattr(data, name) is not None:
            setattr(data, name, os.path.abspath(getattr(data, name)))
    if data.tokenizer is not None and os.path.exists(data.tokenizer):  # else a name
        data.tokenizer = os.path.abspath(data.tokenizer)
    for name in ("blend", "valid_blend"):
        entries = parse_blend(getattr(data, name), f"data.{name}")
        weights = ["" if entry.weight is None else f"{entry.weight!r} " for entry in entries]
        placed_entries = zip(weights, entries, strict=True)
        setattr(data, name, [weight + os.path.abspath(entry.path) for weight, entry in placed_entries])
    data.consumed = [f"{tokens} {path}" for path, tokens in parse_ledger(data.consumed).items()]
    return recipe


def export_megatron(recipe: Recipe) -> Path:
    """Write megatron.args and recipe.yaml to the run directory and return the path of the former."""
    recipe = placed(recipe)
    lines = [["--spec", *SPEC], *_command_line(host_arguments(recipe, find_sources(recipe)))]
    return write(recipe, "megatron.args", "".join(shlex.join(words) + "\n" for words in lines))


def _command_line(values: dict[str, Any]) -> list[list[str]]:
    """Return the words for `values`, by the parser of the installed Megatron."""
    # ignored: warnings about Megatron's fallbacks without Transformer Engine
    command = [sys.executable, "-W", "ignore", "-m", "zaya_plugin.hosts.command_line"]
    done = subprocess.run(command, input=json.dumps(values), stdout=subprocess.PIPE, text=True)
    answer = done.stdout.strip().rpartition("\n")[2]
    if done.returncode == 2:
        raise ValueError(answer)
    done.check_returncode()
    return json.loads(answer)


def instructions(recipe: Recipe, world_size: int, path: Path) -> str:
    """Return the commands that start what `export_megatron` wrote, and the settings that the host ignores."""
    nodes, local_ranks = recipe.cluster.num_nodes, ranks_of_node(recipe, world_size)
    several = f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint <first host>:29500 " if nodes > 1 else ""
    variables = sorted(rank_environment(recipe, local_ranks, {}).items())
    return "\n".join(
        (
            *written(path, left_out(recipe)),
            "# in a Megatron-LM checkout" + (", on every node:" if nodes > 1 else ":"),
            *(f"export {name}={shlex.quote(value)}" for name, value in variables),
            f"xargs -a {shlex.quote(str(path))} torchrun {several}--nproc-per-node {local_ranks} pretrain_gpt.py",
        )
    )


def ranks_of_node(recipe: Recipe, world_size: int) -> int:
    """Return the ranks of one node."""
    return min(world_size, recipe.cluster.gpus_per_node) if recipe.cluster.num_nodes > 1 else world_size


def written(path: Path, notes: list[str]) -> list[str]:
    """Return the comment lines that name the files written with `path`, and `notes` on ignored settings."""
    return [
        f"# written: {path} and {path.with_name('recipe.yaml')}",
        *(f"# ignored by the host: {note}" for note in notes),
    ]


def write(recipe: Recipe, name: str, text: str) -> Path:
    """Write `text` to <run_dir>/name and the recipe to <run_dir>/recipe.yaml; return the path of the former."""
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

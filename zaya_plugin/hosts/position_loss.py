# SPDX-License-Identifier: Apache-2.0
"""Compare two stages' models by the loss at each position on the same validation text, to show the use of the longer
context.

`python -m zaya_plugin.hosts.position_loss <run of the shorter stage> <run of the longer stage>` does it in one process;
zaya_plugin/run/curriculum_run.py starts that with the environment of the recipe. Both models read sequences of the
longer stage's length, each with its own RoPE base.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from zaya_plugin import patches
from zaya_plugin.checkpoint import on_disk, reading
from zaya_plugin.config.run_directory import checkpoints_of
from zaya_plugin.config.schema import Recipe
from zaya_plugin.errors import mistake

SEQUENCES = 16
RESULT = "loss_by_position.json"


def main(argv: list[str]) -> int:
    """Run the comparison in this process; return 0 if the longer stage's model is better past the shorter context, else
    1.
    """
    from zaya_plugin.config.compose import load_recipe

    runs = [Path(run) for run in argv]
    recipes = [load_recipe(run / "recipe.yaml") for run in runs]
    with contextlib.ExitStack() as quiet:
        out = sys.stderr if os.environ.get("ZAYA_TRACEBACK") == "1" else quiet.enter_context(open(os.devnull, "w"))
        quiet.enter_context(contextlib.redirect_stdout(out))
        by_position = losses_by_position(runs, recipes)
    short, long = (recipe.stage.seq_length for recipe in recipes)
    result = {
        "sequences": len(by_position[0]),
        "stages": [recipe.stage.name for recipe in recipes],
        "rows": [(start, end, *means(by_position, start, end)) for start, end in ranges(short, long)],
        "beyond": means(by_position, short, long),
    }
    better = result["beyond"][1] < result["beyond"][0]
    for line in table(result, short, long, better):
        print(line)
    (runs[1] / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if better else 1


def ranges(short: int, long: int) -> list[tuple[int, int]]:
    """Return ranges of positions [start, end): the shorter context, then each twice as long up to the longer
    context.
    """
    edges = [0, short]
    while edges[-1] < long:
        edges.append(min(2 * edges[-1], long))
    return list(zip(edges, edges[1:], strict=False))


def means(by_position, start: int, end: int) -> list[float]:
    """Return the mean loss of each model over positions [start, end)."""
    return [loss[:, start:end].mean().item() for loss in by_position]


def table(result: dict, short: int, long: int, better: bool) -> Iterator[str]:
    """Yield the lines to print. better: the longer stage's model has the lower loss past the shorter context."""
    yield f"loss by position, nats a token, {result['sequences']} sequences of {long} validation tokens"
    yield f"{'positions':>14}  " + "  ".join(f"{name:>16}" for name in result["stages"])
    for start, end, *values in result["rows"]:
        yield f"{f'{start}-{end - 1}':>14}  " + "  ".join(f"{value:>16.4f}" for value in values)
    before, after = result["beyond"]
    yield f"past {short} tokens: {after:.4f} against {before:.4f}, {'below' if better else 'NOT below'}"


def losses_by_position(runs: Sequence[Path], recipes) -> list:
    """Return the losses, fp32 [n, s], of the shorter and of the longer stage's model on the same sequences of the
    longer stage's length.
    """
    patches.apply()
    tokens = validation_tokens(recipes[-1], SEQUENCES)
    args = arguments(recipes[-1], runs[-1])
    return [losses_of(run, args, recipe.stage.rotary_base, tokens) for run, recipe in zip(runs, recipes, strict=True)]


def validation_tokens(recipe: Recipe, sequences: int) -> torch.Tensor:
    """Return tokens of the validation data, int64 [at most `sequences`, seq_length + 1], spread evenly over it, with
    documents one after another.
    """
    from zaya_plugin.data.blend import resolve_blend
    from zaya_plugin.data.indexed_dataset import IndexedReader, spread
    from zaya_plugin.data.sources import find_sources

    with_validation = replace(recipe, stage=replace(recipe.stage, eval_iters=recipe.stage.eval_iters or 1))
    prefix = resolve_blend(find_sources(with_validation).valid, "valid")[0][0]
    stored, length = IndexedReader(prefix).stream, recipe.stage.seq_length + 1
    count = len(stored) // length
    if count == 0:
        raise mistake(
            f"{prefix}.bin",
            problem=f"it holds {len(stored)} tokens, fewer than one sequence",
            allowed=f"at least {length} tokens",
            fix="more validation data",
        )
    rows = stored[: count * length].reshape(count, length)
    return torch.from_numpy(rows[spread(count, sequences)].astype(numpy.int64))


def arguments(recipe: Recipe, run: Path):
    """Return Megatron's arguments of `recipe`'s model in one process, for both stages: their models differ only in
    RoPE's base.
    """
    from zaya_plugin.config.arguments import megatron_arguments
    from zaya_plugin.config.schema import ParallelConfig
    from zaya_plugin.hosts.stage_model import arguments_of_model

    directory = checkpoints_of(run)
    vocabulary = on_disk.saved_arguments(directory, on_disk.latest(directory)[0]).padded_vocab_size
    alone = replace(
        recipe,
        parallel=ParallelConfig(),
        stage=replace(recipe.stage, batch_size_ramp=None),
        handover=replace(recipe.handover, from_run=None),
    )
    args = arguments_of_model(megatron_arguments(alone, {"tokenizer_type": "NullTokenizer", "vocab_size": vocabulary}))
    args.padded_vocab_size = vocabulary
    return args


def losses_of(run: Path, args, rotary_base: int, tokens):
    """Return the loss of every position of `tokens` [n, s + 1] under the model of `run`'s newest checkpoint; fp32 [n,
    s].
    """
    from megatron.core import dist_checkpointing

    from zaya_plugin.hosts import stage_model

    checkpoint = reading.begin(run, key="RUN")
    stage_model.begin_alone(args.seed)
    model = stage_model.build_model(args, rotary_base=rotary_base).eval()
    if not args.use_cpu_initialization:
        model.cuda()
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load(dict(wanted), str(checkpoint.folder))
    model.load_state_dict({name: loaded[name] for name in wanted})  # the loaded dict also has the run's own record
    device = next(model.parameters()).device
    losses = []
    with torch.no_grad():
        for row in tokens.to(device).split(1):
            positions = torch.arange(row.shape[1] - 1, device=device)[None]
            losses.append(model(row[:, :-1], positions, None, labels=row[:, 1:]).float().cpu())
    return torch.cat(losses)


if __name__ == "__main__":
    patches.apply_torch()
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Loss by position in the sequence of two stages' models on the same validation text: what the longer context was good for.

`python -m zaya_plugin.training.position_loss <run of the shorter stage> <run of the longer stage>` does it in one process;
`compare` starts that with the environment of the recipe. Both models read sequences of the longer stage's length, each with
its own RoPE base.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SEQUENCES = 16
RESULT = "loss_by_position.json"


def compare(short_run: Path, long_run: Path) -> int:
    """Prints the comparison, writes it to <long_run>/loss_by_position.json, and returns the exit code of the process that does it:
    1 where the longer stage's model is not the better one past the shorter context."""
    from zaya_plugin.config.compose import load_recipe
    from zaya_plugin.training.launch import rank_environment
    from zaya_plugin.training.rank_failure import last_words

    recipe = load_recipe(Path(long_run) / "recipe.yaml")
    (Path(long_run) / RESULT).unlink(missing_ok=True)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **rank_environment(recipe, 1, os.environ), **alone}
    command = [sys.executable, "-m", "zaya_plugin.training.position_loss", str(short_run), str(long_run)]
    log = Path(long_run) / "logs" / "position_loss.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "w") as stderr:
        code = subprocess.run(command, env=environment, stderr=stderr).returncode
    if not (Path(long_run) / RESULT).is_file():
        print(f"zaya: loss by position failed:\n{last_words(log.read_text())}\nzaya: everything that it wrote: {log}", file=sys.stderr)
        return code or 1
    return code


def main(argv: list[str]) -> int:
    """The comparison in this process."""
    import contextlib

    from zaya_plugin.config.compose import load_recipe

    runs = [Path(run) for run in argv]
    recipes = [load_recipe(run / "recipe.yaml") for run in runs]
    short, long = (recipe.stage.seq_length for recipe in recipes)
    with contextlib.redirect_stdout(sys.stderr if os.environ.get("ZAYA_TRACEBACK") else open(os.devnull, "w")):
        from zaya_plugin import patches

        patches.apply()
        tokens = validation_tokens(recipes[-1], SEQUENCES)
        args = arguments(recipes[-1], runs[-1])
        bases = [recipe.stage.rotary_base for recipe in recipes]
        by_position = [losses_of(run, args, base, tokens) for run, base in zip(runs, bases, strict=True)]
    rows = []
    edges = [0, short]
    while edges[-1] < long:
        edges.append(min(2 * edges[-1], long))
    for start, end in zip(edges, edges[1:], strict=False):
        rows.append((start, end, *(loss[:, start:end].mean().item() for loss in by_position)))
    beyond = [loss[:, short:].mean().item() for loss in by_position]
    names = [recipe.stage.name for recipe in recipes]
    print(f"loss by position, nats a token, {len(tokens)} sequences of {long} validation tokens")
    print(f"{'positions':>14}  {names[0]:>16}  {names[1]:>16}")
    for start, end, *values in rows:
        print(f"{f'{start}-{end - 1}':>14}  " + "  ".join(f"{value:>16.4f}" for value in values))
    better = beyond[1] < beyond[0]
    print(f"past {short} tokens: {beyond[1]:.4f} against {beyond[0]:.4f}, {'below' if better else 'NOT below'}")
    result = {"sequences": len(tokens), "stages": names, "rows": rows, "beyond": beyond}
    (runs[1] / RESULT).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if better else 1


def validation_tokens(recipe, sequences: int):
    """The first tokens of the validation data as int64 [sequences or fewer, seq_length + 1], documents as they follow each other."""
    import numpy
    import torch

    from zaya_plugin.data.dataset import locate, resolve_blend
    from zaya_plugin.training.datasets import find_sources

    recipe.stage.eval_iters = recipe.stage.eval_iters or 1
    prefix = resolve_blend(find_sources(recipe).valid, "valid")[0][0]
    manifest = locate(recipe.data.path)[0]
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dtype = numpy.dtype(manifest.dtype) if manifest is not None else IndexedDataset(prefix).index.dtype
    stored = numpy.memmap(prefix + ".bin", dtype=dtype, mode="r")
    length = recipe.stage.seq_length + 1
    count = min(sequences, len(stored) // length)
    if count == 0:
        raise ValueError(f"{prefix}.bin holds {len(stored)} tokens, fewer than a sequence of {length}")
    return torch.from_numpy(stored[: count * length].astype(numpy.int64).reshape(count, length))


def arguments(recipe, run: Path):
    """Megatron's arguments of `recipe`'s model in one process; they go for both stages, whose models differ in RoPE's base alone."""
    from zaya_plugin.checkpoint import inspect
    from zaya_plugin.config.schema import ParallelConfig
    from zaya_plugin.training.adapter import parse_arguments
    from zaya_plugin.training.arguments import megatron_arguments

    vocabulary = inspect.saved_arguments(run / "checkpoints", inspect.latest(run / "checkpoints")).padded_vocab_size
    recipe.parallel = ParallelConfig()
    recipe.stage.batch_size_ramp, recipe.handover.from_run = None, None
    values = megatron_arguments(recipe, {"tokenizer_type": "NullTokenizer", "vocab_size": vocabulary})
    for name in ("save", "save_interval", "load", "exit_on_missing_checkpoint", "tensorboard_dir"):
        values.pop(name, None)
    args = parse_arguments(values)
    args.padded_vocab_size = vocabulary
    return args


def losses_of(run: Path, args, rotary_base: int, tokens):
    """Loss of every position of `tokens` [n, s + 1] under the model in `run`'s newest checkpoint; fp32 [n, s]."""
    import torch

    model = load_model(run, args, rotary_base).eval()
    device = next(model.parameters()).device
    losses = []
    with torch.no_grad():
        for row in tokens.to(device).split(1):
            positions = torch.arange(row.shape[1] - 1, device=device)[None]
            losses.append(model(row[:, :-1], positions, None, labels=row[:, 1:]).float().cpu())
    return torch.cat(losses)


def load_model(run: Path, args, rotary_base: int):
    """The model of `run`'s newest checkpoint on one device."""
    import torch
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from zaya_plugin.checkpoint import inspect
    from zaya_plugin.model.build import build_zaya_model
    from zaya_plugin.training.adapter import model_config

    directory = run / "checkpoints"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(args.seed, force_reset_rng=True)
    model = build_zaya_model(
        model_config(args),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.seq_length,
        rotary_base=rotary_base,
        rotary_percent=args.rotary_percent,
    )
    if not args.use_cpu_initialization:
        model.cuda()
    wanted = model.sharded_state_dict()
    loaded = dist_checkpointing.load(dict(wanted), str(inspect.folder(directory, inspect.latest(directory))))
    model.load_state_dict({name: loaded[name] for name in wanted})  # beside these it brings the run's own record
    return model


if __name__ == "__main__":
    from zaya_plugin import patches

    patches.apply_torch()
    sys.exit(main(sys.argv[1:]))

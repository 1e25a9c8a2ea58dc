# SPDX-License-Identifier: Apache-2.0
"""Perplexity on prepared data: exp of the mean loss, computed by the model's own head and loss as in validation; and
two stages' models compared by the loss at each position, to show the use of the longer context.

`python -m zaya_plugin.inference.perplexity <run of the shorter stage> <run of the longer stage>` compares in one
process, on sequences of the longer stage's length; zaya_plugin/run/curriculum_run.py starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from torch import Tensor

from zaya_plugin import patches
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.blend import resolve_blend
from zaya_plugin.data.indexed_dataset import IndexedReader, spread
from zaya_plugin.data.prepared import (
    check_dataset,
    document_ends,
    holds_chats,
    locate,
    marks_of,
    packed_length,
    packed_loss_mask,
    prefix_of,
)
from zaya_plugin.data.routed_experts import write_sequences
from zaya_plugin.data.sources import find_sources
from zaya_plugin.data.tokenizer import added_tokens, open_tokenizer
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.progress import bar
from zaya_plugin.inference.opening import GIB, Opened, find_model, open_model
from zaya_plugin.parallel.packed_documents import PackedDocuments

COMPARED_SEQUENCES = 16
POSITIONS_FILE = "loss_by_position.json"


@dataclass(frozen=True)
class Rows:
    """A dataset in rows of `length` tokens, and the token that the last of them predicts.

    stream: all tokens, of which rows share one at their ends, so that each but the first is predicted once; the last
    row may be shorter. Documents follow each other, as in training.
    packed: rows are bins, whose last token predicts nothing: it is repeated.
    marks: uint8, of chats; None for other data.
    """

    stream: numpy.ndarray
    length: int
    packed: bool = False
    marks: numpy.ndarray | None = None

    def __len__(self) -> int:
        return -(-max(0, len(self.stream) - 1 + self.packed) // self.length)

    def row(self, number: int) -> tuple[numpy.ndarray, numpy.ndarray | None]:
        """Return tokens int64 [length + 1] and their marks."""
        parts = []
        for stored in (self.stream, self.marks):
            part = None if stored is None else stored[number * self.length :][: self.length + 1 - self.packed]
            parts.append(numpy.append(part, part[-1]) if self.packed and part is not None else part)
        return parts[0].astype(numpy.int64), parts[1]

    def batches(self, size: int, numbers: Iterable[int]) -> Iterator[tuple[Tensor, numpy.ndarray | None]]:
        """Yield rows of equal length together: tokens int64 [at most size, s + 1], and their marks."""
        for _, same_length in itertools.groupby(map(self.row, numbers), key=lambda row: len(row[0])):
            while batch := list(itertools.islice(same_length, size)):
                tokens, marks = zip(*batch, strict=True)
                yield torch.from_numpy(numpy.stack(tokens)), None if self.marks is None else numpy.stack(marks)


@torch.no_grad()
def summed_loss(
    model,
    rows: Tensor,
    *,
    eod: int | None = None,
    reset_positions: bool = False,
    packed: bool = False,
    marks: numpy.ndarray | None = None,
) -> tuple[float, int]:
    """Return the sum of the losses (nats) of rows int64 [b, s + 1], and the number of predicted tokens.

    Args:
        eod: the token that ends a document, to compute each document by itself; None: they attend to each other.
        reset_positions: RoPE counts from the start of each document.
        packed: rows are bins; a document's first token and filling are not in the loss.
        marks: of chats, uint8 [b, s + 1]: where documents end, and the answers, which alone are in the loss.
    """
    documents, whole = None, rows.numpy()
    device = next(model.parameters()).device
    if eod is not None:
        ends = torch.from_numpy(document_ends(whole, eod, marks)[:, :-1]).to(device)
        documents = PackedDocuments.from_ends(ends, reset_positions=reset_positions)
    losses = token_losses(model, rows[:, :-1], rows[:, 1:], documents).double()
    if not packed and marks is None:
        return losses.sum().item(), losses.numel()
    width = whole.shape[1] - packed
    mask = packed_loss_mask(whole[:, :width], eod, None if marks is None else marks[:, :width])
    mask = torch.from_numpy(mask[:, : losses.shape[1]].copy()).to(device)
    return losses[mask].sum().item(), int(mask.sum())


def perplexity(
    opened: Opened, name: str, path: str, batch_size: int, limit: int | None, routed_experts: Path | None = None
) -> dict:
    """Return perplexity, loss (nats a token) and tokens of the held-out part of a dataset, or of all of it without one.

    name: in the progress bar. limit: sequences to read, spread over the dataset; None: all. routed_experts: file for
    the classes that the routers choose for the sequences' tokens; requires `opened.routed`.

    Raises:
        ValueError: there is no dataset, or its tokens are not of this model's vocabulary.
    """
    table, arguments = opened.described.vocab_size, opened.arguments
    check_dataset(path, table)
    manifest, splits = locate(path)
    prefix = prefix_of(path, "valid") if len(splits) > 1 else next(iter(splits.values()))
    _check_tokenizer(opened, path, manifest)
    length, packed, marks = packed_length(path), packed_length(path) is not None, marks_of(prefix)
    length = length or getattr(arguments, "seq_length", None) or opened.described.max_position_embeddings
    separate = packed or marks is not None or getattr(arguments, "packing", None) == "documents"
    eod = manifest.tokenizer.eod_id if manifest is not None else next(iter(opened.stop), None)
    if separate and eod is None:
        raise mistake(path, problem="no token is known that ends its documents", fix="--tokenizer FOLDER")
    reset = separate and bool(getattr(arguments, "reset_position_ids", False))
    rows = Rows(IndexedReader(prefix).stream, length, packed, marks)
    numbers = spread(len(rows), limit)
    rows_at_once = min(batch_size, len(numbers))
    needed, free = opened.bytes_of_pass(rows_at_once, length), opened.free_memory()
    if needed > free:
        raise mistake(
            "--batch-size",
            batch_size,
            problem=f"the weights and a pass over {rows_at_once} sequences of {length} tokens need {needed / GIB:,.2f} "
            f"GiB or more, and {free / GIB:,.2f} GiB of memory are free",
            allowed="what fits into the memory",
            fix="a smaller --batch-size",
        )
    print(f"{name}: {len(numbers):,} of {len(rows):,} sequences of {length} tokens", file=sys.stderr)
    total, count = 0.0, 0
    routed: list[tuple[list[int], numpy.ndarray]] = []
    with bar(name, len(numbers), " sequences") as shown:
        for batch, of_chats in rows.batches(batch_size, numbers):
            with opened.decoder.choices_kept():
                loss, tokens = summed_loss(
                    opened.decoder.model,
                    batch,
                    eod=eod if separate else None,
                    reset_positions=reset,
                    packed=packed,
                    marks=of_chats,
                )
            total, count = total + loss, count + tokens
            if opened.routed:
                inputs = enumerate(batch[:, :-1].tolist())
                routed += [(row, opened.decoder.routed_experts(number, len(row), 1)) for number, row in inputs]
                opened.decoder.chosen.clear()
            shown.update(len(batch))
    if routed_experts is not None:
        write_sequences(routed_experts, routed)
    if not count:
        raise mistake(path, problem="holds no token that can be predicted", allowed="at least two tokens")
    mean = total / count
    return {"perplexity": math.exp(mean) if mean < 700 else math.inf, "loss": mean, "tokens": count}


def main(argv: list[str]) -> int:
    """Compare the models of two runs by position. Return 0 if the longer stage's model is better past the shorter
    context, else 1.
    """
    runs = [Path(run) for run in argv]
    recipes = [load_recipe(run / "recipe.yaml") for run in runs]
    with contextlib.ExitStack() as quiet:
        out = sys.stderr if os.environ.get("ZAYA_TRACEBACK") == "1" else quiet.enter_context(open(os.devnull, "w"))
        quiet.enter_context(contextlib.redirect_stdout(out))
        tokens = validation_tokens(recipes[-1], COMPARED_SEQUENCES)
        by_position = [losses_by_position(run, recipes[-1], tokens) for run in runs]
    short, long = (recipe.stage.seq_length for recipe in recipes)
    result = {
        "sequences": len(tokens),
        "stages": [recipe.stage.name for recipe in recipes],
        "rows": [(start, end, *means(by_position, start, end)) for start, end in ranges(short, long)],
        "beyond": means(by_position, short, long),
    }
    better = result["beyond"][1] < result["beyond"][0]
    for line in position_table(result, short, long, better):
        print(line)
    (runs[1] / POSITIONS_FILE).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if better else 1


def validation_tokens(recipe: Recipe, sequences: int) -> Tensor:
    """Return tokens of the validation data, int64 [at most `sequences`, seq_length + 1], spread evenly over it, with
    documents one after another.
    """
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


@torch.no_grad()
def losses_by_position(run: Path, recipe: Recipe, tokens: Tensor) -> Tensor:
    """Return the loss of every position of `tokens` [n, s + 1] under the model of `run`'s newest checkpoint, with its
    own RoPE base; fp32 [n, s]. recipe: names the device.
    """
    options = argparse.Namespace(
        model=str(run), step=None, tokenizer=None, verify=True, device=recipe.cluster.device, dtype=None
    )
    model = open_model(options, find_model(options), needs_tokenizer=False).load(lambda count: None)
    losses = []
    with bar(run.name, len(tokens), " sequences") as shown:
        for row in tokens.split(1):
            losses.append(token_losses(model, row[:, :-1], row[:, 1:]).float().cpu())
            shown.update()
    return torch.cat(losses)


def token_losses(model, tokens: Tensor, labels: Tensor, documents: PackedDocuments | None = None) -> Tensor:
    """Return the loss of every token, [b, s]."""
    tokens, labels = (part.contiguous().to(next(model.parameters()).device) for part in (tokens, labels))
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, None, labels=labels, packed_seq_params=documents)


def ranges(short: int, long: int) -> list[tuple[int, int]]:
    """Return ranges of positions [start, end): the shorter context, then each twice as long up to the longer
    context.
    """
    edges = [0, short]
    while edges[-1] < long:
        edges.append(min(2 * edges[-1], long))
    return list(zip(edges, edges[1:], strict=False))


def means(by_position: Sequence[Tensor], start: int, end: int) -> list[float]:
    """Return the mean loss of each model over positions [start, end)."""
    return [loss[:, start:end].mean().item() for loss in by_position]


def position_table(result: dict, short: int, long: int, better: bool) -> Iterator[str]:
    """Yield the lines to print. better: the longer stage's model has the lower loss past the shorter context."""
    yield f"loss by position, nats a token, {result['sequences']} sequences of {long} validation tokens"
    yield f"{'positions':>14}  " + "  ".join(f"{name:>16}" for name in result["stages"])
    for start, end, *values in result["rows"]:
        yield f"{f'{start}-{end - 1}':>14}  " + "  ".join(f"{value:>16.4f}" for value in values)
    before, after = result["beyond"]
    yield f"past {short} tokens: {after:.4f} against {before:.4f}, {'below' if better else 'NOT below'}"


def _check_tokenizer(opened: Opened, path: str, manifest) -> None:
    if manifest is None or opened.home is None:
        return
    own = hashlib.sha256((opened.home / "tokenizer.json").read_bytes()).hexdigest()
    prepared = Path(path if os.path.isdir(path) else os.path.dirname(path), "tokenizer")
    if own != manifest.tokenizer.sha256 and _vocabulary(prepared) != opened.tokenizer.get_vocab(with_added_tokens=True):
        raise mistake(
            "--data",
            path,
            problem=f"was made with another tokenizer than {opened.home}",
            allowed="data of the model's tokenizer",
            fix=f"zaya data prepare --tokenizer {opened.home} ...",
        )
    if (own := opened.special_tokens and any(added_tokens(opened.tokenizer))) != manifest.special_tokens:
        with_, without = ("the model", path) if own else (path, "the model")
        line = f"note: the texts of {with_} have the tokenizer's special tokens (bos), and those of {without} have not"
        if not holds_chats(path):  # in which the template decides
            print(line, file=sys.stderr)


def _vocabulary(folder: Path) -> dict | None:
    """Return the vocabulary of a tokenizer's folder, or None where it has no tokenizer.json."""
    exists = (folder / "tokenizer.json").is_file()
    return open_tokenizer(str(folder)).get_vocab(with_added_tokens=True) if exists else None


if __name__ == "__main__":
    patches.apply_torch()
    sys.exit(main(sys.argv[1:]))

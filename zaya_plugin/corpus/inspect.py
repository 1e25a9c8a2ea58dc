# SPDX-License-Identifier: Apache-2.0
"""`zaya data inspect`: show what a dataset holds, or what a run draws, as text with source, length and loss mask.

Documents and bins are read as they are stored, without torch. With a recipe the samples are those that its training
sees, through the same datasets.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.blend import resolve_blend
from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.prepared import (
    document_ends,
    holds_chats,
    locate,
    marks_of,
    packed_length,
    packed_loss_mask,
    prefix_of,
    runs,
    tokenizer_of,
)
from zaya_plugin.data.sources import find_sources, training_samples
from zaya_plugin.data.tokenizer import describe, open_tokenizer
from zaya_plugin.ground.errors import as_typed, mistake


def inspect(args: argparse.Namespace, recipe: Recipe | None) -> None:
    """Print the samples of `recipe`, or of args.datasets.

    Raises:
        ValueError: a dataset is missing, lacks the split, has fewer samples, or no tokenizer is known.
    """
    if recipe is not None and args.split:
        raise mistake(
            "--split", args.split, problem="the samples of a run are its training samples", fix="leave it out"
        )
    if recipe is None and len(args.datasets) > 1:
        raise mistake(
            "DATASET",
            " ".join(args.datasets),
            problem="several datasets are a blend, and its samples follow from a recipe",
            allowed="one dataset",
            fix="zaya data inspect experiment=<name> \"data.blend=['0.7 data/web','0.3 data/code']\"",
        )
    path = args.datasets[0] if recipe is None else recipe.data.path
    manifest, recorded = locate(path)[0], tokenizer_of(path)
    directory = args.tokenizer or (recipe and recipe.data.tokenizer) or (recorded and recorded[0])
    if not directory:
        raise mistake(
            path,
            problem="has no manifest.json that names its tokenizer",
            allowed="a directory of `zaya data prepare`, or any dataset with --tokenizer",
            fix="--tokenizer <folder with tokenizer.json>",
        )
    tokenizer, eod = open_tokenizer(directory), describe(directory, directory).eod_id
    if recipe is None:
        samples = stored(args.datasets[0], args.split or "train", args.start, args.count, eod)
    else:
        samples = drawn(recipe, args.start, args.count)
    for number, sample in enumerate(samples):
        facts = facts_of(sample, tokenizer, eod)
        facts["special_tokens"] = None if manifest is None else manifest.special_tokens
        print(
            json.dumps(facts, ensure_ascii=False) if args.json else "\n" * (number > 0) + render(facts, args.characters)
        )


@dataclass(frozen=True)
class Sample:
    """One document, bin or training sample.

    source: prefix of its dataset; name: its name there, for example "document 7"; tokens int [s]; loss_mask bool [s];
    ends: the last tokens of documents, bool [s], None without an end of document.
    """

    source: str
    name: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    ends: np.ndarray | None


def stored(path: str, split: str, start: int, count: int, eod: int | None) -> Iterator[Sample]:
    """Yield documents, or bins of a packed dataset, in the order of the file."""
    prefix, packed = prefix_of(path, split), packed_length(path) is not None
    reader, name = IndexedReader(prefix, marks_of(prefix)), "bin" if packed else "document"
    if start >= len(reader):
        raise mistake(
            "--start", start, problem=f"{prefix} has {len(reader)} {name}s", allowed=f"0 to {len(reader) - 1}"
        )
    for number in range(start, min(start + count, len(reader))):
        tokens = np.asarray(reader.document(number)).astype(np.int64)
        marks = reader.document_marks(number)
        in_bin = packed or marks is not None
        mask = packed_loss_mask(tokens, eod, marks) if in_bin else np.arange(len(tokens)) < len(tokens) - 1
        ends = None if eod is None else document_ends(tokens, eod, marks)
        yield Sample(prefix, f"{name} {number:,} of {len(reader):,}", tokens, mask, ends)


def drawn(recipe: Recipe, start: int, count: int) -> Iterator[Sample]:
    """Yield training samples of the stage, in the order in which the run reads them."""
    dataset, total = training_samples(recipe), sample_count(recipe)
    prefixes, _ = resolve_blend(find_sources(recipe).train, "train")
    if start >= total:
        raise mistake("--start", start, problem=f"the stage has {total} samples", allowed=f"0 to {total - 1}")
    for number in range(start, min(start + count, total)):
        item = dataset[recipe.handover.first_sample + number]
        name = f"train sample {number:,} of {total:,}"
        source = prefixes[int(item.get("dataset_id", 0))]
        yield Sample(source, name, item["tokens"].numpy(), item["loss_mask"].numpy() > 0, item["document_ends"].numpy())


def document_lengths(tokens: np.ndarray, eod: int | None, last: np.ndarray | None) -> list[int]:
    """Return the tokens of each document in a sample, its end included.

    Consecutive end-of-document tokens at the end of the sample are filling and count as no document.

    Args:
        last: whether a token is the last of its document, bool [s]; None without `eod`.
    """
    if eod is None:
        return [len(tokens)]
    last = last & (tokens == eod)
    other = np.flatnonzero(~last)
    used = min(len(tokens), (int(other[-1]) if len(other) else -1) + 2)
    ends = np.flatnonzero(last[:used]) + 1
    marks = np.concatenate(([0], ends, [used] if not len(ends) or ends[-1] < used else [])).astype(int)
    return np.diff(marks).tolist()


def facts_of(sample: Sample, tokenizer, eod: int | None) -> dict:
    """Return what is shown of a sample; text: special tokens spelled out, without the filling. parts: of chats, see
    `parts_of`.
    """
    lengths = document_lengths(sample.tokens, eod, sample.ends)
    return {
        "source": sample.source,
        "name": sample.name,
        "tokens": len(sample.tokens),
        "documents": lengths,
        "filling": len(sample.tokens) - sum(lengths),
        "in_loss": int(sample.loss_mask.sum()),
        "loss_positions": runs(sample.loss_mask),
        "text": tokenizer.decode(sample.tokens[: sum(lengths)].tolist(), skip_special_tokens=False),
        **({"parts": parts_of(sample, tokenizer, sum(lengths))} if holds_chats(sample.source) else {}),
    }


def parts_of(sample: Sample, tokenizer, length: int) -> list[tuple[bool, str]]:
    """Return the text of the first `length` tokens in parts, each with whether its tokens are in the loss."""
    in_loss = np.concatenate(([False], sample.loss_mask[: length - 1]))  # a position's loss is that of the next token
    edges, ids = [0, *(np.flatnonzero(np.diff(in_loss)) + 1).tolist(), length], sample.tokens.tolist()
    return [(bool(in_loss[a]), tokenizer.decode(ids[a:b], skip_special_tokens=False)) for a, b in pairwise(edges)]


def shortened(parts: list[tuple[bool, str]], characters: int) -> list[tuple[bool, str]]:
    """Return at most `characters` characters of the parts, half from each end; 0: all."""
    half, total, at, out = characters // 2, sum(len(text) for _, text in parts), 0, []
    if not characters or total <= characters:
        return parts
    for in_loss, text in parts:
        pieces = [(in_loss, text[: max(0, half - at)]), (in_loss, text[max(0, total - half - at) :])]
        if at <= half < at + len(text):
            pieces.insert(1, (False, f"[... {total - 2 * half:,} characters ...]"))
        out += [piece for piece in pieces if piece[1]]
        at += len(text)
    return out


def render(facts: dict, characters: int) -> str:
    """Return lines for a terminal; of chats, those in the loss begin with ">". characters: see `shortened`."""
    shown, parts = facts["loss_positions"][:6], shortened(facts.get("parts") or [(False, facts["text"])], characters)
    positions = ", ".join(f"{a}-{b - 1}" for a, b in shown) + (", ..." if len(facts["loss_positions"]) > 6 else "")
    lengths = ", ".join(map(str, facts["documents"][:8])) + (", ..." if len(facts["documents"]) > 8 else "")
    lines = [
        f"{facts['source']}: {facts['name']}",
        f"  {facts['tokens']:,} tokens in {len(facts['documents'])} document{'s' * (len(facts['documents']) != 1)} "
        f"({lengths})"
        + (f", {facts['filling']:,} of filling" if facts["filling"] else "")
        + ("" if facts["special_tokens"] is None else f"; special_tokens={as_typed(facts['special_tokens'])}"),
        f"  {facts['in_loss']:,} positions in the loss: {positions or 'none'}"
        + ("; their text behind >" if "parts" in facts else ""),
    ]
    return "\n".join([*lines, *(f"  {'|>'[in_loss]} {line}" for in_loss, text in parts for line in text.split("\n"))])

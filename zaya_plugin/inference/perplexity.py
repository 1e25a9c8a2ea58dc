# SPDX-License-Identifier: Apache-2.0
"""Perplexity on prepared data: exp of the mean loss, computed by the model's own head and loss as in validation."""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from zaya_plugin.checkpoint.progress import bar
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
from zaya_plugin.data.tokenizer import added_tokens
from zaya_plugin.errors import mistake
from zaya_plugin.inference.opening import GIB, Opened
from zaya_plugin.parallel.packed_documents import PackedDocuments


@dataclass(frozen=True)
class Rows:
    """A dataset in rows of `length` tokens, and the token that the last of them predicts.

    stream: all tokens, of which rows share one at their ends, so that each but the first is predicted once; the last row
    may be shorter. Documents follow each other, as in training.
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
        held: list[tuple] = []
        for number in (*numbers, None):
            row = None if number is None else self.row(number)
            if held and (row is None or len(held) == size or len(held[0][0]) != len(row[0])):
                tokens, marks = zip(*held, strict=True)
                yield torch.from_numpy(numpy.stack(tokens)), None if self.marks is None else numpy.stack(marks)
                held = []
            held.append(row)


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
    device = next(model.parameters()).device
    tokens, labels = (part.contiguous().to(device) for part in (rows[:, :-1], rows[:, 1:]))
    documents, whole = None, rows.numpy()
    if eod is not None:
        ends = torch.from_numpy(document_ends(whole, eod, marks)[:, :-1]).to(device)
        documents = PackedDocuments.from_ends(ends, reset_positions=reset_positions)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=documents).double()
    if not packed and marks is None:
        return losses.sum().item(), losses.numel()
    width = whole.shape[1] - packed
    mask = packed_loss_mask(whole[:, :width], eod, None if marks is None else marks[:, :width])
    mask = torch.from_numpy(mask[:, : losses.shape[1]].copy()).to(device)
    return losses[mask].sum().item(), int(mask.sum())


def perplexity(opened: Opened, name: str, path: str, batch_size: int, limit: int | None) -> dict:
    """Return perplexity, loss (nats a token) and tokens of the held-out part of a dataset, or of all of it without one.

    name: in the progress bar. limit: sequences to read, spread over the dataset; None: all.

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
            problem=f"the weights and a pass over {rows_at_once} sequences of {length} tokens need {needed / GIB:,.2f} GiB "
            f"or more, and {free / GIB:,.2f} GiB of memory are free",
            allowed="what fits into the memory",
            fix="a smaller --batch-size",
        )
    print(f"{name}: {len(numbers):,} of {len(rows):,} sequences of {length} tokens", file=sys.stderr)
    total, count = 0.0, 0
    with bar(name, len(numbers), " sequences") as shown:
        for batch, of_chats in rows.batches(batch_size, numbers):
            loss, tokens = summed_loss(
                opened.decoder.model,
                batch,
                eod=eod if separate else None,
                reset_positions=reset,
                packed=packed,
                marks=of_chats,
            )
            total, count = total + loss, count + tokens
            shown.update(len(batch))
    if not count:
        raise mistake(path, problem="holds no token that can be predicted", allowed="at least two tokens")
    mean = total / count
    return {"perplexity": math.exp(mean) if mean < 700 else math.inf, "loss": mean, "tokens": count}


def _check_tokenizer(opened: Opened, path: str, manifest) -> None:
    if manifest is None or opened.home is None:
        return
    own = hashlib.sha256((opened.home / "tokenizer.json").read_bytes()).hexdigest()
    prepared = os.path.join(path if os.path.isdir(path) else os.path.dirname(path), "tokenizer", "tokenizer.json")
    if own != manifest.tokenizer.sha256 and _entries(prepared) != opened.tokenizer.get_vocab(with_added_tokens=True):
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


def _entries(file: str) -> dict | None:
    from zaya_plugin.data.tokenizer import open_tokenizer

    return open_tokenizer(os.path.dirname(file)).get_vocab(with_added_tokens=True) if os.path.isfile(file) else None

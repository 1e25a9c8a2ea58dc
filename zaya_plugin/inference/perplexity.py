# SPDX-License-Identifier: Apache-2.0
"""Perplexity on prepared data: exp of the mean loss, computed by the model's own head and loss as in validation."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator

import numpy
import torch
from torch import Tensor

from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.prepared import check_dataset, locate, packed_length, packed_loss_mask, prefix_of
from zaya_plugin.errors import mistake
from zaya_plugin.inference.opening import GIB, Opened
from zaya_plugin.parallel.packed_documents import PackedDocuments


def windows(prefix: str, length: int, most: int | None = None) -> Iterator[numpy.ndarray]:
    """Yield the tokens of a dataset in windows int64 [length + 1] that share one token, so that each token but the
    first is predicted once; the last window may be shorter. Documents follow each other, as in training.
    """
    stream = IndexedReader(prefix).stream
    for number, begin in enumerate(range(0, len(stream) - 1, length)):
        if number == most:
            return
        yield stream[begin : begin + length + 1].astype(numpy.int64)


def bins(prefix: str, length: int, most: int | None = None) -> Iterator[numpy.ndarray]:
    """Yield the bins of a packed dataset, int64 [length + 1]; a last token is repeated, and not in the loss."""
    for window in windows(prefix, length, most):
        full = window[:length]
        yield numpy.append(full, full[-1])


def in_batches(rows: Iterable[numpy.ndarray], size: int) -> Iterator[Tensor]:
    """Yield rows of equal length together, int64 [at most size, s + 1]."""
    held: list[numpy.ndarray] = []
    for row in rows:
        if held and (len(held) == size or len(held[0]) != len(row)):
            yield torch.from_numpy(numpy.stack(held))
            held = []
        held.append(row)
    if held:
        yield torch.from_numpy(numpy.stack(held))


@torch.no_grad()
def summed_loss(
    model, rows: Tensor, *, eod: int | None = None, reset_positions: bool = False, packed: bool = False
) -> tuple[float, int]:
    """Return the sum of the losses (nats) of rows int64 [b, s + 1], and the number of predicted tokens.

    Args:
        eod: the token that ends a document, to compute each document by itself; None: they attend to each other.
        reset_positions: RoPE counts from the start of each document.
        packed: rows are bins; a document's first token and filling are not in the loss.
    """
    device = next(model.parameters()).device
    tokens, labels = (part.contiguous().to(device) for part in (rows[:, :-1], rows[:, 1:]))
    documents = None if eod is None else PackedDocuments.from_tokens(tokens, eod, reset_positions=reset_positions)
    positions = torch.arange(tokens.shape[1], device=device).expand_as(tokens)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=documents).double()
    if not packed:
        return losses.sum().item(), losses.numel()
    mask = numpy.stack([packed_loss_mask(row, eod) for row in tokens.cpu().numpy()])
    mask = torch.from_numpy(mask).to(device)
    return losses[mask].sum().item(), int(mask.sum())


def perplexity(opened: Opened, path: str, batch_size: int, most: int | None, progress=lambda count: None) -> dict:
    """Return perplexity, loss (nats a token) and tokens of the held-out part of a dataset, or of all of it without one.

    most: sequences to read; None: all.

    Raises:
        ValueError: there is no dataset, or its tokens are not of this model's vocabulary.
    """
    rows, arguments = opened.described.vocab_size, opened.arguments
    check_dataset(path, rows)
    manifest, splits = locate(path)
    prefix = prefix_of(path, "valid") if len(splits) > 1 else next(iter(splits.values()))
    _check_tokenizer(opened, path, manifest)
    length, packed = packed_length(path), packed_length(path) is not None
    length = length or getattr(arguments, "seq_length", None) or opened.described.max_position_embeddings
    separate = packed or getattr(arguments, "packing", None) == "documents"
    eod = manifest.tokenizer.eod_id if manifest is not None else next(iter(opened.stop), None)
    if separate and eod is None:
        raise mistake(path, problem="no token is known that ends its documents", fix="--tokenizer FOLDER")
    reset = separate and bool(getattr(arguments, "reset_position_ids", False))
    rows_at_once = min(batch_size, most or batch_size, -(-len(IndexedReader(prefix).stream) // length))
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
    total, count = 0.0, 0
    for batch in in_batches((bins if packed else windows)(prefix, length, most), batch_size):
        loss, tokens = summed_loss(
            opened.decoder.model, batch, eod=eod if separate else None, reset_positions=reset, packed=packed
        )
        total, count = total + loss, count + tokens
        progress(len(batch))
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


def _entries(file: str) -> dict | None:
    from zaya_plugin.data.tokenizer import open_tokenizer

    return open_tokenizer(os.path.dirname(file)).get_vocab(with_added_tokens=True) if os.path.isfile(file) else None

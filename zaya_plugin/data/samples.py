# SPDX-License-Identifier: Apache-2.0
"""Samples as people look at them: where they come from, how long they are, what counts in the loss, and their text."""

import json
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One document, bin or training sample.

    source: path of its dataset; name: what it is there, for example "document 7"; tokens int [s]; loss_mask bool [s].
    """

    source: str
    name: str
    tokens: np.ndarray
    loss_mask: np.ndarray


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Stretches of true positions as (first, one past the last)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], mask.astype(np.int8), [0]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def document_lengths(tokens: np.ndarray, eod: int | None) -> list[int]:
    """Tokens of each document in a sample, each with its end; end-of-document tokens at the end that follow one another are
    filling and count as no document."""
    if eod is None:
        return [len(tokens)]
    other = np.flatnonzero(tokens != eod)
    used = min(len(tokens), (int(other[-1]) if len(other) else -1) + 2)
    ends = np.flatnonzero(tokens[:used] == eod) + 1
    marks = np.concatenate(([0], ends, [used] if not len(ends) or ends[-1] < used else [])).astype(int)
    return np.diff(marks).tolist()


def describe(sample: Sample, eod: int | None) -> dict:
    """What is said about a sample, without its text."""
    lengths = document_lengths(sample.tokens, eod)
    filling = len(sample.tokens) - sum(lengths)
    return {
        "source": sample.source,
        "name": sample.name,
        "tokens": len(sample.tokens),
        "documents": lengths,
        "filling": filling,
        "in_loss": int(sample.loss_mask.sum()),
        "loss_positions": runs(sample.loss_mask),
    }


def render(sample: Sample, tokenizer, eod: int | None, characters: int) -> str:
    """Lines for a terminal. characters: of the text at most this many are shown, half from each end; 0 shows all."""
    facts = describe(sample, eod)
    shown = facts["loss_positions"][:6]
    positions = ", ".join(f"{a}-{b - 1}" for a, b in shown) + (", ..." if len(facts["loss_positions"]) > 6 else "")
    lengths = ", ".join(map(str, facts["documents"][:8])) + (", ..." if len(facts["documents"]) > 8 else "")
    lines = [
        f"{sample.source}: {sample.name}",
        f"  {facts['tokens']:,} tokens in {len(facts['documents'])} document{'s' * (len(facts['documents']) != 1)} ({lengths})"
        + (f", {facts['filling']:,} of filling" if facts["filling"] else ""),
        f"  {facts['in_loss']:,} positions in the loss: {positions or 'none'}",
    ]
    text = decode(sample, tokenizer, facts["filling"])
    if characters and len(text) > characters:
        half = characters // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    return "\n".join([*lines, *(f"  | {line}" for line in text.split("\n"))])


def as_json(sample: Sample, tokenizer, eod: int | None) -> str:
    facts = describe(sample, eod)
    return json.dumps({**facts, "text": decode(sample, tokenizer, facts["filling"])}, ensure_ascii=False)


def decode(sample: Sample, tokenizer, filling: int = 0) -> str:
    """Text with special tokens spelled out, without the filling."""
    return tokenizer.decode(sample.tokens[: len(sample.tokens) - filling].tolist(), skip_special_tokens=False)

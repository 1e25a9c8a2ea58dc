# SPDX-License-Identifier: Apache-2.0
"""How far each source has been read: what a stage leaves behind and the next one goes on from. Plain arithmetic.

A ledger maps the prefix of a source to the tokens of its stream (token_stream.py) that were read. A source that a stage does
not use keeps its place for a later one.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from zaya_plugin.data.blend import parse_entry
from zaya_plugin.data.blend_order import BlendOrder
from zaya_plugin.data.indexed_format import read_index
from zaya_plugin.data.prefixes import prefix_of, resolve_blend


@dataclass(frozen=True)
class SourceUse:
    """What one stage reads of one source: tokens before and after it, tokens of an epoch, samples drawn."""

    prefix: str
    before: int
    after: int
    epoch_tokens: int
    samples: int


def key_of(path: str) -> str:
    """The name of a source in a ledger: its prefix with links resolved, of a directory that of its training split."""
    return os.path.realpath(prefix_of(path, "train"))


def parse_ledger(entries: Sequence[str]) -> dict[str, int]:
    """From 'TOKENS PATH' entries.

    Raises:
        ValueError: an entry is not of that form, or a source comes twice.
    """
    ledger: dict[str, int] = {}
    for entry in entries:
        tokens, _, path = entry.strip().partition(" ")
        if not tokens.isdecimal() or not path.strip():
            raise ValueError(
                f"data.consumed holds {entry!r}; an entry is a number of tokens, a blank and a path: '1048576 data/web'"
            )
        key = key_of(path.strip())
        if key in ledger:
            raise ValueError(f"data.consumed names {key} twice")
        ledger[key] = int(tokens)
    return ledger


def write_ledger(ledger: dict[str, int]) -> list[str]:
    """The entries that `parse_ledger` reads."""
    return [f"{tokens} {path}" for path, tokens in ledger.items()]


def stage_use(
    blend: Sequence[str], samples: int, sequence_length: int, ledger: dict[str, int], seed: int
) -> list[SourceUse]:
    """What a stage reads of each source of its blend.

    Args:
        blend: 'WEIGHT PATH' entries, or paths, which then are weighted by their tokens.
        samples: sequences of the stage: train_iters x global_batch_size.
        ledger: what was read before.
        seed: of the run.
    """
    prefixes, weights = resolve_entries(blend)
    counts = BlendOrder(weights, seed).counts(samples)
    uses = []
    for prefix, count in zip(prefixes, counts, strict=True):
        before = ledger.get(os.path.realpath(prefix), 0)
        uses.append(SourceUse(prefix, before, before + count * sequence_length, read_index(prefix).tokens, count))
    return uses


def resolve_entries(blend: Sequence[str]) -> tuple[list[str], list[float]]:
    """Prefixes of the training splits and weights of 'WEIGHT PATH' entries."""
    entries = [path if weight is None else (weight, path) for weight, path in map(parse_entry, blend)]
    prefixes, weights = resolve_blend(entries, "train")
    if len(set(map(os.path.realpath, prefixes))) < len(prefixes):
        raise ValueError(
            f"blend {list(blend)!r} names a source twice: its samples would be drawn twice; add up its weights"
        )
    return prefixes, weights or [1.0]


def after(ledger: dict[str, int], uses: Sequence[SourceUse]) -> dict[str, int]:
    """The ledger that a stage leaves to the next."""
    return {**ledger, **{os.path.realpath(use.prefix): use.after for use in uses}}


def report(uses: Sequence[SourceUse]) -> str:
    """A table for a terminal: tokens of the stage by source, their share, and epochs before and after."""
    total = sum(use.after - use.before for use in uses)
    lines = [f"  {'source':40} {'samples':>13} {'tokens':>19} {'share':>7} {'epochs before':>14} {'after':>8}"]
    for use in uses:
        tokens = use.after - use.before
        lines.append(
            f"  {use.prefix[-40:]:40} {use.samples:13,} {tokens:19,} {tokens / max(total, 1):7.2%} "
            f"{use.before / use.epoch_tokens:14.3f} {use.after / use.epoch_tokens:8.3f}"
        )
    return "\n".join([*lines, f"  {'all':40} {sum(use.samples for use in uses):13,} {total:19,}"])

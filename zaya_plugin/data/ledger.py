# SPDX-License-Identifier: Apache-2.0
"""Compute which samples a stage draws from each source of its blend, and where the next stage continues.
No torch import.

The source of a sample follows from arithmetic alone, so that any sample can be looked up and nothing is stored: a table
of Megatron's kind takes ten bytes a sample, 20 GB for ZAYA1's first stage. A ledger maps the prefix of a source to the
tokens of its stream (stream_dataset.py) that were read. A source that a stage does not use keeps its place for a later
stage.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import ceil

import numpy as np

from zaya_plugin.config.entries import Blend
from zaya_plugin.data.blend import resolve_blend
from zaya_plugin.data.indexed_dataset import read_index
from zaya_plugin.data.prepared import prefix_of
from zaya_plugin.ground.errors import mistake

MIN_BLOCK_SAMPLES = 1024


def exact(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Return the shares of weights, which add up to one; 0.1 is a tenth, not the nearest binary number."""
    fractions = [Fraction(str(weight)) for weight in weights]
    return [fraction / sum(fractions) for fraction in fractions]


class BlendOrder:
    """The source of each sample of a blend.

    Samples are dealt out in blocks. Over whole blocks each source has its share of all samples so far to within one,
    and inside a block the sources are shuffled.

    Args:
        weights: positive, of each source.
        seed: of the shuffle within blocks.
    """

    def __init__(self, weights: Sequence[float | Fraction], seed: int):
        shares = exact(weights)
        assert shares and min(shares) > 0
        self.seed, self.edges = seed, [Fraction(0), *accumulate(shares)]
        # Then every block has at least one sample of the rarest source, and no count ever falls.
        self.block = max(MIN_BLOCK_SAMPLES, ceil(2 / min(shares)))
        self._block_of = lru_cache(maxsize=4)(self._make_block)

    def _whole_blocks(self, blocks: int) -> np.ndarray:
        samples = blocks * self.block
        return np.diff(
            [(2 * edge.numerator * samples + edge.denominator) // (2 * edge.denominator) for edge in self.edges]
        )

    def _make_block(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the samples of each source before the block, the source of each sample in it, and its number in that
        source.
        """
        before = self._whole_blocks(number)
        quota = self._whole_blocks(number + 1) - before
        sources = np.repeat(np.arange(len(quota)), quota)
        np.random.RandomState([self.seed, 1, number % 2**32, number >> 32]).shuffle(sources)
        numbers = np.empty(self.block, np.int64)
        for source in range(len(quota)):
            at = sources == source
            numbers[at] = before[source] + np.arange(int(at.sum()))
        return before, sources, numbers

    def sample(self, number: int) -> tuple[int, int]:
        """Return the source of a sample, and its number among the samples of that source."""
        block, at = divmod(number, self.block)
        _, sources, numbers = self._block_of(block)
        return int(sources[at]), int(numbers[at])

    def counts(self, samples: int) -> list[int]:
        """Return how many of the first `samples` come from each source."""
        block, at = divmod(samples, self.block)
        before, sources, _ = self._block_of(block)
        return (before + np.bincount(sources[:at], minlength=len(before))).tolist()


@dataclass(frozen=True)
class SourceUse:
    """The part of one source that one stage reads: its weight, tokens read before and after it, tokens of an epoch,
    samples drawn.
    """

    prefix: str
    weight: float
    before: int
    after: int
    epoch_tokens: int
    samples: int


def parse_ledger(entries: Sequence[str]) -> dict[str, int]:
    """Return the ledger of 'TOKENS PATH' entries; a source is named by the real path of its training split's prefix.

    Raises:
        ValueError: an entry is malformed, or a source is listed twice.
    """
    ledger: dict[str, int] = {}
    for entry in entries:
        tokens, _, path = entry.strip().partition(" ")
        if not tokens.isdecimal() or not path.strip():
            raise mistake(
                "data.consumed",
                list(entries),
                problem=f"{entry!r} is malformed",
                allowed="a number of tokens, a blank and a path: '1048576 data/web'",
            )
        key = os.path.realpath(prefix_of(path.strip(), "train"))
        if key in ledger:
            raise mistake("data.consumed", list(entries), problem=f"{key} is listed twice", fix="add up its tokens")
        ledger[key] = int(tokens)
    return ledger


def stage_use(blend: Blend, samples: int, sequence_length: int, ledger: dict[str, int], seed: int) -> list[SourceUse]:
    """Return what a stage reads of each source of its blend.

    Args:
        samples: sequences of the stage: train_iters x global_batch_size.
        ledger: what earlier stages read.
        seed: of the run.

    Raises:
        ValueError: see `resolve_blend`; or the blend names a source twice.
    """
    prefixes, weights = resolve_blend(blend, "train")
    weights = weights or [1.0]
    keys = list(map(os.path.realpath, prefixes))
    if len(set(keys)) < len(keys):
        raise mistake(
            "data.blend",
            list(blend),
            problem="a source is listed twice, and its samples would be drawn twice",
            fix="add up its weights",
        )
    uses = []
    for prefix, key, weight, count in zip(
        prefixes, keys, weights, BlendOrder(weights, seed).counts(samples), strict=True
    ):
        before = ledger.get(key, 0)
        uses.append(
            SourceUse(prefix, weight, before, before + count * sequence_length, read_index(prefix).tokens, count)
        )
    return uses


def after(ledger: dict[str, int], uses: Sequence[SourceUse]) -> dict[str, int]:
    """Return the ledger that a stage leaves to the next."""
    return {**ledger, **{os.path.realpath(use.prefix): use.after for use in uses}}


def report(uses: Sequence[SourceUse]) -> str:
    """Return a table for a terminal: tokens of the stage by source, their share, and epochs before and after."""
    total = sum(use.after - use.before for use in uses)
    lines = [f"  {'source':40} {'samples':>13} {'tokens':>19} {'share':>7} {'epochs before':>14} {'after':>8}"]
    for use in uses:
        tokens = use.after - use.before
        lines.append(
            f"  {use.prefix[-40:]:40} {use.samples:13,} {tokens:19,} {tokens / max(total, 1):7.2%} "
            f"{use.before / use.epoch_tokens:14.3f} {use.after / use.epoch_tokens:8.3f}"
        )
    return "\n".join([*lines, f"  {'all':40} {sum(use.samples for use in uses):13,} {total:19,}"])

# SPDX-License-Identifier: Apache-2.0
"""Which source each sample of a blend comes from, by arithmetic: any sample can be looked up, nothing is stored.

Samples are dealt out in blocks. Over whole blocks each source has its share of all samples so far to within one, and
inside a block sources are shuffled. A table of Megatron's kind takes ten bytes a sample, 20 GB for ZAYA1's first stage.
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import ceil

import numpy as np

LEAST_BLOCK = 1024


def exact(weights: Sequence[float | Fraction]) -> list[Fraction]:
    """Shares that add up to one, of weights as they are written: 0.1 is a tenth, not the nearest binary number."""
    fractions = [Fraction(str(weight)) for weight in weights]
    return [fraction / sum(fractions) for fraction in fractions]


class BlendOrder:
    """The order of a blend.

    Args:
        weights: positive, of each source.
        seed: of the shuffle within blocks.
    """

    def __init__(self, weights: Sequence[float | Fraction], seed: int):
        shares = exact(weights)
        assert shares and min(shares) > 0
        self.seed, self.edges = seed, [Fraction(0), *accumulate(shares)]
        # Then every block has at least one sample of the rarest source, and no count ever falls.
        self.block = max(LEAST_BLOCK, ceil(2 / min(shares)))
        self._block_of = lru_cache(maxsize=4)(self._make_block)

    def _whole_blocks(self, blocks: int) -> np.ndarray:
        samples = blocks * self.block
        return np.diff(
            [(2 * edge.numerator * samples + edge.denominator) // (2 * edge.denominator) for edge in self.edges]
        )

    def _make_block(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Samples of each source before the block, the source of each sample in it, and its number among them."""
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
        """Source of a sample, and its number among the samples of that source."""
        block, at = divmod(number, self.block)
        _, sources, numbers = self._block_of(block)
        return int(sources[at]), int(numbers[at])

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` come from each source."""
        block, at = divmod(samples, self.block)
        before, sources, _ = self._block_of(block)
        return (before + np.bincount(sources[:at], minlength=len(before))).tolist()

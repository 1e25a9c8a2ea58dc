# SPDX-License-Identifier: Apache-2.0
"""Comparisons in addition to vocabulary_exponentials_cases.check that every back end must pass: where numbers are
largest, smallest, and nearly cancel.
"""

from __future__ import annotations

import torch

from hip_ops.ops.linear_cross_entropy.reference import EXPONENT_PERIOD
from tests.hip_ops.rms_norm_cases import FP64
from tests.hip_ops.vocabulary_rows_cases import EXPONENT, near

# maximum -> reference
BORDERS = {
    -40.0: -EXPONENT_PERIOD,
    -39.9: 0.0,
    40.0: 0.0,
    40.1: EXPONENT_PERIOD,
    -40.1: -EXPONENT_PERIOD,
    500.0: 6 * EXPONENT_PERIOD,
    -500.0: -6 * EXPONENT_PERIOD,
    2e9: 2e9,
    -3e8: -3e8,
}


def probability_near_one(module) -> None:
    """1 - p = 4.5e-5 with a logit of 40, next to which fp32 has steps of 3.8e-6."""
    logits = torch.tensor([[40.0, 30.0, 19.0]])
    want, gradient = (
        -logits.double().log_softmax(-1)[0, 0],
        logits.double().softmax(-1) - torch.tensor([[1.0, 0.0, 0.0]]),
    )
    statistics = module.overwrite_with_exponentials(logits, torch.tensor([0]), 0, 1)
    assert abs(statistics[0, 1, 0].log() - 40.0 - want) > 5e-3 * want
    losses, factors = module.finish_gradient(logits, torch.tensor([0]), 0, statistics, 0, 1, torch.ones(1), 0.0)
    near("loss", losses, want[None], 2e-3)
    near("gradient", logits * factors[:, None], gradient, 2e-3)


def borders(module) -> None:
    """Rows whose maximum is the largest or smallest with its reference, many times, next to logits that lie up to 46
    below.
    """
    tops = torch.tensor([*BORDERS])
    logits = tops[:, None] - torch.tensor([0.0, 1.0, 40.0, 46.0]).repeat(512)
    exact, labels = logits.double(), torch.arange(len(tops))
    references = torch.tensor([*BORDERS.values()], dtype=FP64)
    want = (exact - references[:, None]).exp()
    statistics = module.overwrite_with_exponentials(logits, labels, 0, 1)
    near("references", statistics[0, 0], references, 0.0)
    near("exponentials", logits, want, EXPONENT)
    near("sums", statistics[0, 1], want.sum(1), EXPONENT)
    losses, factors = module.finish_gradient(logits, labels, 0, statistics, 0, 1, torch.ones(len(tops)), 0.0)
    hot = torch.nn.functional.one_hot(labels, logits.shape[1])
    near("gradient", logits.double() * factors.double()[:, None], exact.softmax(1) - hot, 3 * EXPONENT)
    near("losses", losses, torch.nn.functional.cross_entropy(exact, labels, reduction="none"), EXPONENT)


def largest_sum(module) -> None:
    """All logits of ZAYA1's 129 parts at the largest exponent, and of a last one so far below that nothing of it is
    left.
    """
    logits, labels = torch.full((1, 2048), 40.0), torch.tensor([5])
    statistics = module.overwrite_with_exponentials(logits, labels, 0, 1)
    everyone = statistics.repeat(130, 1, 1)
    everyone[1:, 2] = 0.0
    everyone[-1, 0] -= 5 * EXPONENT_PERIOD
    losses, factors = module.finish_gradient(logits, labels, 0, everyone, 0, 1, torch.ones(1), 0.0)
    p = torch.tensor([1 / (129 * 2048)], dtype=FP64)
    near("loss", losses, -p.log(), 1e-6)
    near("gradient", logits[0, 4:7].double() * factors.double(), p - torch.tensor([0.0, 1.0, 0.0]), EXPONENT)


EDGES = (probability_near_one, borders, largest_sum)

# SPDX-License-Identifier: Apache-2.0
"""A rank of the check `demo_losses`: `python -m zaya_plugin.machines.loss_rank <recipe.yaml>`, started like a rank of
training. The losses are in the run's metrics.jsonl.
"""

import sys
from dataclasses import dataclass

from zaya_plugin.bench.random_tokens import RandomSamples, RandomTokens
from zaya_plugin.hosts import worker
from zaya_plugin.machines.short_training import DEMO_VOCABULARY


@dataclass(frozen=True)
class SkewedSamples(RandomSamples):
    """Samples in which small tokens are frequent, so that there is something to learn in ten steps."""

    def __getitem__(self, index: int) -> dict:
        first, second = (super(SkewedSamples, self).__getitem__(2 * index + half) for half in range(2))
        skewed = {name: first[name] * second[name] // self.vocabulary for name in ("tokens", "labels")}
        return {**first, **skewed}


class SkewedTokens(RandomTokens):
    def build(self, num_samples, sequence_length: int, seed: int, tokenizer, validation: int | None = None) -> list:
        return [SkewedSamples(num_samples[0], sequence_length, self.vocabulary, seed), None, None]


def train(recipe, rank: int, world_size: int, console) -> None:
    worker.prepare(recipe)
    import torch

    from zaya_plugin.hosts import adapter

    build_stage = adapter.build_stage

    def seeded(*positional, **named):
        # Before this Megatron draws from the device's generator, which on a CPU is also that of the weights.
        torch.default_generator.manual_seed(recipe.seed)
        return build_stage(*positional, **named)

    adapter.build_stage = seeded
    worker.train_on(SkewedTokens(DEMO_VOCABULARY), recipe, rank, world_size, console)


if __name__ == "__main__":
    sys.exit(worker.main(sys.argv[1:], train))

# SPDX-License-Identifier: Apache-2.0
"""Random tokens in place of a corpus; every token of the vocabulary is equally likely."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class RandomTokens:
    """Takes the place of zaya_plugin.data.sources.DataSources. vocabulary: rows of the model's table."""

    vocabulary: int
    domains: dict[str, float] = field(default_factory=dict)

    def tokenizer_arguments(self) -> dict[str, Any]:
        """Return Megatron's arguments for a tokenizer without text; Megatron adds one entry, the end of a document."""
        return dict(tokenizer_type="NullTokenizer", vocab_size=self.vocabulary - 1)

    def build(self, num_samples, sequence_length: int, seed: int, tokenizer, validation: int | None = None) -> list:
        """Return [train, None, None]."""
        return [RandomSamples(num_samples[0], sequence_length, self.vocabulary, seed), None, None]


@dataclass(frozen=True)
class RandomSamples:
    """Samples in the form of GPTDataset's; sample i is the same on every rank and in every run with the same seed."""

    samples: int
    sequence_length: int
    vocabulary: int
    seed: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict:
        import torch

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        text = torch.randint(self.vocabulary, (self.sequence_length + 1,), generator=generator)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(self.sequence_length),
            "position_ids": torch.arange(self.sequence_length),
        }

# SPDX-License-Identifier: Apache-2.0
"""Training samples of one stage that go on where the stages before it stopped, for Megatron's data loader."""

from collections.abc import Sequence

import numpy as np
import torch

from zaya_plugin.data.blend_order import BlendOrder
from zaya_plugin.data.ledger import SourceUse
from zaya_plugin.data.packing import packed_loss_mask
from zaya_plugin.data.prefixes import content_name, packed_length, refuse_other_length
from zaya_plugin.data.token_stream import StageShuffle, TokenStream


class StreamDataset(torch.utils.data.Dataset):
    """A blend of token streams.

    Args:
        uses: the stage's part of each source, see zaya_plugin.data.ledger.stage_use.
        weights: of the blend, as there.
        sequence_length: tokens of a sample.
        seed: of the run; with the sources' contents and positions it decides everything.
        eod: end-of-document token, for the loss mask of packed sets.
        cache_path: folder of the epochs' orders.

    Raises:
        ValueError: a packed set does not fit the sequence length, or would be entered within a bin.
    """

    def __init__(
        self,
        uses: Sequence[SourceUse],
        weights: Sequence[float],
        sequence_length: int,
        seed: int,
        eod: int,
        cache_path: str,
    ):
        self.uses, self.sequence_length, self.eod = list(uses), sequence_length, eod
        self.order = BlendOrder(weights, seed)
        self.streams = [TokenStream(use.prefix, content_name([use.prefix]), seed, cache_path) for use in uses]
        self.packed = [packed_length(use.prefix) is not None for use in uses]
        for use, packed in zip(uses, self.packed, strict=True):
            refuse_other_length(use.prefix, sequence_length)
            if packed and use.before % sequence_length:
                raise ValueError(
                    f"data.consumed: {use.prefix} is packed into bins of {sequence_length} tokens, and {use.before} is no multiple"
                )
        self.shuffles = [
            StageShuffle(use.samples, [seed, *stream.words, use.before % 2**32, use.before >> 32])
            for use, stream in zip(uses, self.streams, strict=True)
        ]

    def __len__(self) -> int:
        return sum(use.samples for use in self.uses)

    def place(self, number: int) -> tuple[int, int]:
        """Source of a sample and the position of its first token in that source's stream."""
        source, rank = self.order.sample(number)
        return source, self.uses[source].before + self.shuffles[source][rank] * self.sequence_length

    def __getitem__(self, number: int | None) -> dict[str, torch.Tensor | int]:
        """tokens, labels, position_ids int64 [s], loss_mask float32 [s], dataset_id. None: padding of a batch, without loss."""
        source, position = self.place(number or 0)
        text = torch.from_numpy(self.streams[source].read(position, self.sequence_length + 1).astype(np.int64))
        tokens = text[:-1].contiguous()
        mask = torch.ones(self.sequence_length)
        if self.packed[source]:
            mask = torch.from_numpy(packed_loss_mask(tokens.numpy(), self.eod)).float()
        return {
            "dataset_id": source,
            "tokens": tokens,
            "labels": text[1:].contiguous(),
            "loss_mask": mask if number is not None else torch.zeros_like(mask),
            "position_ids": torch.arange(self.sequence_length),
        }

    def byte_ranges(self, number: int) -> list[tuple[str, int, int]]:
        """Files and byte ranges that a sample is read from."""
        source, position = self.place(number)
        stream = self.streams[source]
        width = stream.reader.dtype.itemsize
        ranges = stream.ranges(position, self.sequence_length + 1)
        return [(stream.reader.prefix + ".bin", a * width, b * width) for a, b in ranges]

# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in files: their names in checkpoints, what they are merged into, and which base they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
import xxhash
from torch import Tensor

from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import Source, open_source
from zaya_plugin.checkpoint.convert.tables import Row, rows
from zaya_plugin.checkpoint.convert.values import OfLength, Values, as_bytes, whole
from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.low_rank import ADAPTER, is_trained

SAMPLE = 65_536  # bytes in fp32 of each tensor that the fingerprint of a base reads


@dataclass(frozen=True)
class Lora:
    """The keys of optim.lora, by their names in Megatron's arguments and in ZayaConfig."""

    lora_rank: int
    lora_alpha: float
    lora_targets: list[str]
    lora_balancing: bool = False
    lora_experts: str | None = "each"  # None: a checkpoint from before the key, which is the same

    @classmethod
    def of(cls, arguments) -> Lora | None:
        """Return those of Megatron's arguments or of a ZayaConfig; None for a model without adapters."""
        values = {name: getattr(arguments, name, None) for name in cls.__dataclass_fields__}
        return None if values["lora_rank"] is None else cls(**values)

    def adapted(self, model: Description) -> Iterator[tuple[Row, str]]:
        """Yield the native rows of the weights that have an adapter, each with the beginning of the names of the adapter's
        two parameters, to which lora_A and lora_B are added.
        """
        for row in rows("native", model):
            parent, name, _ = row.ours[0].rsplit(".", 2)
            target = "experts" if row.stacked else "attention" if name.startswith("linear_") else None
            if target in self.lora_targets:
                yield row, f"{parent}{ADAPTER}{name}."

    def shapes(self, model: Description) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all parameters of the adapters, by their names in checkpoints."""
        shapes = {}
        for row, begin in self.adapted(model):
            if row.stacked and self.shared:
                row = replace(row, shape=(1, *row.part))
            *stack, size_out, size_in = row.shape
            shapes |= {begin + "lora_A": (*stack, self.lora_rank, size_in)}
            shapes |= {begin + "lora_B": (*stack, size_out, self.lora_rank)}
        return shapes

    @property
    def shared(self) -> bool:
        """Return whether all experts of a layer have one adapter, whose parameters are [1, ..]."""
        return self.lora_experts == "shared"

    def retrained(self, model: Description) -> list[Row]:
        """Return the native rows of the base's own tensors that are trained themselves."""
        return [row for row in rows("native", model) if is_trained(self, row.ours[0])]

    def merged(
        self, model: Description, weights: Mapping[str, Values], adapters: Mapping[str, Values]
    ) -> dict[str, Values]:
        """Return all weights with what the adapters add to them. adapters: by the names of `shapes`."""
        result, scale = dict(weights), self.lora_alpha / self.lora_rank
        for row, begin in self.adapted(model):
            for index, name in enumerate(row.ours):
                pair = adapters[begin + "lora_A"], adapters[begin + "lora_B"]
                place = 0 if self.shared else index
                result[name] = Merged(weights[name], *pair, scale, place if row.stacked else None)
        return result


@dataclass(frozen=True)
class Merged:
    """`of` + scale * b a in fp32. index: of the expert's in a and b [experts, ..]; None: they are matrices."""

    of: Values
    a: Values
    b: Values
    scale: float
    index: int | None = None
    dtype: torch.dtype = torch.float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.of.shape

    def rows(self, start: int, stop: int) -> Tensor:
        a, b = (
            whole(part) if self.index is None else part.rows(self.index, self.index + 1)[0] for part in (self.a, self.b)
        )
        return torch.addmm(self.of.rows(start, stop).float(), b[start:stop].float(), a.float(), alpha=self.scale)


def fingerprint(base: Source) -> str:
    """Return a checksum of a published model: of the names and shapes of its tensors, and of the first rows of each.

    It is the same in every layout and dtype that holds the same values, and with any rows by `with_rows`. Later rows
    are not read: 8.84 B parameters would take minutes, and no two trainings agree in the first rows of all tensors.
    """
    digest = xxhash.xxh3_128()
    for name, values in sorted(base.tensors.items()):
        while isinstance(values, OfLength):  # of the table as published
            values = values.of
        digest.update(f"{name} {list(values.shape)}".encode())
        count = max(1, SAMPLE // (4 * max(1, prod(values.shape[1:]))))
        digest.update(as_bytes(values.rows(0, min(count, *values.shape[:1] or (1,))).float()))
    return digest.hexdigest()


def open_base(arguments, name: str | None = None) -> Source:
    """Return the base of a checkpoint that holds an adapter, with the run's rows of the embedding.

    Args:
        arguments: Megatron's, of the save.
        name: another place of the base than that of the run.

    Raises:
        ValueError: it is not there, or it is another model.
    """
    record, key = arguments.zaya["base"], "handover.from_hf" if name is None else "--base"
    try:
        base = open_source(name or record["source"], download=False)
    except ValueError as error:
        raise mistake(
            key,
            name or record["source"],
            problem=f"the base of the adapter cannot be read: {error}",
            fix="`zaya checkpoint export RUN --base SOURCE --output DIR`, where SOURCE is the base now; `zaya generate` and "
            "`zaya eval` then read DIR",
        ) from error
    check_base(key, name or record["source"], record, fingerprint(base))
    return base.with_rows(arguments.padded_vocab_size)


def check_base(key: str, name: str, record: Mapping[str, str], checksum: str) -> None:
    """Raise ValueError if the base `name` is not the one of `record`, by its fingerprint."""
    if checksum != record["fingerprint"]:
        raise mistake(
            key,
            name,
            problem=f"holds other weights (fingerprint {checksum}) than those that the adapter was trained on",
            allowed=f"{record['source']} as it was ({record['fingerprint']})",
        )

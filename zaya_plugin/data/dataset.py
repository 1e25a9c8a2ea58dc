# SPDX-License-Identifier: Apache-2.0
"""Build the datasets of a run: Megatron's GPTDatasets, streams that continue from stage to stage, and validation by
domain.

Imports torch and megatron.core; the rooms that run on a login node import it inside functions.
"""

import contextlib
import os
from collections.abc import Mapping, Sequence

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from zaya_plugin.config.entries import Blend
from zaya_plugin.data.blend import content_name, resolve_blend
from zaya_plugin.data.fingerprint import content_fingerprint
from zaya_plugin.data.ledger import stage_use
from zaya_plugin.data.prepared import (
    check_dataset,
    document_ends,
    marks_of,
    packed_length,
    packed_loss_mask,
    refuse_other_length,
)
from zaya_plugin.data.sealed_cache import sealed
from zaya_plugin.data.stream_dataset import StreamDataset
from zaya_plugin.ground.errors import mistake


class BinGPTDataset(GPTDataset):
    """Every run's dataset: Megatron's GPTDataset with the ends of documents, which data.packing=documents reads, and
    the loss mask of packed bins.

    Each sample of a dataset made by `zaya data pack` is one bin; positions that predict nothing are out of the loss,
    and of chats all but those that predict answers.
    """

    def __init__(self, indexed_dataset, dataset_path, *args, **kwargs):
        super().__init__(indexed_dataset, dataset_path, *args, **kwargs)
        self.packed = packed_length(dataset_path) is not None
        self.marks = marks_of(dataset_path) if self.packed else None
        if self.marks is not None:
            # Megatron replaces padding tokens and takes them out of the loss; bins have none, and the padding token of
            # a chat's tokenizer is often the one that ends an answer.
            self._pad_token_id = -1

    def __getitem__(self, idx):
        """Return tokens, labels, position_ids int64 [s], loss_mask float32 [s] and document_ends bool [s]."""
        sample = super().__getitem__(idx)
        tokens, eod, marks = sample["tokens"].numpy(), self.config.tokenizer.eod, None
        if self.marks is not None:
            position, offset = self.sample_index[self.shuffle_index[idx or 0]]
            first = int(self.document_index[position]) * len(tokens) + int(offset)  # all bins have this length
            marks = self.marks[first : first + len(tokens)]
        if self.packed:
            mask = packed_loss_mask(tokens, eod, marks)
            sample["loss_mask"] = sample["loss_mask"] * torch.from_numpy(mask)
        sample["document_ends"] = torch.from_numpy(document_ends(tokens, eod, marks))
        return sample


def build_gpt_datasets(
    train: Blend,
    valid: Blend | None,
    num_samples: tuple[int, int, int],
    *,
    sequence_length: int,
    seed: int,
    tokenizer,
    cache_path: str,
) -> list:
    """Build the GPTDatasets of a run through Megatron's BlendedMegatronDatasetBuilder; every rank must call it.

    Args:
        train, valid: what to draw from, see `Blend` and `resolve_blend`.
        num_samples: sequences to draw for train, valid and test (0), over as many epochs as it takes; 0 builds no
            dataset.
        sequence_length: tokens of a sample; `tokens` and `labels` are int64 [sequence_length].
        seed: of the document and sample order.
        tokenizer: a Megatron tokenizer; its vocabulary must cover the data.
        cache_path: folder of Megatron's sample indices, in a subfolder named after the contents of the datasets:
            Megatron's own key is the path alone, and data that was prepared again would be read with the old indices.
            The first rank checks all indices of that subfolder and removes those that do not fit, see `sealed`.

    Returns:
        [train, valid, test]; None for a split without samples.

    Raises:
        ValueError: see `check_dataset`; or samples are requested of a split without data.
    """
    blends = [resolve_blend(train, "train"), resolve_blend(valid, "valid"), None]
    for index, name in enumerate(("train", "valid", "test")):
        if num_samples[index] and blends[index] is None:
            raise mistake(
                "num_samples",
                num_samples,
                problem=f"{num_samples[index]} {name} samples are requested, without {name} data",
                fix="name a dataset or ask for 0",
            )
        if not num_samples[index]:
            blends[index] = None
    if not any(blends):
        raise mistake("num_samples", num_samples, problem="requests no sample of any split")
    prefixes = sorted({prefix for blend in blends if blend for prefix in blend[0]})
    for prefix in prefixes:
        refuse_other_length(prefix, sequence_length)
    _check(prefixes, tokenizer)
    folder = os.path.join(cache_path, content_name(prefixes))
    dataset_config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=blends,
        tokenizer=tokenizer,
        path_to_cache=folder,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,  # attention makes its own causal mask
    )
    # Megatron builds on the first rank before the others read.
    checked = (
        sealed(folder, content_fingerprint(prefixes), "*Dataset-*") if _is_first_rank() else contextlib.nullcontext()
    )
    with checked:
        return BlendedMegatronDatasetBuilder(BinGPTDataset, list(num_samples), lambda: True, dataset_config).build()


def build_stream(
    train: Blend, samples: int, sequence_length: int, seed: int, tokenizer, cache_path: str, consumed: dict[str, int]
) -> StreamDataset:
    """Build the training samples of one stage, starting where earlier stages stopped.

    Args:
        samples: of the whole stage; the order within its stretch of each source depends on it.
        consumed: tokens read before, by source; see zaya_plugin.data.ledger.
    """
    uses = stage_use(train, samples, sequence_length, consumed, seed)
    _check([use.prefix for use in uses], tokenizer)
    return StreamDataset(uses, sequence_length, seed, tokenizer.eod, cache_path)


def _check(prefixes: Sequence[str], tokenizer) -> None:
    """Check the datasets on the first rank; every rank would read the same files."""
    for prefix in prefixes if _is_first_rank() else ():
        check_dataset(prefix, tokenizer.vocab_size, eod_id=getattr(tokenizer, "eod", None))


def _is_first_rank() -> bool:
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not distributed or torch.distributed.get_rank() == 0


class InTurn(torch.utils.data.Dataset):
    """Validation of several domains in one dataset: `period` samples of each domain in turn, over and over.

    Megatron 0.19 refuses --multiple-validation-sets without --full-validation, which reads every set to its end in
    every validation. In this package a validation is `eval_iters` batches of the first domain, then as many of the
    second, and so on. The place of a sample tells its domain,
    and a resumed run finds that place by the one count that Megatron keeps.

    Args:
        parts: datasets of one length, a multiple of `period`, or longer.
    """

    def __init__(self, parts: Sequence, period: int):
        assert parts and period > 0
        self.parts, self.period = parts, period
        self.rounds = min(map(len, parts)) // period
        self.split = getattr(parts[0], "index_split", getattr(parts[0], "split", None))  # Megatron's loader reads it

    def __len__(self) -> int:
        return self.rounds * self.period * len(self.parts)

    def __getitem__(self, index: int):
        turn, at = divmod(index, self.period)
        round_, part = divmod(turn, len(self.parts))
        return self.parts[part][round_ * self.period + at]


def mean_loss(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the loss of the blend: the mean of its domains' losses by weight."""
    return sum(weights[name] * loss for name, loss in losses.items()) / sum(weights[name] for name in losses)

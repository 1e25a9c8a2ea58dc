# SPDX-License-Identifier: Apache-2.0
"""The datasets of a run from blends: Megatron's GPTDatasets, and streams that go on from stage to stage."""

import os
from collections.abc import Callable

from zaya_plugin.data.check import check_dataset
from zaya_plugin.data.ledger import resolve_entries, stage_use
from zaya_plugin.data.prefixes import Blend, content_name, refuse_other_length, resolve_blend


def build_gpt_datasets(
    train_prefixes: Blend,
    valid_prefixes: Blend | None,
    num_samples: tuple[int, int, int],
    *,
    sequence_length: int,
    seed: int,
    tokenizer,
    cache_path: str | None,
    test_prefixes: Blend | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    create_attention_mask: bool = False,
    is_built_on_rank: Callable[[], bool] = lambda: True,
    **config,
) -> list:
    """Builds the GPTDatasets of a run through Megatron's BlendedMegatronDatasetBuilder; every rank must call it.

    Args:
        train_prefixes, valid_prefixes, test_prefixes: what to draw from, see `Blend` and `resolve_blend`.
        num_samples: sequences to draw for train, valid and test, over as many epochs as it takes; 0 builds no dataset.
        sequence_length: tokens of a sample; `tokens` and `labels` are int64 [sequence_length].
        seed: of the document and sample order.
        tokenizer: a Megatron tokenizer; its vocabulary must cover the data.
        cache_path: where Megatron keeps its sample indices, here in a folder named after the contents of the datasets,
            because Megatron's own key is the path alone and data that was prepared again would meet the old indices.
            None: beside the data.
        create_attention_mask: leave it off where the attention makes its own causal mask.
        config: further fields of megatron.core.datasets.gpt_dataset.GPTDatasetConfig.

    Returns:
        [train, valid, test]; None for a split without prefixes or samples.

    Raises:
        ValueError: see `check_dataset`; or samples are asked for of a split that has no prefixes.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from zaya_plugin.data.packed_dataset import BinGPTDataset

    blends = [
        resolve_blend(train_prefixes, "train"),
        resolve_blend(valid_prefixes, "valid"),
        resolve_blend(test_prefixes, "valid"),
    ]
    for name, count, index in zip(("train", "valid", "test"), num_samples, range(3), strict=True):
        if count and blends[index] is None:
            raise ValueError(
                f"{count} {name} samples are asked for, and there is no {name} data; name a dataset or ask for 0"
            )
        if not count:
            blends[index] = None
    if not any(blends):
        raise ValueError(f"num_samples {num_samples} asks for no sample of any split")
    prefixes = sorted({prefix for blend in blends if blend for prefix in blend[0]})
    for prefix in prefixes:
        refuse_other_length(prefix, sequence_length)
    if _rank() == 0:
        eod_id = tokenizer.eod if hasattr(tokenizer, "eod") else None
        for prefix in prefixes:
            check_dataset(prefix, tokenizer.vocab_size, eod_id=eod_id)
    if cache_path is not None:
        cache_path = os.path.join(cache_path, content_name(prefixes))
    dataset_config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=blends,
        tokenizer=tokenizer,
        path_to_cache=cache_path,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=create_attention_mask,
        **config,
    )
    return BlendedMegatronDatasetBuilder(BinGPTDataset, list(num_samples), is_built_on_rank, dataset_config).build()


def build_stream(
    train_prefixes: Blend,
    samples: int,
    sequence_length: int,
    seed: int,
    tokenizer,
    cache_path: str,
    consumed: dict[str, int],
):
    """The training samples of one stage, going on where earlier stages stopped; see zaya_plugin.data.stream_dataset.

    Args:
        train_prefixes: see `Blend`.
        samples: of the whole stage, on which the order within its stretch of each source depends.
        consumed: tokens read before, by source; see zaya_plugin.data.ledger.
    """
    from zaya_plugin.data.stream_dataset import StreamDataset

    one = isinstance(train_prefixes, str | os.PathLike)
    entries = [
        os.fspath(entry) if isinstance(entry, str | os.PathLike) else f"{entry[0]!r} {os.fspath(entry[1])}"
        for entry in ([train_prefixes] if one else train_prefixes)
    ]
    prefixes, weights = resolve_entries(entries)
    if _rank() == 0:
        for prefix in prefixes:
            check_dataset(prefix, tokenizer.vocab_size, eod_id=tokenizer.eod)
    uses = stage_use(entries, samples, sequence_length, consumed, seed)
    return StreamDataset(uses, weights, sequence_length, seed, tokenizer.eod, cache_path)


def _rank() -> int:
    import torch

    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )

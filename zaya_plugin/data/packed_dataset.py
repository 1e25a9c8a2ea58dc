# SPDX-License-Identifier: Apache-2.0
"""Megatron's GPTDataset with the loss mask of packed bins. Imports megatron.core, so dataset.py imports it when it is needed."""

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset

from zaya_plugin.data.packing import packed_loss_mask
from zaya_plugin.data.prefixes import packed_length


class BinGPTDataset(GPTDataset):
    """Of a set made by `zaya data pack` each sample is one bin, and positions that predict nothing are left out of the loss."""

    def __init__(self, indexed_dataset, dataset_path, *args, **kwargs):
        super().__init__(indexed_dataset, dataset_path, *args, **kwargs)
        self.packed = dataset_path is not None and packed_length(dataset_path) is not None

    def __getitem__(self, idx):
        """tokens, labels, position_ids int64 [s] and loss_mask float32 [s]."""
        sample = super().__getitem__(idx)
        if self.packed:
            mask = packed_loss_mask(sample["tokens"].numpy(), self.config.tokenizer.eod)
            sample["loss_mask"] = sample["loss_mask"] * torch.from_numpy(mask)
        return sample

# SPDX-License-Identifier: Apache-2.0
"""Build the whole model: Megatron's GPTModel with ZAYA1's block, RoPE on part of each head and a tied head."""

from __future__ import annotations

import torch
from megatron.core import parallel_state

from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.gpt_model import ZayaGPTModel
from zaya_plugin.model.layer_specs import zaya_block_spec
from zaya_plugin.optim.parameter_role import tag_parameters


def build_zaya_model(
    config: ZayaConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    rotary_base: int = 10000,
    rotary_percent: float = 0.5,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pg_collection=None,
    fp16_lm_cross_entropy: bool = False,
    parallel_output: bool = True,
) -> ZayaGPTModel:
    """Build a ZAYA1 model, its matrices marked for Muon.

    Args:
        config: model configuration.
        vocab_size: rows of the embedding, padding included; 262,272 in ZAYA1.
        max_sequence_length: longest sequence in tokens.
        rotary_base: RoPE base; 10,000 at 4K tokens, 1,000,000 at 32K, 5,000,000 at 131K (arXiv 2605.05365 table II).
        rotary_percent: share of each head's channels that RoPE rotates.
        pre_process, post_process, vp_stage, pg_collection, fp16_lm_cross_entropy, parallel_output: as in GPTModel.

    Returns:
        `model(input_ids, position_ids, attention_mask, labels=)` gives losses [b, s] or logits [b, s, v].

    Raises:
        ValueError: rotary_percent leaves no even number of channels to rotate.
    """
    rotary_channels = config.kv_channels * rotary_percent
    if not 0 < rotary_percent <= 1 or rotary_channels % 2:
        raise mistake(
            "rotary_percent",
            rotary_percent,
            problem=f"it rotates {rotary_channels:g} of kv_channels={config.kv_channels} channels",
            allowed="an even number of channels, at least 2",
            fix="rotary_percent=0.5, which is 64 of 128 channels in ZAYA1",
        )
    model = ZayaGPTModel(
        config,
        zaya_block_spec(config, vp_stage),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=fp16_lm_cross_entropy,
        parallel_output=parallel_output,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_percent=rotary_percent,
        rotary_base=rotary_base,
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    # Before DDP lays out its buffers, so that a matrix of Muon stays whole there; a recipe's assignment replaces it.
    tag_parameters(model)
    return model


def groups_of_one() -> None:
    """Start torch.distributed and Megatron's groups of one rank if they are missing."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()

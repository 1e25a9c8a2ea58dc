# SPDX-License-Identifier: Apache-2.0
"""The model that Megatron's arguments and a recipe describe, for `zaya train` and for a guest in another host."""

from __future__ import annotations

import argparse

from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import core_transformer_config_from_args

from zaya_plugin.config.schema import Recipe
from zaya_plugin.model.build import build_zaya_model
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.training.optimizer import assign_optimizers


def model_config(args: argparse.Namespace) -> ZayaConfig:
    """The model's configuration from Megatron's arguments."""
    return core_transformer_config_from_args(args, ZayaConfig)


def build_stage(
    recipe: Recipe,
    args: argparse.Namespace,
    config: ZayaConfig,
    pre_process=True,
    post_process=True,
    vp_stage=None,
    pg_collection=None,
) -> GPTModel:
    """One (virtual) pipeline stage, each of its parameters given to Muon or AdamW; the flags are GPTModel's."""
    model = build_zaya_model(
        config,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    # Before DDP lays out its buffers: what belongs to Muon stays whole there.
    assign_optimizers(recipe, model)
    return model

# SPDX-License-Identifier: Apache-2.0
"""The model that Megatron's arguments describe, for `zaya train`, for a guest in another host and for one process
alone.
"""

from __future__ import annotations

import argparse

from megatron.core.models.gpt import GPTModel
from megatron.training.arguments import core_transformer_config_from_args

from zaya_plugin.config.schema import Recipe
from zaya_plugin.model.build import build_zaya_model
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.training.optimizer import assign_optimizers


def model_config(args: argparse.Namespace) -> ZayaConfig:
    """Return the model's configuration from Megatron's arguments."""
    return core_transformer_config_from_args(args, ZayaConfig)


def build_model(args: argparse.Namespace, config: ZayaConfig | None = None, **stage) -> GPTModel:
    """Build one (virtual) pipeline stage; `stage` holds build_zaya_model's arguments for a stage and may replace its
    others.
    """
    described = dict(
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
    )
    return build_zaya_model(config or model_config(args), **described | stage)


def build_stage(recipe: Recipe, args: argparse.Namespace, config: ZayaConfig, **stage) -> GPTModel:
    """`build_model` with each parameter assigned to Muon or AdamW, before DDP lays out its buffers."""
    model = build_model(args, config, **stage)
    assign_optimizers(recipe, model)
    return model

# SPDX-License-Identifier: Apache-2.0
"""From a run's arguments to its model, for `zaya train`, for a guest in another host and for one process alone.

A process that inspects or measures a recipe's model without a run begins with `arguments_of_model` or
`arguments_without_data`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from megatron.training.arguments import core_transformer_config_from_args

from zaya_plugin.config.arguments import OWN_ARGUMENTS, megatron_arguments
from zaya_plugin.config.megatron_review import key_of
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import vocabulary_of
from zaya_plugin.ground.errors import message, mistake
from zaya_plugin.model.build import build_zaya_model
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.gpt_model import ZayaGPTModel
from zaya_plugin.training.optimizer import assign_optimizers

# With any of these Megatron makes folders or looks for a checkpoint while it validates its arguments.
RUN_ARGUMENTS = ("save", "save_interval", "load", "exit_on_missing_checkpoint")


def parse_arguments(values: dict[str, Any]) -> argparse.Namespace:
    """Return Megatron's namespace of `values`, after Megatron's own validation.

    Raises:
        ValueError: Megatron does not know a name, or its validation refuses a combination.
    """
    # The Megatron of Primus, in which ZAYA is a guest, has no such function.
    from megatron.training.arguments import parse_and_validate_args

    def add_own(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        group = parser.add_argument_group("zaya")
        for name in OWN_ARGUMENTS:
            group.add_argument("--" + name.replace("_", "-"), default=values.get(name))
        known = {action.dest for action in parser._actions}
        if unknown := sorted(set(values) - known):
            allowed = "names of Megatron's command line with underscores (--moe-router-dtype is moe_router_dtype)"
            keys = {key_of(name): values[name] for name in unknown}
            problem = "Megatron has no such argument"
            raise ValueError(
                "\n".join(
                    message(key, value, problem=problem, allowed=allowed, fix=f"remove {key}")
                    for key, value in keys.items()
                )
            )
        parser.set_defaults(**values)
        return parser

    # Values are passed as the parser's defaults: Megatron parses an empty command line and validates the result.
    argv, sys.argv = sys.argv, sys.argv[:1]
    try:
        return parse_and_validate_args(extra_args_provider=add_own)
    except AssertionError as refused:
        raise mistake(
            "recipe",
            problem=f"Megatron's validation of its arguments refuses it: {refused}",
            fix="change the keys that this message names; a recipe field has the name of its Megatron argument",
        ) from refused
    finally:
        sys.argv = argv


def arguments_of_model(values: dict[str, Any]) -> argparse.Namespace:
    """Return Megatron's arguments from those of a run (zaya_plugin.config.arguments), without the run's files."""
    return parse_arguments({name: value for name, value in values.items() if name not in RUN_ARGUMENTS})


def arguments_without_data(recipe: Recipe, **further: Any) -> argparse.Namespace:
    """Return Megatron's arguments of a recipe, of whose data only the size of the vocabulary is read. further: arguments
    that replace the recipe's.
    """
    tokenizer = {"tokenizer_type": "NullTokenizer", "vocab_size": vocabulary_of(recipe)}
    return arguments_of_model({**megatron_arguments(recipe, tokenizer), **further})


def model_config(args: argparse.Namespace) -> ZayaConfig:
    """Return the model's configuration from Megatron's arguments."""
    return core_transformer_config_from_args(args, ZayaConfig)


def build_model(args: argparse.Namespace, config: ZayaConfig, **stage) -> ZayaGPTModel:
    """Build one (virtual) pipeline stage. stage: build_zaya_model's arguments for a stage."""
    return build_zaya_model(
        config,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        rotary_base=args.rotary_base,
        rotary_percent=args.rotary_percent,
        **stage,
    )


def build_stage(recipe: Recipe, args: argparse.Namespace, config: ZayaConfig, **stage) -> ZayaGPTModel:
    """`build_model` with each parameter assigned to Muon or AdamW, before DDP lays out its buffers."""
    model = build_model(args, config, **stage)
    assign_optimizers(recipe, model)
    return model

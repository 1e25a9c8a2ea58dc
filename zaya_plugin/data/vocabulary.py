# SPDX-License-Identifier: Apache-2.0
"""How many rows a recipe's embedding has, before Megatron counts them. No torch import."""

from __future__ import annotations

import contextlib

from zaya_plugin.config.schema import MISSING, Recipe

# Rows of ZAYA1-base's table, for recipes whose data is not there yet.
DEFAULT_VOCABULARY = 262_272


def vocabulary_of(recipe: Recipe) -> int:
    """The data's vocabulary where it can be read, else ZAYA1-base's."""
    from zaya_plugin.data.check import locate

    with contextlib.suppress(ValueError):
        if recipe.data.path != MISSING and (manifest := locate(recipe.data.path)[0]) is not None:
            return manifest.tokenizer.vocab_size
    return DEFAULT_VOCABULARY


def padded(rows: int, divisor: int) -> int:
    """`rows` and those that fill up to a multiple of `divisor` (model.make_vocab_size_divisible_by)."""
    return -(-rows // divisor) * divisor

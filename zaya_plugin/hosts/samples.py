# SPDX-License-Identifier: Apache-2.0
"""Continuations of stage.sample_prompts by the model that is trained."""

from __future__ import annotations

from megatron.core.utils import unwrap_model
from torch import nn

from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.prompts import Prompts
from zaya_plugin.inference.decoder import Decoder
from zaya_plugin.inference.sampling import generate
from zaya_plugin.inference.sampling_options import Sampling

PROMPTS_AT_ONCE = 32


def continuations(recipe: Recipe, prompts: Prompts, chunk: nn.Module, end: int) -> list[str]:
    """Return the text that follows each prompt, up to the end of a document or stage.sample_tokens.

    All ranks call it: they hold the same weights, and none waits for another. Nothing of the training
    changes: dropout is off, draws have a generator of their own, and steps are not captured as graphs.

    Args:
        chunk: the whole model, as DDP wraps it. end: the token that ends a document.
    """
    model, stage = unwrap_model(chunk), recipe.stage
    trains = model.training
    model.eval()
    try:
        decoder, sampling = Decoder(model, graphs=False), Sampling(stage.sample_temperature, seed=recipe.seed)
        texts = []
        for first in range(0, len(prompts.tokens), PROMPTS_AT_ONCE):
            part = prompts.tokens[first : first + PROMPTS_AT_ONCE]
            answers = generate(decoder, part, stage.sample_tokens, sampling, stop=(end,))
            texts += [prompts.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        return texts
    finally:
        model.train(trains)

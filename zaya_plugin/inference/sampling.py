# SPDX-License-Identifier: Apache-2.0
"""Choose tokens and continue prompts: greedy, or drawn after temperature, top-k and top-p, in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from zaya_plugin.inference.decoder import Decoder
from zaya_plugin.inference.sampling_options import GREEDY, Sampling


def kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return logits [b, v] over the temperature, with -inf for the tokens that top-k and top-p remove.

    top-k keeps all tokens that are as probable as the k-th. top-p keeps the fewest most probable tokens that together
    reach it; among equal ones the sort decides.
    """
    scores = logits / sampling.temperature
    if sampling.top_k:
        least = scores.topk(min(sampling.top_k, scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if sampling.top_p < 1:
        ascending, order = scores.sort()
        removed = ascending.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        removed[:, -1] = False
        scores = scores.masked_fill(torch.zeros_like(removed).scatter(1, order, removed), float("-inf"))
    return scores


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> Tensor:
    """Return token ids int64 [b] for logits [b, v]."""
    logits = logits.float()
    if not sampling.temperature:
        return logits.argmax(-1)
    return torch.multinomial(kept(logits, sampling).softmax(-1), 1, generator=generator).squeeze(1)


def continued(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    ends: Callable[[int, int], bool],
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, None for those that have ended, until all have.

    Args:
        ends: ends(number of the prompt, token) returns whether the prompt ends with this token, which is still yielded.
    """
    generator = torch.Generator(decoder.device).manual_seed(sampling.seed)
    running = [True] * len(prompts)
    logits = decoder.begin(prompts, max_new_tokens)
    for count in range(1, max_new_tokens + 1):
        chosen = choose(logits, sampling, generator)
        tokens = [token if runs else None for token, runs in zip(chosen.tolist(), running, strict=True)]
        running = [token is not None and not ends(number, token) for number, token in enumerate(tokens)]
        yield tokens
        if count == max_new_tokens or not any(running):
            return
        logits = decoder.step(chosen)


def generate(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each prompt. stop: tokens that end one; they are part of the result."""
    answers: list[list[int]] = [[] for _ in prompts]
    for tokens in continued(decoder, prompts, max_new_tokens, sampling, lambda _, token: token in stop):
        for answer, token in zip(answers, tokens, strict=True):
            answer.extend([] if token is None else [token])
    return answers

# SPDX-License-Identifier: Apache-2.0
"""Choose tokens and continue prompts: greedy, or drawn after temperature, top-k and top-p, in transformers' order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zaya_plugin.errors import mistake
from zaya_plugin.inference.decoder import Decoder

WARM = "0 (greedy) or more; the least above 0 is 0.001"


@dataclass(frozen=True)
class Sampling:
    """temperature 0: the most probable token. top_k 0 and top_p 1 leave all tokens."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        rules = (
            # logits over less overflow fp32
            ("--temperature", self.temperature, self.temperature == 0 or 1e-3 <= self.temperature < 1e6, WARM),
            ("--top-k", self.top_k, self.top_k >= 0, "0 (all tokens) or more"),
            ("--top-p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1"),
        )
        for option, value, ok, allowed in rules:
            if not ok:
                raise mistake(option, value, problem="is out of range", allowed=allowed)
        if not self.temperature and (self.top_k or self.top_p < 1):
            raise mistake(
                "--temperature",
                self.temperature,
                problem="takes the most probable token, so --top-k and --top-p have no effect",
                allowed="above 0 with --top-k or --top-p",
                fix="--temperature 1",
            )


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
    sampling: Sampling = Sampling(),
    stop: Sequence[int] = (),
) -> list[list[int]]:
    """Return the new tokens of each prompt. stop: tokens that end one; they are part of the result."""
    found: list[list[int]] = [[] for _ in prompts]
    for tokens in continued(decoder, prompts, max_new_tokens, sampling, lambda _, token: token in stop):
        for each, token in zip(found, tokens, strict=True):
            each.extend([] if token is None else [token])
    return found

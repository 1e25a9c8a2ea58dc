# SPDX-License-Identifier: Apache-2.0
"""A model as lm-evaluation-harness (package lm_eval) asks for it. Imported where that package is installed.

Tokens, truncation and stops are those of its class for transformers (HFLM); where the training data has no bos, none is
added.
"""

from __future__ import annotations

import contextlib
import sys

import torch
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.progress import bar
from zaya_plugin.inference.opening import Opened
from zaya_plugin.inference.sampling import continued
from zaya_plugin.inference.sampling_options import Sampling


class ZayaLM(TemplateLM):
    """batch_size: sequences computed at once."""

    max_gen_toks = 256  # HFLM's

    def __init__(self, opened: Opened, batch_size: int):
        super().__init__()
        self.opened, self.batch_size, self.decoder = opened, batch_size, opened.decoder
        self.max_length = opened.described.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        return self.opened.stop[0]

    @property
    def prefix_token_id(self) -> int:
        return self.opened.first

    @property
    def tokenizer_name(self) -> str:
        return str(self.opened.home)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        if add_special_tokens is None:
            prefix = self.opened.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False)
            add_special_tokens = not (prefix and string.startswith(prefix))
        return self.opened.tokens_of(string, add_special_tokens)

    @torch.no_grad()
    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        order = sorted(range(len(requests)), key=lambda place: -len(requests[place][1]) - len(requests[place][2]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with bar("log-likelihoods", len(order), " requests") as shown:
            for begin in range(0, len(order), self.batch_size):
                places = order[begin : begin + self.batch_size]
                # Of a sequence that is too long its end is kept; the last token is predicted, and predicts nothing.
                rows = [[*requests[place][1], *requests[place][2]][-(self.max_length + 1) :] for place in places]
                longest = max(map(len, rows)) - 1
                padded = torch.tensor([[*row[:-1], *[0] * (longest - len(row) + 1)] for row in rows])
                hidden = self.decoder.hidden_states(padded.to(self.decoder.device))
                for column, (place, row) in enumerate(zip(places, rows, strict=True)):
                    targets = torch.tensor(requests[place][2][-len(row) + 1 :], device=self.decoder.device)
                    end = len(row) - 1
                    logits = self.decoder.logits(hidden[end - len(targets) : end, column]).float()
                    chosen = logits.log_softmax(-1).gather(1, targets.unsqueeze(1))
                    results[place] = (chosen.sum().item(), bool((logits.argmax(-1) == targets).all()))
                shown.update(len(places))
        return results

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        results = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
            results.append(sum(value for value, _ in self._loglikelihood_tokens(parts)))
        return results

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        groups: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(place)
        results = [""] * len(requests)
        with bar("texts", len(requests), " requests") as shown:
            for places in groups.values():
                places.sort(key=lambda place: -len(requests[place].args[0]))
                for begin in range(0, len(places), self.batch_size):
                    part = places[begin : begin + self.batch_size]
                    texts = self._until([requests[place].args[0] for place in part], requests[part[0]].args[1])
                    for place, text in zip(part, texts, strict=True):
                        results[place] = text
                    shown.update(len(part))
        return results

    def _until(self, contexts: list[str], options: dict) -> list[str]:
        until = options.get("until") or []
        until = [until] if isinstance(until, str) else until
        limit = int(options.get("max_gen_toks", self.max_gen_toks))
        samples = options.get("do_sample", bool(options.get("temperature")))
        sampling = Sampling()
        if samples:
            top_k, top_p = int(options.get("top_k") or 0), float(options.get("top_p") or 1.0)
            sampling = Sampling(float(options.get("temperature") or 1.0), top_k, top_p)
        prompts = [self.tok_encode(text)[-max(1, self.max_length - limit) :] for text in contexts]
        new: list[list[int]] = [[] for _ in prompts]

        def ends(number: int, token: int) -> bool:
            if token in self.opened.stop:
                return True
            new[number].append(token)
            text = self.opened.text_of(new[number])
            return any(stop and stop in text for stop in until)

        for _ in continued(self.decoder, prompts, limit, sampling, ends):
            pass
        texts = [self.opened.text_of(tokens) for tokens in new]
        for stop in filter(None, until):
            texts = [text.split(stop)[0] for text in texts]
        return texts


def task_manager(include: str | None, defaults: bool = True) -> TaskManager:
    """Return the tasks of the folder `include`, and those of the package where `defaults`."""
    return TaskManager(include_path=include, include_defaults=defaults)


def scores(
    opened: Opened,
    manager: TaskManager,
    names: list[str],
    num_fewshot: int | None,
    batch_size: int,
    limit: int | None,
    runs_code: bool = False,
) -> dict[str, dict[str, float]]:
    """Return the figures of each of the tasks `names`: metric -> value, and <metric>_stderr where the package states
    it. The others are options of `zaya eval`. runs_code: whether tasks may run what the model wrote.
    """
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise mistake(
            "--tasks", ",".join(unknown), problem="no such task", allowed="a task of lm_eval, or of --include DIR"
        )
    with contextlib.redirect_stdout(sys.stderr):  # of the package; stdout of the command is the table
        evaluated = simple_evaluate(
            model=ZayaLM(opened, batch_size),
            tasks=names,
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            log_samples=False,
            confirm_run_unsafe_code=runs_code,
        )["results"]
    return {name: _figures(values) for name, values in evaluated.items()}


def _figures(values: dict) -> dict[str, float]:
    """`acc,none` -> acc; a filter other than none stays in the name."""
    figures = {}
    for key, value in values.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool) and "," in key:
            metric, _, filter_ = key.partition(",")
            figures[metric if filter_ == "none" else f"{metric} ({filter_})"] = value
    return figures

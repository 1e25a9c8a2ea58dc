# SPDX-License-Identifier: Apache-2.0
"""`zaya generate`: text from a checkpoint or a published model. Loads torch only when it runs."""

import argparse
import json
import sys
from pathlib import Path

from zaya_plugin.commands.parser import STEP, command, option
from zaya_plugin.commands.process import prepare_torch
from zaya_plugin.data.prompts import lines_of
from zaya_plugin.data.routed_experts import write_sequences
from zaya_plugin.data.tokenizer import chat_prompt, template_file
from zaya_plugin.ground.errors import check_utf8, mistake
from zaya_plugin.ground.option_numbers import INT32, MOST_SEED, MOST_TOKENS, real_number, whole_number
from zaya_plugin.inference.opening import check_room, find_model, open_model
from zaya_plugin.inference.sampling_options import Sampling

# The options of a model, which `zaya generate` and `zaya eval` have.
MODEL = (
    option(
        "model",
        metavar="MODEL",
        help="a run directory, a directory of iter_* folders, or one of these; or a published model: a folder with "
        "safetensors files (native, legacy or smoe layout), or a name on the Hugging Face Hub. It runs in this process, "
        "without ranks, on the GPU if there is one",
    ),
    STEP,
    option("--tokenizer", metavar="DIR", help="folder with tokenizer.json; default: the model's own"),
    option("--device", choices=("cpu", "cuda"), help="default: cuda where there is one"),
    option(
        "--no-verify",
        dest="verify",
        action="store_false",
        help="do not compare a checkpoint's files with their checksums, which reads all of them",
    ),
    option(
        "--dtype", choices=("bf16", "fp32"), help="of the computation; default: as the run computed, or as published"
    ),
)


ROUTED = option(
    "--routed-experts",
    type=Path,
    metavar="FILE",
    help="write the classes that the routers choose: .npy int16 [tokens, layers, 1], sequences one behind another, or "
    ".jsonl with an object a prompt: its token ids, and routed_experts as vLLM sends them (base64)",
)


@command(
    "generate",
    *MODEL,
    option("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times"),
    option("--prompts", metavar="FILE", help="a prompt a line; - reads standard input"),
    option("--chat", action="store_true", help="the prompts are messages of a user, which the model answers"),
    option("--chat-template", metavar="NAME", help="in place of the model's: chatml, zaya1, or a Jinja file"),
    option("--max-new-tokens", type=whole_number(1, MOST_TOKENS), default=128, help="default: 128"),
    option(
        "--temperature", type=real_number(0, 1000), default=0.0, help="0, the default, takes the most probable token"
    ),
    option("--top-k", type=whole_number(0, INT32), default=0, help="draw from the K most probable tokens; 0: from all"),
    option(
        "--top-p",
        type=real_number(1e-6, 1),
        default=1.0,
        help="draw from the most probable tokens that together reach P; 1: from all",
    ),
    option("--seed", type=whole_number(0, MOST_SEED), default=0, help="of the draws; the same command, the same text"),
    ROUTED,
    option("--batch-size", type=whole_number(1, 65_536), default=32, help="prompts computed at once; default: 32"),
    option(
        "--json", action="store_true", help="print an object a prompt: prompt, text, tokens, ended (at an end token)"
    ),
    word_option="--prompt",
    imports_large_packages=True,
)
def generate(options: argparse.Namespace) -> None:
    """Continues prompts with a model, greedy or sampled.

    The text of a single prompt appears token by token; texts of several appear one after another, each when its batch
    is done. A text ends at the tokenizer's end token or after --max-new-tokens. Prompts are continued as they are: no
    token (bos) is added unless the texts of the run's training data, or the tokenizer of a published model, have it.
    With --chat each prompt is a user's message in the model's chat template, and its answer alone is printed.

    examples:
      zaya generate runs/mine --prompt 'def fibonacci(n):'
      zaya generate exports/mine --prompt 'Once' --prompt 'The capital of France is' --temperature 0.8 --top-p 0.95
      zaya generate runs/finetune_demo --chat --prompt 'What is email.errors.MessageError?'
      zaya generate runs/mine --step 2000 --prompts questions.txt --json > answers.jsonl

    Exit codes: 0, 2 a mistake on the command line or in the files.
    """
    for text in options.prompt:
        check_utf8("--prompt", text)
    texts = [*options.prompt, *(lines_of("--prompts", options.prompts) if options.prompts is not None else [])]
    if not texts:
        raise mistake("--prompt", problem="was not given", fix="--prompt TEXT, or --prompts FILE")
    if options.chat_template and not options.chat:
        raise mistake("--chat-template", options.chat_template, problem="is not read without --chat", fix="give --chat")
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.seed)
    model = find_model(options)
    prepare_torch()
    opened = open_model(options, model)
    if options.chat:
        template = options.chat_template and template_file(options.chat_template)
        prompts = [chat_prompt(str(opened.home), text, template) for text in texts]
    else:
        prompts = [opened.tokens_of(text) for text in texts]
    for text, tokens in zip(texts, prompts, strict=True):
        _check(opened, text, tokens)
    longest, context = max(map(len, prompts)) + options.max_new_tokens, opened.described.max_position_embeddings
    if longest > context:
        print(f"note: {longest} tokens are more than the {context} that the model was trained on", file=sys.stderr)
    check_room(opened, min(options.batch_size, len(prompts)), max(map(len, prompts)), options.max_new_tokens)
    routed = []
    for begin in range(0, len(prompts), options.batch_size):
        part = slice(begin, begin + options.batch_size)
        answers = _print_texts(opened, texts[part], prompts[part], options, sampling, alone=len(prompts) == 1)
        for number, answer in enumerate(answers if options.routed_experts is not None else ()):
            prompt = prompts[begin + number]
            routed.append(([*prompt, *answer], opened.decoder.routed_experts(number, len(prompt), len(answer))))
    if options.routed_experts is not None:
        write_sequences(options.routed_experts, routed)


def _check(opened, text: str, tokens: list[int]) -> None:
    rows = opened.described.vocab_size
    if not tokens:
        raise mistake("--prompt", text, problem="has no token", allowed="a text of at least one token")
    if max(tokens) >= rows:
        raise mistake(
            "--tokenizer",
            opened.home,
            problem=f"gives token {max(tokens)}, and the model has {rows} rows",
            allowed="the tokenizer that the model was trained with",
        )


def _print_texts(opened, texts, prompts, options, sampling, alone: bool) -> list[list[int]]:
    """Print the continuations, and return their tokens."""
    from tokenizers.decoders import DecodeStream

    from zaya_plugin.inference.sampling import continued

    streams = alone and not options.json
    decoded, answers, shown = DecodeStream(skip_special_tokens=True), [[] for _ in prompts], ""
    if streams:
        print("" if options.chat else texts[0], end="", flush=True)
    limit, stop = options.max_new_tokens, set(opened.stop)
    for tokens in continued(opened.decoder, prompts, limit, sampling, lambda _, token: token in stop):
        for answer, token in zip(answers, tokens, strict=True):
            answer.extend([] if token is None else [token])
        if streams and (piece := decoded.step(opened.tokenizer, tokens[0])):
            print(piece, end="", flush=True)
            shown += piece
    if streams:
        # The stream withholds a character whose bytes are not complete; as in transformers it is U+FFFD at the end.
        print(opened.text_of(answers[0])[len(shown) :])
        return answers
    for text, new in zip(texts, answers, strict=True):
        if options.json:
            row = {"prompt": text, "text": opened.text_of(new), "tokens": new, "ended": new[-1] in stop}
            print(json.dumps(row, ensure_ascii=False), flush=True)
        else:
            print(f"{'' if options.chat else text}{opened.text_of(new)}\n", flush=True)
    return answers

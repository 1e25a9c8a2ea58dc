# SPDX-License-Identifier: Apache-2.0
"""`zaya data prepare`: the options of making a dataset from text."""

import os

from zaya_plugin.commands.datasets import data_parser
from zaya_plugin.commands.parser import Parser, option
from zaya_plugin.corpus.inputs import DEFAULT_ENDINGS, LINES, PACKINGS, STDLIB
from zaya_plugin.corpus.prepare import DEFAULT_BPE, HELD_BYTES, LARGEST_BPE, MOST_WORKERS, STDLIB_BYTES, prepare
from zaya_plugin.data.tokenizer import MIN_BPE_ENTRIES
from zaya_plugin.ground.option_numbers import MOST_AMOUNT, fraction, size, size_up_to, whole_number

DESCRIPTION = """\
Turn text into a Megatron indexed dataset: train.bin/.idx and valid.bin/.idx, with its tokenizer and a manifest.

The same command continues an interrupted run; on a finished dataset it does nothing.
Documents that cannot be used are listed in <output>/rejected.jsonl with file, line and reason."""

EXAMPLES = """\
examples:
  # the demo: sources of this Python's standard library, a tokenizer trained on them, a few seconds
  zaya data prepare --output data/demo

  # your own text files, with a tokenizer trained on them
  zaya data prepare --input ~/notes --glob '*.md' --glob '*.txt' --train-bpe 8192 --output data/notes

  # jsonl shards with a Hugging Face tokenizer (a name on the hub, or a directory that holds tokenizer.json)
  zaya data prepare --input 'shards/*.jsonl.gz' --field content --tokenizer Zyphra/ZAYA1-base --workers 8 --output \\
      data/web

  # chats, one a jsonl line, by the tokenizer's own template; the loss is taken on the answers
  zaya data prepare --chat --input chats.jsonl --tokenizer weights/zaya1/tokenizer --output data/chats

  # chats of the demo: questions about functions of the standard library
  zaya data prepare --chat --tokenizer exports/mine --chat-template chatml --output data/demo-chats

  # fail rather than lose a document, and keep everything for training
  zaya data prepare --input corpus.jsonl --max-rejects 0 --valid-fraction 0 --output data/corpus"""


def parser() -> Parser:
    return data_parser(
        "prepare",
        prepare,
        DESCRIPTION,
        EXAMPLES,
        option(
            "--output",
            required=True,
            metavar="DIR",
            help="directory of the dataset; must not exist yet, or be an unfinished one",
        ),
        option(
            "--input",
            nargs="+",
            default=[STDLIB],
            metavar="PATH",
            help="files, directories, quoted patterns, or stdlib (default) for the sources of this Python's standard "
            f"library; {' '.join(LINES)} hold a document a line, .parquet one a row, any other file is a document; all "
            f"but .parquet also as {' '.join(PACKINGS)}",
            group="text",
        ),
        option(
            "--glob",
            action="append",
            metavar="PATTERN",
            help="which files of a directory; repeat for several (default: files that end with "
            f"{' '.join(DEFAULT_ENDINGS)}, packed or not, in small or capital letters)",
            group="text",
        ),
        option(
            "--field",
            default="text",
            metavar="NAME",
            help="field of a jsonl line, or column, that holds the text (default: text)",
            group="text",
        ),
        option(
            "--chat",
            action="store_true",
            help="the lines of the files are chats: `messages` with role and content, or `conversations` with from and "
            "value; they are encoded by the tokenizer's chat template, and the tokens of their answers are marked; of "
            "stdlib a chat is a function's name and the first paragraph of its docstring",
            group="text",
        ),
        option(
            "--max-bytes",
            type=size,
            metavar="SIZE",
            help="stop before the document that would take the input past this "
            f"(default: everything; {STDLIB_BYTES // 10**6}M for stdlib alone)",
            group="text",
        ),
        option(
            "--max-document-bytes",
            type=size_up_to(HELD_BYTES),
            default=8_000_000,
            metavar="SIZE",
            help="reject longer documents; a worker needs about 130 times this in memory for one that long (default: "
            "8M)",
            group="text",
        ),
        option(
            "--deduplicate",
            choices=("text", "id"),
            help="of documents with the same text, or the same --id-field, keep the first (default: keep all)",
            group="text",
        ),
        option(
            "--id-field",
            default="id",
            metavar="NAME",
            help="field of a jsonl line, or column, that holds its id (default: id)",
            group="text",
        ),
        option(
            "--tokenizer",
            metavar="NAME",
            help="Hugging Face tokenizer: a directory or a name on the hub",
            group="tokenizer",
        ),
        option(
            "--train-bpe",
            type=whole_number(MIN_BPE_ENTRIES, LARGEST_BPE),
            metavar="VOCAB_SIZE",
            help=f"train a byte-level BPE on the training documents (default, with {DEFAULT_BPE})",
            group="tokenizer",
        ),
        option(
            "--train-bpe-bytes",
            type=size,
            default=64_000_000,
            metavar="SIZE",
            help="train the BPE on no more than this much input, from its beginning (default: 64M)",
            group="tokenizer",
        ),
        option(
            "--chat-template",
            metavar="NAME",
            help="chatml, zaya1 (ChatML behind bos), or the file of a Jinja template; replaces the tokenizer's own, "
            "which that of a base model lacks",
            group="tokenizer",
        ),
        option(
            "--no-append-eod",
            dest="append_eod",
            action="store_false",
            help="do not end each document with the tokenizer's eos token; what its post-processor adds (bos) is added",
            group="tokenizer",
        ),
        option(
            "--valid-fraction",
            type=fraction,
            default=0.05,
            metavar="F",
            help="documents held out for validation, chosen by a hash of their text; "
            "0 writes a single text.bin/.idx (default: 0.05)",
            group="output and run",
        ),
        option(
            "--workers",
            type=whole_number(1, MOST_WORKERS),
            default=min(os.cpu_count() or 1, 8),
            metavar="N",
            help="processes; 1 starts none and works in this one (default: number of cores, at most 8)",
            group="output and run",
        ),
        option(
            "--part-bytes",
            type=size_up_to(HELD_BYTES),
            metavar="SIZE",
            help="input tokenised at a time and redone after an interruption (default: 16M, less for a small input)",
            group="output and run",
        ),
        option(
            "--max-rejects",
            type=whole_number(0, MOST_AMOUNT),
            metavar="N",
            help="fail when more documents than this are rejected (default: no limit)",
            group="output and run",
        ),
        option(
            "--overwrite",
            action="store_true",
            help="replace a dataset, or drop an unfinished one, made with other arguments; "
            "the old one stays until the new one is whole",
            group="output and run",
        ),
        option(
            "--quiet",
            action="store_true",
            help="no progress bar and no summary; problems are still reported",
            group="output and run",
        ),
    )

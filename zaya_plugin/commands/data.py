# SPDX-License-Identifier: Apache-2.0
"""`zaya data ...`: the options of each command, and how the same command continues after a failure. No torch import."""

import argparse
import os
import sys
import warnings
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial, wraps
from typing import Any

from zaya_plugin.commands.parser import QUIET, TOKENIZER, Option, Parser, command, option
from zaya_plugin.corpus.bundle import PlannedRun
from zaya_plugin.corpus.bundle import bundle as bundle_datasets
from zaya_plugin.corpus.inputs import DEFAULT_ENDINGS, LINES, PACKINGS, STDLIB
from zaya_plugin.corpus.inspect import inspect as print_samples
from zaya_plugin.corpus.pack import LONGEST_BIN
from zaya_plugin.corpus.pack import pack as pack_dataset
from zaya_plugin.corpus.prepare import DEFAULT_BPE, HELD_BYTES, LARGEST_BPE, MOST_WORKERS, STDLIB_BYTES
from zaya_plugin.corpus.prepare import prepare as prepare_dataset
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.fingerprint import fingerprint
from zaya_plugin.data.ledger import report
from zaya_plugin.data.prepared import MARKS, DatasetWarning, check_dataset, locate, tokenizer_of
from zaya_plugin.data.sources import find_sources, named_datasets
from zaya_plugin.data.tokenizer import MIN_BPE_ENTRIES, describe
from zaya_plugin.ground.errors import message, mistake, of_the_machine
from zaya_plugin.ground.option_numbers import (
    INT32,
    MOST_AMOUNT,
    MOST_RANKS,
    MOST_STEPS,
    MOST_TOKENS,
    YEAR,
    fraction,
    real_number,
    size,
    size_up_to,
    whole_number,
)
from zaya_plugin.ground.progress import bar

DATA_EXTRA = ("tokenizers", "zstandard", "pyarrow")  # of pyproject.toml


def data_command(name: str, *rows: Option, **more: Any) -> Callable[[Callable], Callable[[], Parser]]:
    """Make a function the command `zaya data <name>`. options.workspace is that of --output, None without; after a
    failure the message says what of it is kept.
    """
    return lambda action: command(f"data {name}", *rows, **more)(wraps(action)(partial(_run, name, action)))


def _run(name: str, action: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> None:
    output = getattr(options, "output", None)
    options.workspace = workspace = Workspace(output, options.overwrite) if output else None
    try:
        action(options)
    except BrokenProcessPool:
        raise mistake(
            "--workers",
            problem="a worker process was killed, most often because memory ran out" + _kept(workspace),
            fix="fewer --workers or a smaller --max-document-bytes",
        ) from None
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("zaya_plugin"):
            raise
        package = error.name.partition(".")[0]
        fix = f"pip install {package}" + (", or pip install 'zaya_plugin[data]'" if package in DATA_EXTRA else "")
        fix = "use the environment that you train in" if package in ("torch", "megatron") else fix
        raise mistake(
            f"zaya data {name}",
            problem=f"requires the package {package}, which is not installed{_kept(workspace)}",
            fix=fix,
        ) from error
    except BrokenPipeError:  # `zaya data inspect ... | head`
        raise
    except (OSError, MemoryError) as error:
        text = of_the_machine(error, workspace.partial if workspace else ".", offline=True)
        kept = _kept(workspace)
        text = text or message(f"zaya data {name}", problem=str(error))
        raise ValueError(text + kept.replace("; ", " ", 1) + "." * bool(kept)) from error
    except KeyboardInterrupt:
        print(f"interrupted{_kept(workspace)}", file=sys.stderr)
        raise


def _kept(workspace: Workspace | None) -> str:
    """Return the end of a message: the state of an unfinished dataset, and how the same command continues."""
    if workspace is None or not os.path.isfile(workspace.plan_file):
        return ""
    untouched = f"; {workspace.output} was not touched"
    if not workspace.has_work():
        return f"{untouched}, and the same command starts from the beginning"
    return f"{untouched}, finished work is kept in {workspace.partial}, and the same command continues from there"


def recipe_of(options: argparse.Namespace):
    """Return the Recipe of the command line, composed as `zaya train` does, with its place in the data; None for
    datasets.
    """
    if options.datasets:
        return None
    # In the function, so that the commands without a recipe start without Hydra.
    from zaya_plugin.config.compose import compose
    from zaya_plugin.handover.data_places import with_consumed

    return with_consumed(compose(options.overrides))


@data_command(
    "prepare",
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
        help="reject longer documents; a worker needs about 130 times this in memory for one that long (default: 8M)",
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
def prepare(options: argparse.Namespace) -> None:
    """Turn text into a Megatron indexed dataset: train.bin/.idx and valid.bin/.idx, with its tokenizer and a manifest.

    The same command continues an interrupted run; on a finished dataset it does nothing. Documents that cannot be used
    are listed in <output>/rejected.jsonl with file, line and reason.

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
      zaya data prepare --input corpus.jsonl --max-rejects 0 --valid-fraction 0 --output data/corpus
    """
    prepare_dataset(options, options.workspace)


@data_command(
    "pack",
    option("source", metavar="DATASET", help="directory written by `zaya data prepare`"),
    option(
        "--sequence-length",
        required=True,
        type=whole_number(2, LONGEST_BIN),
        metavar="N",
        help=f"tokens of a bin, at most {LONGEST_BIN:,}",
    ),
    option("--output", required=True, metavar="DIR", help="directory of the packed dataset"),
    option(
        "--long",
        choices=("split", "drop"),
        help="a document longer than a bin: split it into bins of its own and a rest, or drop it (default: split; "
        "chats are dropped)",
    ),
    option(
        "--trim-reasoning",
        nargs=2,
        metavar=("BEGIN", "END"),
        help="markers of reasoning: a longer document with such blocks loses the end of the last one, then the "
        "earlier ones, and is dropped if that is not enough or it has no answer",
    ),
    option("--overwrite", action="store_true", help="make the dataset again in place of what --output holds"),
    QUIET,
)
def pack(options: argparse.Namespace) -> None:
    """Pack whole documents of a prepared dataset into bins of --sequence-length tokens, best fit first, one bin a
    training sample.

    Train on the result with data.packing=documents, which keeps the documents of a bin apart; ends of documents and
    filling are left out of the loss. An interrupted run leaves nothing in the way of the same command.

    examples:
      zaya data pack data/web --sequence-length 4096 --output data/web-4k

      # chains of thought for 32K: one that is too long loses the end of its reasoning, never its answer; other long
      # documents are dropped
      zaya data pack data/reasoning --sequence-length 32768 --trim-reasoning '<think>' '</think>' --long drop \\
          --output data/reasoning-32k
    """
    pack_dataset(options, options.workspace)


@data_command("check", TOKENIZER, datasets="datasets (directory or prefix)")
def check(options: argparse.Namespace) -> None:
    """Compare every byte of datasets with the checksums of their manifests, and every token id with the vocabulary.

    A start of a run compares sizes, counts and fingerprints; of files above 64 MB it reads 256 stretches of 64 KiB.
    With a recipe, given as for zaya train, all of its datasets are checked, and that they have one tokenizer.

    examples:
      zaya data check data/web data/code
      zaya data check other/corpus_text_document --tokenizer weights/zaya1/tokenizer
      zaya data check experiment=zaya1_base data.path=data/web
    """
    recipe = recipe_of(options)
    tokenizer = options.tokenizer
    if recipe is not None:
        tokenizer = tokenizer or recipe.data.tokenizer
        find_sources(recipe)
    record = describe(tokenizer, tokenizer) if tokenizer is not None else None
    paths = options.datasets if recipe is None else [path for _, path, _ in named_datasets(recipe)]
    for path in dict.fromkeys(paths):
        prefixes = locate(path)[1].values()
        files = [file for prefix in prefixes for end in (".bin", ".idx", MARKS) if os.path.isfile(file := prefix + end)]
        with (
            warnings.catch_warnings(record=True) as unknown,
            bar(os.path.basename(os.path.normpath(path)), sum(map(os.path.getsize, files))) as shown,
        ):
            warnings.simplefilter("always", DatasetWarning)
            checked = check_dataset(path, record and record.vocab_size, full=True, progress=shown.update)
        compared = "token ids compared" if tokenizer_of(path) is None else "all checksums fit"
        for name, indexed in checked.items():
            counts = f"{indexed.documents:,} documents, {indexed.tokens:,} tokens"
            print(f"{path}: {name}: {counts}, fingerprint {fingerprint(indexed.prefix)}, {compared}")
        for warning in unknown:
            print(f"warning: {warning.message}")


@data_command(
    "inspect",
    option("--split", choices=("train", "valid"), help="of a prepared directory (default: train)"),
    option(
        "--start",
        type=whole_number(0, MOST_AMOUNT),
        default=0,
        metavar="N",
        help="number of the first sample (default: 0)",
    ),
    option("--count", type=whole_number(1, MOST_AMOUNT), default=3, metavar="N", help="number of samples (default: 3)"),
    option(
        "--characters",
        type=whole_number(0, MOST_AMOUNT),
        default=800,
        metavar="N",
        help="of each text, 0 for all (default: 800)",
    ),
    TOKENIZER,
    option("--json", action="store_true", help="print a JSON object a line, with the whole text"),
    datasets="one dataset (directory or prefix)",
)
def inspect(options: argparse.Namespace) -> None:
    """Show decoded samples with their source, length and loss mask: the documents of a dataset, the bins of a packed
    one, or the training samples of a run, which is given as for zaya train.

    examples:
      zaya data inspect data/web                                  # the first documents
      zaya data inspect data/web --split valid --start 40 --count 1 --characters 0
      zaya data inspect data/web-4k                               # a packed dataset: its bins
      zaya data inspect experiment=zaya1_base data.path=data/web "data.blend=['0.7 data/web','0.3 data/code']" --start \\
          16384 --json
    """
    print_samples(options, recipe_of(options))


def of_run(name: str, kind: Callable[[str], float], metavar: str, meaning: str) -> Option:
    """Return the row of a number of the planned run; its default is PlannedRun's."""
    default = getattr(PlannedRun(), name[2:].replace("-", "_"))
    group, meaning = "planned run (the defaults are ZAYA1's stage 1)", f"{meaning} (default: {default:g})"
    return option(name, type=kind, default=default, metavar=metavar, help=meaning, group=group)


@data_command(
    "bundle",
    option(
        "sources", nargs="+", metavar="DATASET", help="directories written by `zaya data prepare` or `zaya data pack`"
    ),
    option("--output", metavar="DIR", help="directory of the bundle"),
    option("--dry-run", action="store_true", help="write nothing, print the reads of the planned run"),
    option("--overwrite", action="store_true", help="make the bundle again in place of what --output holds"),
    QUIET,
    of_run("--sequence-length", whole_number(1, MOST_TOKENS), "N", "tokens of a sequence, stage.seq_length"),
    of_run("--global-batch-size", whole_number(1, INT32), "N", "sequences of a step, stage.global_batch_size"),
    of_run("--step-seconds", real_number(1e-6, YEAR), "S", "seconds of a step"),
    of_run("--iops-budget", real_number(1e-6, MOST_AMOUNT), "N", "reads a second that the storage can serve"),
    of_run("--page-bytes", whole_number(512, 2**30), "N", "bytes of a page, which one read fetches"),
)
def bundle(options: argparse.Namespace) -> None:
    """Join datasets that were prepared with the same tokenizer into one, documents in the given order, and print how
    many random reads a planned run asks of the storage, before and after packing. An interrupted run leaves nothing in
    the way of the same command.

    Reads of a run that finds nothing in a cache (arXiv 2605.05365, appendix B): reads/s = sigma G s b / (P t) with
    sigma = 1 + m P / (s b), the pages read over the pages needed, since each stretch touches about one page more than
    its bytes fill. G, s, P and t are --global-batch-size, --sequence-length, --page-bytes and --step-seconds; b, the
    bytes of a token, and m, the stretches of a sequence in the file (1 + s / mean tokens of a document, 1 in packed
    bins), are the dataset's. Tokens of 4 bytes and sigma 1 give the report's 6,554 reads/s. "of budget" is reads/s over
    --iops-budget; "least step" is the step time at which the reads need the whole budget.

    examples:
      zaya data bundle data/shard-* --output data/web
      # only the numbers, for ZAYA1's own run
      zaya data bundle data/shard-* --dry-run --sequence-length 4096 --global-batch-size 4096 --step-seconds 2.5 \\
          --iops-budget 70000
    """
    if options.dry_run == (options.workspace is not None):
        raise mistake("--output", problem="one of --output and --dry-run is required", fix="--output DIR, or --dry-run")
    bundle_datasets(options, options.workspace)


@data_command(
    "warm",
    option("--max-bytes", type=size, metavar="SIZE", help="read no more than this (default: 80 %% of the free memory)"),
    option("--dry-run", action="store_true", help="print the size of the data, and stop"),
    option(
        "--steps",
        type=whole_number(1, MOST_STEPS),
        metavar="N",
        help="read the samples of N steps (default: all data)",
        group="with a recipe",
    ),
    option(
        "--from-step",
        type=whole_number(0, MOST_STEPS),
        metavar="N",
        help="steps already done (default: those of the last checkpoint in run_dir, else 0)",
        group="with a recipe",
    ),
    option(
        "--node",
        type=whole_number(0, MOST_RANKS),
        metavar="N",
        help="read for this node, from 0 (default: for all cluster.num_nodes)",
        group="with a recipe",
    ),
    datasets="datasets (directory or prefix) to read whole",
)
def warm(options: argparse.Namespace) -> None:
    """Read data into the page cache of this node: whole datasets, or the samples that a run draws in its next steps.

    A run is given as for zaya train; datasets, sequence length, batch, seed, order, layout and nodes are its recipe's.

    examples:
      zaya data warm data/web                                                   # all of its training data
      # the samples of the next 2,000 steps of a run, from its last checkpoint on (from its start, if it has none)
      zaya data warm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web --steps 2000
      # of these the samples of node 5; on all: srun --ntasks-per-node=1 sh -c 'zaya data warm ... --node $SLURM_NODEID'
      zaya data warm experiment=zaya1_base cluster=mi300x_128x8 data.path=data/web --from-step 2000 --steps 2000 --node 5
    """
    from zaya_plugin.corpus.warm import warm as warm_cache  # with Hydra

    warm_cache(options, recipe_of(options))


@data_command("mixture", recipe=True)
def mixture(options: argparse.Namespace) -> None:
    """Show how many samples and tokens a stage draws from each source of its blend, how many epochs these are, and the
    data.consumed of the next stage, so that with data.order=continuing no sample of a source is repeated or left out.

    The stage is given as for zaya train: data.blend, stage.seq_length, stage.train_iters, stage.global_batch_size,
    data.consumed.

    examples:
      # stage 1: 1000 steps of 64 sequences
      zaya data mixture experiment=zaya1_base data.path=data/web "data.blend=['0.8 data/web','0.2 data/code']" \\
          stage.train_iters=1000 stage.global_batch_size=64 data.order=continuing
      # stage 2 with another blend, from where stage 1 stopped
      zaya data mixture experiment=zaya1_base data.path=data/web "data.blend=['0.5 data/web','0.5 data/math']" \\
          stage.train_iters=250 stage.global_batch_size=64 data.order=continuing \\
          "data.consumed=['209715200 data/web','52428800 data/code']"
    """
    from zaya_plugin.handover.data_places import consumed_after, source_uses  # with Hydra

    recipe = recipe_of(options)
    print(report(source_uses(recipe)))
    print("\n  ".join(["the next stage's data.consumed:", *consumed_after(recipe)]))

# SPDX-License-Identifier: Apache-2.0
"""`zaya data prepare`: turn text into a Megatron indexed dataset.

The stages are tokenizer, parts and dataset. A dataset is built in `<output>.partial` and gets its name by one rename
(workspace.py). The tokenizer and each part are kept as soon as they are whole, so the same command continues an
interrupted one and ends with the same bytes.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain

import numpy as np

from zaya_plugin.corpus.bin_writer import BinWriter
from zaya_plugin.corpus.blocks import BlockReader, Format, LostFileError, Position, Rejected, documents
from zaya_plugin.corpus.inputs import DEFAULT_ENDINGS, LINES, STDLIB, InputFile, find_inputs, fingerprint
from zaya_plugin.corpus.part_files import (
    MARKED_PROMPT,
    SPELLED,
    UNUSED,
    Job,
    Part,
    drop_parts,
    split_names,
    split_of,
    tokenise,
)
from zaya_plugin.corpus.workspace import INPUT_FILES, INPUT_TIMES, Workspace
from zaya_plugin.data import tokenizer
from zaya_plugin.data.indexed_dataset import token_dtype
from zaya_plugin.data.prepared import Manifest, file_sha256
from zaya_plugin.data.tokenizer import TokenizerRecord, added_tokens, open_tokenizer, special_tokens
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.progress import bar

DEFAULT_BPE = 4096
# Enough for a demo that trains for minutes, and prepared in seconds.
STDLIB_BYTES = 4_000_000
REJECTS_SHOWN = 10
REJECTS_FILE = "rejected.jsonl"
PART_BYTES = 16_000_000
# Bounds of what a process holds in memory: a part, and about 130 times a document (130 GB for the longest allowed). A
# BPE of 2^20 entries is four times the largest in use.
HELD_BYTES, LARGEST_BPE, MOST_WORKERS = 1_000_000_000, 1 << 20, 1024

# The defaults of --glob in the plans of earlier versions, whose datasets are complete for the same command.
EARLIER_GLOBS = {"--chat": ["*.jsonl", "*.jsonl.gz", "*.jsonl.zst"]}
EARLIER_GLOBS[""] = ["*.txt", "*.md", "*.rst", "*.py", *EARLIER_GLOBS["--chat"], "*.parquet"]


def prepare(args: argparse.Namespace, workspace: Workspace) -> None:
    """Make the dataset, or find that it is complete, and print a summary.

    Raises:
        ValueError: a user's mistake, see `find_inputs` and `Workspace.dataset`; or no document is left.
    """
    if args.chat:
        refuse_without_template(args)
    elif args.chat_template:
        raise mistake("--chat-template", args.chat_template, problem="is not read without --chat", fix="give --chat")
    if args.tokenizer is not None and args.train_bpe is not None:
        raise mistake("--train-bpe", args.train_bpe, problem="excludes --tokenizer", fix="leave out one of the two")
    if args.max_bytes is None and args.input == [STDLIB]:
        args.max_bytes = STDLIB_BYTES
    if args.tokenizer is None and args.train_bpe is None:
        args.train_bpe = DEFAULT_BPE
    plan, missing, speed = deciding(args), None, ""
    try:
        read = LINES if args.chat else DEFAULT_ENDINGS
        files = find_inputs(args.input, args.glob, read, lambda line: print(line, file=sys.stderr))
        for file in files:
            if args.chat and not file.is_jsonl and not (STDLIB in args.input and file.path.endswith(".py")):
                raise mistake("--input", file.path, problem="holds no chats", allowed=" ".join(LINES))
        plan[INPUT_FILES] = fingerprint(files, with_times=False)
    except ValueError as error:  # the text may be gone once the dataset is made
        missing = error

    def build() -> None:
        nonlocal speed
        if missing is not None:
            raise missing
        part_bytes = begin(args, workspace, plan, files)
        record = make_tokenizer(args, workspace, files)
        begun = time.monotonic()
        try:
            parts, counts, taken = make_parts(args, workspace, files, part_bytes, record)
        except LostFileError as lost:
            # It may be restored for the same command; what came before the damage was noticed may be wrong too.
            drop_parts(workspace.parts, [file.path for file in files].index(lost.file))
            if not os.listdir(workspace.parts):
                workspace.drop_work()
            raise
        if taken:
            seconds, workers = max(time.monotonic() - begun, 1e-9), f"{args.workers} worker{'s' * (args.workers > 1)}"
            speed = (
                f"\n  tokenised {taken / 1e6:.1f} MB in {seconds:.1f} s: {taken / 1e6 / seconds:.1f} MB/s with "
                f"{workers}"
            )
        try:
            make_dataset(args, workspace, parts, counts, record, plan, len(files))
        except OSError:
            shutil.rmtree(workspace.final, ignore_errors=True)  # frees its space; it is made from the parts again
            raise

    manifest, was_complete = workspace.dataset(plan, build)
    refuse_rejects(args, manifest.documents["rejected"], os.path.join(workspace.output, REJECTS_FILE))
    if not args.quiet:
        print("already complete, nothing to do\n" * was_complete + summary(workspace.output, manifest) + speed)


def refuse_without_template(args: argparse.Namespace) -> None:
    """Raise ValueError if --chat comes with options that chats exclude, or without a tokenizer."""
    for option, value in (("--train-bpe", args.train_bpe), ("--no-append-eod", not args.append_eod)):
        if value:
            raise mistake(option, value, problem="excludes --chat", fix=f"leave out --chat or {option}")
    if args.tokenizer is None:
        raise mistake(
            "--chat",
            problem="chats are encoded by a tokenizer's chat template",
            allowed="with --tokenizer",
            fix="--tokenizer <directory, or name on the Hugging Face hub>",
        )
    if args.chat_template is not None:
        args.chat_template = tokenizer.template_file(args.chat_template)


def deciding(args: argparse.Namespace) -> dict:
    """Return the options that decide what is written, by option name; absolute paths, so the working directory is not
    among them.
    """
    local = args.tokenizer is not None and os.path.isdir(args.tokenizer)
    file = os.path.join(args.tokenizer, "tokenizer.json") if local else None
    return {
        "--chat": args.chat or None,  # null as in the plans of earlier versions
        "sha256 of --chat-template": file_sha256(args.chat_template) if args.chat_template else None,
        "--input": [name if name == STDLIB else os.path.abspath(name) for name in args.input],
        "--glob": args.glob or EARLIER_GLOBS["--chat" if args.chat else ""],
        "--field": args.field,
        "--max-bytes": args.max_bytes,
        "--max-document-bytes": args.max_document_bytes,
        "--tokenizer": os.path.abspath(args.tokenizer) if local else args.tokenizer,
        "sha256 of its tokenizer.json": file_sha256(file) if file and os.path.isfile(file) else None,
        "--deduplicate": args.deduplicate,
        "--id-field": args.id_field if args.deduplicate == "id" else None,
        "--train-bpe": args.train_bpe,
        "--train-bpe-bytes": args.train_bpe_bytes if args.train_bpe else None,
        "append eod": args.append_eod,
        "--valid-fraction": args.valid_fraction,
    }


def begin(args: argparse.Namespace, workspace: Workspace, plan: dict, files: list[InputFile]) -> int:
    """Start a run or continue one; return the part size, of a continued run the one that it began with."""
    total = sum(file.size for file in files)
    # Several parts for each of eight workers even when the input is small, for any --workers.
    default = min(PART_BYTES, max(total if args.max_bytes is None else min(total, args.max_bytes), 1) // 32 + 100_000)
    asked = {"--part-bytes": args.part_bytes} if args.part_bytes else {}
    # Parts of earlier versions are without the tokenizer's special tokens.
    begun = {**plan, "special tokens": True, INPUT_TIMES: fingerprint(files, with_times=True), **asked}
    return workspace.begin(begun, {"--part-bytes": default})["--part-bytes"]


def form_of(args: argparse.Namespace) -> Format:
    """Return the fields to read; an id only where documents are deduplicated by it."""
    id_field = args.id_field if args.deduplicate == "id" else None
    return Format(args.field, id_field, args.max_document_bytes, args.chat)


def make_tokenizer(args: argparse.Namespace, workspace: Workspace, files: list[InputFile]) -> TokenizerRecord:
    """Train or import the tokenizer unless an earlier run has done so."""
    if not os.path.isdir(workspace.tokenizer):
        temporary = workspace.tokenizer + ".tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        if args.train_bpe is not None:
            limit = args.train_bpe_bytes if args.max_bytes is None else min(args.max_bytes, args.train_bpe_bytes)
            reader = BlockReader(files, min(limit, PART_BYTES), limit, form_of(args))
            total = None if any(file.is_packed for file in files) else min(limit, sum(file.size for file in files))
            rejected = []
            texts = _training_texts(reader, args, total, rejected)
            first = next(texts, None)
            if first is None:
                why = f"; the first document that was rejected is {rejected[0]}" if rejected else ""
                problem = f"the documents hold no text to train a tokenizer on{why}"
                raise mistake("--input", " ".join(args.input), problem=problem, fix="give documents with text")
            tokenizer.train_bpe(chain([first], texts), args.train_bpe, temporary)
        else:
            tokenizer.import_pretrained(args.tokenizer, temporary, chat=args.chat, template=args.chat_template)
        os.rename(temporary, workspace.tokenizer)
    record = tokenizer.describe(workspace.tokenizer, args.tokenizer or "byte-level BPE trained on this corpus")
    if args.append_eod and record.eod_id is None:
        raise mistake(
            "--tokenizer",
            args.tokenizer,
            problem="has no eos_token to end documents with",
            fix="give --no-append-eod, or a tokenizer that has it",
        )
    return record


def _training_texts(
    reader: BlockReader, args: argparse.Namespace, total: int | None, rejected: list[str]
) -> Iterator[str]:
    """Yield the documents of the training split; the tokenizer must not see the validation split.

    Args:
        total: bytes that the reader reads, for the progress bar.
        rejected: gets the first document that cannot be used; all of them are reported when parts are made.
    """
    at = Position()
    with bar("training the tokenizer", total, quiet=args.quiet) as shown:
        while (part := reader.read(at)) is not None:
            block, at = part
            for document in documents(block, replace(form_of(args), id_field=None), Counter()):
                if isinstance(document, Rejected):
                    rejected[:] = rejected or [str(document)]
                elif split_of(document.text, args.valid_fraction) != "valid":
                    yield document.text
            shown.update(at.disk - shown.n)


def make_parts(
    args: argparse.Namespace, workspace: Workspace, files: list[InputFile], part_bytes: int, record: TokenizerRecord
) -> tuple[list[Part], Counter, int]:
    """Make all parts and rejected.jsonl; return the parts, counts of documents, and the bytes that this run
    tokenised.
    """
    from tqdm import tqdm

    before, behind = ([], []) if args.chat else added_tokens(open_tokenizer(workspace.tokenizer))
    if args.append_eod and behind[-1:] != [record.eod_id]:
        behind = [*behind, record.eod_id]
    job = Job(
        tokenizer_directory=workspace.tokenizer,
        tokenizer_sha256=record.sha256,
        form=form_of(args),
        before=tuple(before),
        behind=tuple(behind),
        special=special_tokens(open_tokenizer(workspace.tokenizer)),
        valid_fraction=args.valid_fraction,
        dtype=token_dtype(record.vocab_size).name,
        deduplicate=args.deduplicate,
    )
    reader = BlockReader(files, part_bytes, args.max_bytes, job.form)
    total = sum(file.size for file in files)
    if args.max_bytes is not None:
        total = None if any(file.is_packed for file in files) else min(total, args.max_bytes)
    rejects_path = os.path.join(workspace.final, REJECTS_FILE)
    parts: list[Part] = []
    counts, shown, quiet = Counter(), 0, args.quiet or not sys.stderr.isatty()
    with (
        open(rejects_path, "w", encoding="ascii") as rejects,
        tqdm(total=total, unit="B", unit_scale=True, desc="tokenising", disable=quiet, file=sys.stderr) as bar,
    ):
        for part in tokenise(reader, job, workspace.parts, args.workers):
            counts += part.counts
            bar.update(part.end.disk - bar.n)
            for reject in part.rejected:
                rejects.write(json.dumps(asdict(reject)) + "\n")
                shown += 1
                if shown <= REJECTS_SHOWN:
                    tqdm.write(f"rejected: {reject}", file=sys.stderr)
            part.rejected.clear()  # they are in the file now; a corpus of rejects alone must not fill the memory
            rejects.flush()
            refuse_rejects(args, counts["rejected"], rejects_path)
            parts.append(part)
    if shown > REJECTS_SHOWN:
        print(f"rejected: {shown - REJECTS_SHOWN} more, all of them in {REJECTS_FILE}", file=sys.stderr)
    if counts[MARKED_PROMPT]:
        print(
            "warning: {% generation %} of the chat template begins before the end of the generation prompt: the model "
            "learns to repeat the prompt in its answers. Fix: move {% generation %} behind it",
            file=sys.stderr,
        )
    spelled, unused = (
        ", ".join(
            f"{key.removeprefix(kind)} ({count:,})"
            for key, count in counts.items()
            if key.startswith(kind) and key != kind
        )
        for kind in (SPELLED, UNUSED)
    )
    if counts[SPELLED]:
        print(
            f"warning: {counts[SPELLED]:,} documents spell out special tokens, which become these tokens: {spelled}",
            file=sys.stderr,
        )
    if unused:
        print(f"note: keys of messages that the chat template does not use, so left out: {unused}", file=sys.stderr)
    resumed = sum(part.resumed for part in parts)
    if resumed and not args.quiet:
        print(f"continued: {resumed} of {len(parts)} parts were already finished", file=sys.stderr)
    return parts, counts, sum(part.taken for part in parts if not part.resumed)


def refuse_rejects(args: argparse.Namespace, rejected: int, rejects_path: str) -> None:
    """Raise ValueError if more documents are rejected than --max-rejects allows."""
    if args.max_rejects is not None and rejected > args.max_rejects:
        raise mistake(
            "--max-rejects",
            args.max_rejects,
            problem=f"{rejected} documents are rejected",
            fix=f"give a higher limit, or correct the documents listed in {rejects_path}",
        )


def make_dataset(
    args: argparse.Namespace,
    workspace: Workspace,
    parts: list[Part],
    counts: Counter,
    record: TokenizerRecord,
    plan: dict,
    input_files: int,
) -> None:
    """Fill `final` with the files of the dataset."""
    import tokenizers

    dtype, names = token_dtype(record.vocab_size), split_names(args.valid_fraction)
    kept = dict.fromkeys(names)
    if args.deduplicate:
        kept, counts["duplicates"] = first_of_key(parts, names)
    splits = {}
    for name in names:
        writer = BinWriter(os.path.join(workspace.final, name), dtype, record.vocab_size, args.chat)
        lengths = [np.empty(0, np.int32)]
        columns = [f"{name}_tokens", f"{name}_lengths", *[f"{name}_marks"] * args.chat]
        with writer:
            for number, part in enumerate(parts):
                tokens, part_lengths, *marks = part.arrays(*columns)
                if kept[name] is not None:
                    first = kept[name][number]
                    kept_tokens, part_lengths = np.repeat(first, part_lengths), part_lengths[first]
                    tokens, marks = tokens[kept_tokens], [column[kept_tokens] for column in marks]
                writer.write(tokens, *marks)
                lengths.append(part_lengths)
            splits[name] = writer.finish(np.concatenate(lengths))
    left = {name: split.documents for name, split in splits.items()}
    if not all(left.values()):
        workspace.drop_work()  # only other arguments can help, and they must not need --overwrite
        raise _empty(args, counts, left, os.path.join(workspace.final, REJECTS_FILE))
    shutil.copytree(workspace.tokenizer, os.path.join(workspace.final, "tokenizer"))
    listed = ["read", "empty", "rejected", "blank_lines", *["duplicates"][: bool(args.deduplicate)]]
    Manifest(
        arguments=plan,
        tokenizer=record,
        dtype=dtype.name,
        splits=splits,
        documents={key: counts[key] for key in listed},
        input_files=input_files,
        input_bytes=sum(part.taken for part in parts),
        tokenizers_version=tokenizers.__version__,
        special_tokens=not args.chat and any(added_tokens(open_tokenizer(workspace.tokenizer))),
    ).write(workspace.final)


def first_of_key(parts: list[Part], splits: tuple[str, ...]) -> tuple[dict[str, list[np.ndarray]], int]:
    """Take the first document of each key, over all splits and in order of the input, so workers make no difference.

    Keys are 128-bit hashes: among 10^12 documents two different ones are taken for equal with a chance of 10^-15.
    Memory: 24 bytes a document, three times that while they are sorted.

    Returns:
        For each split and part bool [documents of the part in the split], and the number of documents left out.
    """
    loaded = [part.arrays("keys", "split_numbers") for part in parts]
    keys = np.concatenate([np.empty((0, 2), np.uint64), *(key for key, _ in loaded)])
    order = np.lexsort((np.arange(len(keys)), keys[:, 1], keys[:, 0]))
    repeats = np.zeros(len(keys), bool)
    repeats[order[1:]] = (keys[order[1:]] == keys[order[:-1]]).all(axis=1)
    firsts = np.split(~repeats, np.cumsum([len(key) for key, _ in loaded], dtype=np.int64)[:-1])
    kept = {
        name: [first[numbers == number] for first, (_, numbers) in zip(firsts, loaded, strict=False)]
        for number, name in enumerate(splits)
    }
    return kept, int(repeats.sum())


def _empty(args: argparse.Namespace, counts: Counter, left: dict[str, int], rejects_path: str) -> ValueError:
    kept = sum(left.values())
    if kept == 0:
        question = "; are these chats?" if args.chat else "; is --field right?"
        listed = f" (listed in {rejects_path}{question})" if counts["rejected"] else ""
        return mistake(
            "--input",
            " ".join(args.input),
            problem=f"no document is left: {counts['read']} read, {counts['empty']} empty, {counts['rejected']} "
            f"rejected{listed}",
        )
    empty = next(name for name, documents in left.items() if documents == 0)
    return mistake(
        "--valid-fraction",
        args.valid_fraction,
        problem=f"the {empty} split is empty: {kept} document{'s' * (kept != 1)} in all",
        fix="give more documents (a text file is one, and is held out whole), another fraction, or 0 for no split",
    )


def summary(output: str, manifest: Manifest) -> str:
    """Return what the dataset holds, for a terminal."""
    counts, tokens = manifest.documents, sum(split.tokens for split in manifest.splits.values())
    vocabulary = f"vocabulary {manifest.tokenizer.vocab_size:,}, end of document {manifest.tokenizer.eod_id}"
    if manifest.special_tokens:
        vocabulary += ", with the tokenizer's special tokens"
    lines = [f"{output}: {tokens:,} tokens ({manifest.dtype}), {vocabulary}"]
    for name, split in manifest.splits.items():
        entropy = f"unigram entropy {split.unigram_entropy:.3f} nats/token"
        lines.append(f"  {name:5} {split.documents:9,} documents {split.tokens:13,} tokens, {entropy}")
    limit = f" (--max-bytes {manifest.arguments['--max-bytes']:,})" if manifest.arguments["--max-bytes"] else ""
    lines.append(
        f"  read {counts['read']:,} documents, {manifest.input_bytes / 1e6:.1f} MB{limit}: {counts['empty']:,} empty, "
        f"{counts['rejected']:,} rejected"
        + (f", {counts['duplicates']:,} duplicates" if "duplicates" in counts else "")
    )
    return "\n".join(lines)

# SPDX-License-Identifier: Apache-2.0
"""The stages of preparing a dataset: tokenizer, parts, dataset. A later run takes a finished one as it is."""

import argparse
import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone

import zaya_plugin
from zaya_plugin.corpus.blocks import BlockReader, Position
from zaya_plugin.corpus.deduplicate import first_of_each
from zaya_plugin.corpus.documents import Rejected, documents
from zaya_plugin.corpus.inputs import InputFile
from zaya_plugin.corpus.merge import merge_split
from zaya_plugin.corpus.parts import Job, Part, split_names, split_of, tokenise
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data import tokenizer
from zaya_plugin.data.indexed_format import token_dtype
from zaya_plugin.data.manifest import Manifest, SplitRecord

REJECTS_SHOWN = 10
REJECTS_FILE = "rejected.jsonl"
PART_BYTES = 16_000_000
INPUT_FILES = "input files"
INPUT_TIMES = "modification times of the input files"


def make_tokenizer(args: argparse.Namespace, workspace: Workspace, files: list[InputFile]) -> tokenizer.TokenizerRecord:
    """Trains or imports the tokenizer unless an earlier run has done so."""
    if not os.path.isdir(workspace.tokenizer):
        temporary = workspace.tokenizer + ".tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        if args.train_bpe is not None:
            limit = args.train_bpe_bytes if args.max_bytes is None else min(args.max_bytes, args.train_bpe_bytes)
            reader = BlockReader(files, min(limit, PART_BYTES), limit, args.max_document_bytes, *_fields(args))
            rejected = []
            try:
                tokenizer.train_bpe(_training_texts(reader, args, rejected), args.train_bpe, temporary)
            except ValueError as error:
                first = f"; the first document that was rejected is {rejected[0]}" if rejected else ""
                raise ValueError(f"{error}{first}") from None
        else:
            tokenizer.import_pretrained(args.tokenizer, temporary)
        os.rename(temporary, workspace.tokenizer)
    source = args.tokenizer or "byte-level BPE trained on this corpus"
    record = tokenizer.describe(workspace.tokenizer, source)
    if args.append_eod and record.eod_id is None:
        raise ValueError(
            f"--tokenizer {args.tokenizer} has no eos_token to end documents with; "
            f"give --no-append-eod, or one that has it"
        )
    return record


def _fields(args: argparse.Namespace) -> tuple[str, str | None]:
    """Names of the fields for text and id; the latter None where no id is needed."""
    return args.field, args.id_field if args.deduplicate == "id" else None


def _training_texts(reader: BlockReader, args: argparse.Namespace, rejected: list[str]) -> Iterator[str]:
    """Documents of the training split, for the tokenizer must not have seen what it is validated on.

    Args:
        rejected: gets the first document that cannot be used; all of them are reported when parts are made.
    """
    at = Position()
    while (found := reader.read(at)) is not None:
        block, at = found
        for document in documents(block, args.field, args.max_document_bytes, Counter()):
            if isinstance(document, Rejected):
                if not rejected:
                    rejected.append(str(document))
            elif split_of(document.text, args.valid_fraction) != "valid":
                yield document.text


def make_parts(args, workspace: Workspace, files: list[InputFile], part_bytes: int, record: tokenizer.TokenizerRecord):
    """Makes all parts and rejected.jsonl. Returns the parts, document counts, and seconds and bytes of this run's work."""
    from tqdm import tqdm

    job = Job(
        tokenizer_directory=workspace.tokenizer,
        tokenizer_sha256=record.sha256,
        text_field=args.field,
        eod_id=record.eod_id if args.append_eod else None,
        valid_fraction=args.valid_fraction,
        max_document_bytes=args.max_document_bytes,
        dtype=token_dtype(record.vocab_size).name,
        deduplicate=args.deduplicate or "",
        id_field=args.id_field,
    )
    reader = BlockReader(files, part_bytes, args.max_bytes, args.max_document_bytes, *_fields(args))
    total = sum(file.size for file in files)
    if args.max_bytes is not None:
        total = None if any(file.is_packed for file in files) else min(total, args.max_bytes)
    shutil.rmtree(workspace.final, ignore_errors=True)
    os.makedirs(workspace.final)
    rejects_path = os.path.join(workspace.final, REJECTS_FILE)
    parts: list[Part] = []
    counts, taken, resumed, shown, begin = Counter(), 0, 0, 0, time.monotonic()
    quiet = args.quiet or not sys.stderr.isatty()
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
            if args.max_rejects is not None and counts["rejected"] > args.max_rejects:
                rejects.flush()
                refuse_rejects(args, counts["rejected"], rejects_path)
            resumed += part.resumed
            taken += 0 if part.resumed else part.taken
            part.rejected.clear()  # they are in the file now; a corpus of nothing else must not fill the memory
            parts.append(part)
    if shown > REJECTS_SHOWN:
        print(f"rejected: {shown - REJECTS_SHOWN} more, all of them in {REJECTS_FILE}", file=sys.stderr)
    if resumed and not args.quiet:
        print(f"continued: {resumed} of {len(parts)} parts were already finished", file=sys.stderr)
    return parts, counts, max(time.monotonic() - begin, 1e-9), taken


def refuse_rejects(args: argparse.Namespace, rejected: int, rejects_path: str) -> None:
    if args.max_rejects is not None and rejected > args.max_rejects:
        raise ValueError(
            f"{rejected} documents are rejected and --max-rejects allows {args.max_rejects}; "
            f"they are listed in {rejects_path}"
        )


def make_dataset(
    args,
    workspace: Workspace,
    parts,
    counts: Counter,
    record: tokenizer.TokenizerRecord,
    plan: dict,
    files: list[InputFile],
) -> Manifest:
    """Fills `final` with everything that the dataset consists of."""
    import tokenizers

    dtype = token_dtype(record.vocab_size)
    names = split_names(args.valid_fraction)
    kept = dict.fromkeys(names)
    if args.deduplicate:
        kept, counts["duplicates"] = first_of_each(parts, names)
    splits = {name: merge_split(parts, name, workspace.final, dtype, record.vocab_size, kept[name]) for name in names}
    _refuse_empty(args, workspace, splits, counts)
    shutil.copytree(workspace.tokenizer, os.path.join(workspace.final, "tokenizer"))
    manifest = Manifest(
        arguments={key: value for key, value in plan.items() if key != INPUT_TIMES},
        tokenizer=record,
        dtype=dtype.name,
        splits=splits,
        documents={
            key: counts[key]
            for key in ("read", "empty", "rejected", "blank_lines", *["duplicates"][: bool(args.deduplicate)])
        },
        input_files=len(files),
        input_bytes=sum(part.taken for part in parts),
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        zaya_plugin_version=zaya_plugin.__version__,
        tokenizers_version=tokenizers.__version__,
    )
    manifest.write(workspace.final)
    return manifest


def _refuse_empty(args, workspace: Workspace, splits: dict[str, SplitRecord], counts: Counter) -> None:
    """Only other arguments can help here, so nothing is kept that would have to be given up by --overwrite."""
    empty = [name for name, split in splits.items() if split.documents == 0]
    kept = sum(split.documents for split in splits.values())
    if empty:
        workspace.drop_work()
    if kept == 0:
        rejects_path = os.path.join(workspace.final, REJECTS_FILE)
        listed = f" (listed in {rejects_path}; is --field right?)" if counts["rejected"] else ""
        raise ValueError(
            f"no document is left: {counts['read']} read, {counts['empty']} empty, {counts['rejected']} rejected{listed}"
        )
    if empty:
        raise ValueError(
            f"the {empty[0]} split is empty: --valid-fraction {args.valid_fraction} of {kept} document{'s' * (kept != 1)}. "
            f"Documents are held out whole (a text file is one): give more of them, another --valid-fraction, or 0 for no split"
        )


def summary(output: str, manifest: Manifest) -> str:
    counts, tokens = manifest.documents, sum(split.tokens for split in manifest.splits.values())
    vocabulary = f"vocabulary {manifest.tokenizer.vocab_size:,}, end of document {manifest.tokenizer.eod_id}"
    lines = [f"{output}: {tokens:,} tokens ({manifest.dtype}), {vocabulary}"]
    for name, split in manifest.splits.items():
        entropy = f"unigram entropy {split.unigram_entropy:.3f} nats/token"
        lines.append(f"  {name:5} {split.documents:9,} documents {split.tokens:13,} tokens, {entropy}")
    limit = manifest.arguments["--max-bytes"]
    read = f"read {counts['read']:,} documents, {manifest.input_bytes / 1e6:.1f} MB"
    lines.append(
        f"  {read}{f' (--max-bytes {limit:,})' if limit else ''}: {counts['empty']:,} empty, {counts['rejected']:,} rejected"
        + (f", {counts['duplicates']:,} duplicates" if "duplicates" in counts else "")
    )
    return "\n".join(lines)

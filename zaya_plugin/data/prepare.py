# SPDX-License-Identifier: Apache-2.0
"""`zaya data prepare`: from text to a Megatron indexed dataset.

Everything is built in `<output>.partial` and gets its name by one rename (workspace.py). The tokenizer and each part are kept as
soon as they are whole, so the same command continues where an interrupted one stopped and ends with the same bytes.
"""

import argparse
import errno
import json
import os
import shutil
import sys
import time
from collections import Counter
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from datetime import datetime, timezone

import zaya_plugin
from zaya_plugin.data import arguments, tokenizer
from zaya_plugin.data.blocks import BlockReader, Position
from zaya_plugin.data.documents import documents
from zaya_plugin.data.indexed_format import token_dtype
from zaya_plugin.data.inputs import InputFile, find_inputs, fingerprint
from zaya_plugin.data.manifest import Manifest, load_manifest
from zaya_plugin.data.merge import merge_split
from zaya_plugin.data.parts import Job, Part, split_names, split_of, tokenise
from zaya_plugin.data.workspace import Workspace

REJECTS_SHOWN = 10
REJECTS_FILE = "rejected.jsonl"
PART_BYTES = 16_000_000
INPUT_FILES = "input files"
INPUT_TIMES = "modification times of the input files"


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns the exit status: 0 done, 1 failed with a message on stderr, 130 interrupted."""
    args = arguments.complete(arguments.parser().parse_args(argv))
    workspace = Workspace(args.output)
    try:
        _prepare(args, workspace)
        return 0
    except ValueError as error:
        message = str(error)
    except BrokenProcessPool:
        message = f"a worker process was killed, most often because memory ran out: try fewer --workers or a smaller --max-document-bytes{_kept(workspace)}"
    except OSError as error:
        # shutil.copytree and tokenizers put the number into the text.
        full = (
            error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
            or "rrno 28" in str(error)
            or "os error 28" in str(error)
        )
        message = f"{'no space left to write' if full else 'cannot read or write'} {error.filename or workspace.partial}: {error.strerror or error}{_kept(workspace)}"
    except KeyboardInterrupt:
        print(f"interrupted{_kept(workspace)}", file=sys.stderr)
        return 130
    print(f"zaya data prepare: error: {message}", file=sys.stderr)
    return 1


def _kept(workspace: Workspace) -> str:
    if not os.path.isfile(workspace.plan_file):
        return ""
    return f". {workspace.output} was not touched; what is finished is kept in {workspace.partial}, and the same command continues from there"


def _prepare(args: argparse.Namespace, workspace: Workspace) -> None:
    asked = arguments.deciding(args)
    if _is_complete(args, workspace, asked):
        return
    with workspace.locked():
        if _is_complete(args, workspace, asked):  # by whoever held the lock a moment ago
            return
        files = find_inputs(args.input, args.glob)
        plan = {
            **asked,
            INPUT_FILES: fingerprint(files, with_times=False),
            INPUT_TIMES: fingerprint(files, with_times=True),
        }
        part_bytes = _begin_or_continue(args, workspace, plan, files)
        record = _tokenizer(args, workspace, files)
        parts, counts, seconds, taken = _tokenise(args, workspace, files, part_bytes, record)
        try:
            manifest = _merge(args, workspace, parts, counts, record, plan, files)
            workspace.publish()
        except OSError:
            shutil.rmtree(workspace.final, ignore_errors=True)  # gives the space back; made from the parts again
            raise
    if not args.quiet:
        print(_summary(workspace.output, manifest))
        if taken:
            print(
                f"  tokenised {taken / 1e6:.1f} MB in {seconds:.1f} s: {taken / 1e6 / seconds:.1f} MB/s with {args.workers} worker{'s' * (args.workers > 1)}"
            )


def _is_complete(args: argparse.Namespace, workspace: Workspace, asked: dict) -> bool:
    """Whether the output exists with the same arguments.

    Raises:
        ValueError: it exists and is something else, and --overwrite does not allow to replace it.
    """
    if not os.path.exists(workspace.output) or (os.path.isdir(workspace.output) and not os.listdir(workspace.output)):
        return False
    try:
        manifest = load_manifest(workspace.output)
    except ValueError as error:
        if args.overwrite and os.path.isfile(os.path.join(workspace.output, "manifest.json")):
            return False
        raise ValueError(
            f"--output {workspace.output} exists and is not a dataset that this command may replace: {error}"
        ) from None
    if args.overwrite:
        return False
    different = arguments.differences(manifest.arguments, asked)
    try:
        files = fingerprint(find_inputs(args.input, args.glob), with_times=False)
    except ValueError:
        files = manifest.arguments[INPUT_FILES]  # the text may be gone once the dataset is made
    if files != manifest.arguments[INPUT_FILES]:
        different.append(f"{INPUT_FILES}: names or sizes have changed")
    if different:
        raise ValueError(
            f"{workspace.output} holds a dataset made with other arguments; give --overwrite to replace it, or choose another --output\n  "
            + "\n  ".join(different)
        )
    _refuse_rejects(args, manifest.documents["rejected"], os.path.join(workspace.output, REJECTS_FILE))
    if os.path.exists(workspace.partial):  # killed after the dataset got its name, before the rest was removed
        with workspace.locked():
            workspace.discard()
    if not args.quiet:
        print(f"already complete, nothing to do\n{_summary(workspace.output, manifest)}")
    return True


def _begin_or_continue(args: argparse.Namespace, workspace: Workspace, plan: dict, files: list[InputFile]) -> int:
    """Returns the part size: on continuing the one that the run began with, because a part ends where the next begins."""
    total = sum(file.size for file in files)
    # Several parts for each of eight workers even when the input is small, whatever --workers is now.
    default = min(PART_BYTES, max(total if args.max_bytes is None else min(total, args.max_bytes), 1) // 32 + 100_000)
    part_bytes = args.part_bytes or default
    earlier = workspace.load_plan()
    if earlier is not None:
        different = arguments.differences(earlier, plan)
        if args.part_bytes not in (None, earlier["part_bytes"]):
            different.append(f"--part-bytes: it was made with {earlier['part_bytes']}, now {args.part_bytes}")
        if not different:
            return earlier["part_bytes"]
        if not args.overwrite:
            raise ValueError(
                f"{workspace.partial} holds an unfinished run with other arguments; give --overwrite to drop it, or choose another --output\n  "
                + "\n  ".join(different)
            )
    workspace.begin({**plan, "part_bytes": part_bytes})
    return part_bytes


def _tokenizer(args: argparse.Namespace, workspace: Workspace, files: list[InputFile]) -> tokenizer.TokenizerRecord:
    """Trains or imports the tokenizer unless an earlier run has done so."""
    if not os.path.isdir(workspace.tokenizer):
        temporary = workspace.tokenizer + ".tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        if args.train_bpe is not None:
            limit = args.train_bpe_bytes if args.max_bytes is None else min(args.max_bytes, args.train_bpe_bytes)
            reader = BlockReader(files, min(limit, PART_BYTES), limit, args.max_document_bytes)
            tokenizer.train_bpe(_training_texts(reader, args), args.train_bpe, temporary)
        else:
            tokenizer.import_pretrained(args.tokenizer, temporary)
        os.rename(temporary, workspace.tokenizer)
    source = args.tokenizer or "byte-level BPE trained on this corpus"
    record = tokenizer.describe(workspace.tokenizer, source)
    if args.append_eod and record.eod_id is None:
        raise ValueError(
            f"--tokenizer {args.tokenizer} has no eos_token to end documents with; give --no-append-eod, or one that has it"
        )
    return record


def _training_texts(reader: BlockReader, args: argparse.Namespace):
    """Documents of the training split: the tokenizer must not have seen what it is validated on."""
    at = Position()
    while (found := reader.read(at)) is not None:
        block, at = found
        for document in documents(block, args.field, args.max_document_bytes, Counter()):
            if isinstance(document, str) and split_of(document, args.valid_fraction) != "valid":
                yield document


def _tokenise(args, workspace: Workspace, files: list[InputFile], part_bytes: int, record: tokenizer.TokenizerRecord):
    """Makes all parts and rejected.jsonl. Returns the parts, document counts, and seconds and bytes of the work done by this run."""
    from tqdm import tqdm

    job = Job(
        tokenizer_directory=workspace.tokenizer,
        tokenizer_sha256=record.sha256,
        text_field=args.field,
        eod_id=record.eod_id if args.append_eod else None,
        valid_fraction=args.valid_fraction,
        max_document_bytes=args.max_document_bytes,
        dtype=token_dtype(record.vocab_size).name,
    )
    reader = BlockReader(files, part_bytes, args.max_bytes, args.max_document_bytes)
    total = sum(file.size for file in files)
    if args.max_bytes is not None:
        total = None if any(file.is_gzip for file in files) else min(total, args.max_bytes)
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
                    tqdm.write(f"rejected: {reject.file}:{reject.line}: {reject.reason}", file=sys.stderr)
            if args.max_rejects is not None and counts["rejected"] > args.max_rejects:
                rejects.flush()
                _refuse_rejects(args, counts["rejected"], rejects_path)
            resumed += part.resumed
            taken += 0 if part.resumed else part.taken
            part.rejected.clear()  # they are in the file now; a corpus of nothing else must not fill the memory
            parts.append(part)
    if shown > REJECTS_SHOWN:
        print(f"rejected: {shown - REJECTS_SHOWN} more, all of them in {REJECTS_FILE}", file=sys.stderr)
    if resumed and not args.quiet:
        print(f"continued: {resumed} of {len(parts)} parts were already finished", file=sys.stderr)
    return parts, counts, max(time.monotonic() - begin, 1e-9), taken


def _refuse_rejects(args: argparse.Namespace, rejected: int, rejects_path: str) -> None:
    if args.max_rejects is not None and rejected > args.max_rejects:
        raise ValueError(
            f"{rejected} documents are rejected and --max-rejects allows {args.max_rejects}; they are listed in {rejects_path}"
        )


def _merge(
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
    splits = {
        name: merge_split(parts, name, workspace.final, dtype, record.vocab_size)
        for name in split_names(args.valid_fraction)
    }
    kept = sum(split.documents for split in splits.values())
    if kept == 0:
        raise ValueError(
            f"no document is left: {counts['read']} read, {counts['empty']} empty, {counts['rejected']} rejected"
            + (
                f" (listed in {os.path.join(workspace.final, REJECTS_FILE)}; is --field right?)"
                if counts["rejected"]
                else ""
            )
        )
    for name, split in splits.items():
        if split.documents == 0:
            raise ValueError(
                f"the {name} split is empty: --valid-fraction {args.valid_fraction} of {kept} document{'s' * (kept != 1)}. Documents are held "
                f"out whole (a text file is one): give more of them or another --valid-fraction, 0 for no split; and --overwrite to drop this run"
            )
    shutil.copytree(workspace.tokenizer, os.path.join(workspace.final, "tokenizer"))
    manifest = Manifest(
        arguments={key: value for key, value in plan.items() if key != INPUT_TIMES},
        tokenizer=record,
        dtype=dtype.name,
        splits=splits,
        documents={key: counts[key] for key in ("read", "empty", "rejected", "blank_lines")},
        input_files=len(files),
        input_bytes=sum(part.taken for part in parts),
        written_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        zaya_plugin_version=zaya_plugin.__version__,
        tokenizers_version=tokenizers.__version__,
    )
    manifest.write(workspace.final)
    return manifest


def _summary(output: str, manifest: Manifest) -> str:
    counts, tokens = manifest.documents, sum(split.tokens for split in manifest.splits.values())
    lines = [
        f"{output}: {tokens:,} tokens ({manifest.dtype}), vocabulary {manifest.tokenizer.vocab_size:,}, end of document {manifest.tokenizer.eod_id}"
    ]
    for name, split in manifest.splits.items():
        lines.append(
            f"  {name:5} {split.documents:9,} documents {split.tokens:13,} tokens, unigram entropy {split.unigram_entropy:.3f} nats/token"
        )
    limit = manifest.arguments["--max-bytes"]
    lines.append(
        f"  read {counts['read']:,} documents, {manifest.input_bytes / 1e6:.1f} MB{f' (--max-bytes {limit:,})' if limit else ''}: "
        f"{counts['empty']:,} empty, {counts['rejected']:,} rejected"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

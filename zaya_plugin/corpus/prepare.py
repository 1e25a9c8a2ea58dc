# SPDX-License-Identifier: Apache-2.0
"""`zaya data prepare`: from text to a Megatron indexed dataset.

Everything is built in `<output>.partial` and gets its name by one rename (workspace.py). The tokenizer and each part are
kept as soon as they are whole, so the same command continues where an interrupted one stopped and ends with the same bytes.
"""

import argparse
import errno
import os
import re
import shutil
import sys
from concurrent.futures.process import BrokenProcessPool

from zaya_plugin.corpus import arguments
from zaya_plugin.corpus.build import (
    INPUT_FILES,
    INPUT_TIMES,
    PART_BYTES,
    REJECTS_FILE,
    make_dataset,
    make_parts,
    make_tokenizer,
    refuse_rejects,
    summary,
)
from zaya_plugin.corpus.inputs import InputFile, find_inputs, fingerprint
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.manifest import load_manifest


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
        message = "a worker process was killed, most often because memory ran out: try fewer --workers or a smaller "
        message += f"--max-document-bytes{_kept(workspace)}"
    except OSError as error:
        # shutil.copytree and tokenizers put the number into the text.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or re.search(
            r"(Errno|os error) 28\b", str(error)
        )
        message = (
            f"{'no space left to write' if full else 'cannot read or write'} {error.filename or workspace.partial}: "
        )
        message += f"{error.strerror or error}{_kept(workspace)}"
    except KeyboardInterrupt:
        print(f"interrupted{_kept(workspace)}", file=sys.stderr)
        return 130
    print(f"zaya data prepare: error: {message}", file=sys.stderr)
    return 1


def _kept(workspace: Workspace) -> str:
    if not os.path.isfile(workspace.plan_file):
        return ""
    return (
        f". {workspace.output} was not touched; what is finished is kept in {workspace.partial}, "
        f"and the same command continues from there"
    )


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
        record = make_tokenizer(args, workspace, files)
        parts, counts, seconds, taken = make_parts(args, workspace, files, part_bytes, record)
        try:
            manifest = make_dataset(args, workspace, parts, counts, record, plan, files)
            workspace.publish()
        except OSError:
            shutil.rmtree(workspace.final, ignore_errors=True)  # gives the space back; made from the parts again
            raise
    if not args.quiet:
        print(summary(workspace.output, manifest))
        if taken:
            megabytes, workers = taken / 1e6, f"{args.workers} worker{'s' * (args.workers > 1)}"
            print(f"  tokenised {megabytes:.1f} MB in {seconds:.1f} s: {megabytes / seconds:.1f} MB/s with {workers}")


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
            f"{workspace.output} holds a dataset made with other arguments; give --overwrite to replace it, "
            f"or choose another --output\n  " + "\n  ".join(different)
        )
    refuse_rejects(args, manifest.documents["rejected"], os.path.join(workspace.output, REJECTS_FILE))
    if os.path.exists(workspace.partial):  # killed after the dataset got its name, before the rest was removed
        with workspace.locked():
            workspace.discard()
    if not args.quiet:
        print(f"already complete, nothing to do\n{summary(workspace.output, manifest)}")
    return True


def _begin_or_continue(args: argparse.Namespace, workspace: Workspace, plan: dict, files: list[InputFile]) -> int:
    """Returns the part size; on continuing the one that the run began with, because a part ends where the next begins."""
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
        if not args.overwrite and workspace.has_work():
            raise ValueError(
                f"{workspace.partial} holds an unfinished run with other arguments; give --overwrite to drop it, "
                f"or choose another --output\n  " + "\n  ".join(different)
            )
    workspace.begin({**plan, "part_bytes": part_bytes})
    return part_bytes


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""What the `zaya data` commands share: errors as one message and an exit status, and outputs that are taken up again."""

import argparse
import errno
import os
import sys
from collections.abc import Callable

from zaya_plugin.corpus.arguments import differences
from zaya_plugin.corpus.workspace import Workspace
from zaya_plugin.data.manifest import Manifest, load_manifest


def run_command(name: str, action: Callable[[], None], afterwards: str = "") -> int:
    """Runs an action; returns 0 done, 1 failed with a message on stderr, 130 interrupted.

    Args:
        afterwards: what holds after a full disk or an interruption, for example that the same command continues.
    """
    tail = f". {afterwards}" if afterwards else ""
    try:
        action()
        return 0
    except ValueError as error:
        message = str(error)
    except BrokenPipeError:  # `zaya data inspect ... | head`
        raise
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        what = "no space left to write" if full else "cannot read or write"
        message = f"{what} {error.filename or ''}: {error.strerror or error}{tail}"
    except KeyboardInterrupt:
        print(f"interrupted{tail}", file=sys.stderr)
        return 130
    print(f"zaya data {name}: error: {message}", file=sys.stderr)
    return 1


def command_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        f"zaya data {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def complete(workspace: Workspace, plan: dict, overwrite: bool) -> Manifest | None:
    """The dataset at the output if it was made by this plan; None if it is to be made.

    Raises:
        ValueError: something else is there.
    """
    if not os.path.exists(workspace.output) or not os.listdir(workspace.output):
        return None
    try:
        manifest = load_manifest(workspace.output)
    except ValueError as error:
        raise ValueError(
            f"--output {workspace.output} exists and is not a dataset that this command may replace: {error}"
        ) from None
    different = differences(manifest.arguments, plan)
    if overwrite and different:
        return None
    if different:
        raise ValueError(
            f"{workspace.output} holds a dataset made with other arguments; give --overwrite to replace it, "
            "or choose another --output\n  " + "\n  ".join(different)
        )
    return manifest


def begin(workspace: Workspace, plan: dict, overwrite: bool) -> None:
    """Starts, or goes on with what an interrupted run of the same plan has left.

    Raises:
        ValueError: an unfinished run of another plan is there.
    """
    earlier = workspace.load_plan()
    different = differences(earlier, plan) if earlier is not None else []
    if earlier is not None and not different:
        return
    if different and not overwrite and os.path.isdir(workspace.final):
        raise ValueError(
            f"{workspace.partial} holds an unfinished run with other arguments; give --overwrite to drop it, "
            "or choose another --output\n  " + "\n  ".join(different)
        )
    workspace.begin(plan)

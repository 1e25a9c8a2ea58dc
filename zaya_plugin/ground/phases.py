# SPDX-License-Identifier: Apache-2.0
"""Lines on the console about what a start is doing: one for each phase that takes longer than QUIET_SECONDS.

One process of a run shows them: the launcher on its stderr, then rank 0 on the console. Everywhere else they are off.
`quiet_hosts` keeps from the console what only a rank's log needs.
"""

import contextlib
import logging
import threading
import warnings
from typing import TextIO

QUIET_SECONDS = 1.0

_console: TextIO | None = None
_timer: threading.Timer | None = None


def show(console: TextIO | None) -> None:
    """Show the phases of this process on `console`, or no longer with None."""
    global _console
    end()
    _console = console


def begin(text: str) -> None:
    """End the phase before and begin another one."""
    global _timer
    end()
    if _console is not None:
        _timer = threading.Timer(QUIET_SECONDS, _print, [_console, text])
        _timer.daemon = True
        _timer.start()


def end() -> None:
    """End the phase; what it has not printed so far stays unprinted."""
    global _timer
    if _timer is not None:
        _timer.cancel()
    _timer = None


def _print(console: TextIO, text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a console that is gone must not end the thread with a traceback
        print(f"zaya: {text}", file=console, flush=True)


def quiet_hosts() -> None:
    """Keep from the console warnings of Megatron about packages that it lacks and about its own future, and torch's
    about a single process and, without a GPU, about a compiler that nothing calls. Call it before Megatron is imported.
    """
    for module in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        warnings.filterwarnings("ignore", module=module)
        logging.getLogger(module).setLevel(logging.ERROR)

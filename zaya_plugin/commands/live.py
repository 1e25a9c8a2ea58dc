# SPDX-License-Identifier: Apache-2.0
"""Text that is drawn in the terminal again and again, by rich."""

import signal
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from zaya_plugin.ground.errors import mistake

SECONDS = 2.0  # between two looks


def show_live(render: Callable[[int, int], tuple[Any, bool]]) -> bool:
    """Show what `render` returns until it says that this was the last text, or until Ctrl-C; return whether it ended by
    itself. The last text stays on the terminal. Outside a terminal it is shown once.

    render: called with columns and rows; returns a text, as str or rich.text.Text, and whether it is the last one.

    Raises:
        ValueError: rich is not installed.
    """
    require_packages("rich")
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console, text, last = Console(highlight=False), "", False

    def drawn() -> Text:
        nonlocal text, last
        text, last = render(*console.size)
        text = Text(text) if isinstance(text, str) else text
        text.no_wrap, text.overflow = True, "crop"
        return text

    if not console.is_terminal or console.is_dumb_terminal:
        console.print(drawn())
        return last
    stop = threading.Event()  # a KeyboardInterrupt could be lost in a library
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        with Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
            while not last and not stop.wait(SECONDS):
                live.update(drawn(), refresh=True)
    finally:
        signal.signal(signal.SIGINT, before)
    console.print(text)
    return last


def require_packages(*names: str) -> None:
    """Raise ValueError for the packages of the extra `terminal` that are not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        problem = f"the package {' and '.join(missing)}, which draws in the terminal, is not installed"
        raise mistake("terminal", problem=problem, fix="pip install 'zaya_plugin[terminal]'")

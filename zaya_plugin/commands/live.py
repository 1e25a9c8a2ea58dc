# SPDX-License-Identifier: Apache-2.0
"""A text in the terminal that is updated until it ends, by rich."""

import signal
import threading
from collections.abc import Callable
from typing import Any

from zaya_plugin.ground.packages import require_packages

SECONDS = 2.0  # between two updates


def show_live(render: Callable[[int, int], tuple[Any, bool]], once: bool = False) -> None:
    """Show the text that `render` returns and update it until `render` says that it was the last one, or until Ctrl-C.
    The last text stays on the terminal. With `once`, and outside a terminal, the text is printed once.

    render: called with columns and rows; returns a text, as str or rich.text.Text, and whether it is the last one.

    Raises:
        ValueError: rich is not installed.
    """
    require_packages("terminal", "rich")
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

    if once or not console.is_terminal or console.is_dumb_terminal:
        console.print(drawn())
        return
    stop = threading.Event()  # a KeyboardInterrupt could be lost in a library
    before = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        with Live(drawn(), console=console, screen=True, auto_refresh=False) as live:
            while not last and not stop.wait(SECONDS):
                live.update(drawn(), refresh=True)
    finally:
        signal.signal(signal.SIGINT, before)
    console.print(text)

# SPDX-License-Identifier: Apache-2.0
"""The progress bar of commands that take more than a few seconds."""

from __future__ import annotations

import sys

from zaya_plugin.ground import phases


def bar(title: str, total: int | None = None, unit: str = "B", quiet: bool = False):
    """Return a tqdm bar on stderr, which is not shown outside a terminal; `reset(total)` states the size later."""
    from tqdm import tqdm

    phases.end()
    hidden = True if quiet else None  # None: outside a terminal
    return tqdm(total=total, unit=unit, unit_scale=True, desc=title, leave=False, disable=hidden, file=sys.stderr)

# SPDX-License-Identifier: Apache-2.0
"""The progress bar of commands that read or write many bytes."""

from __future__ import annotations

import sys

from zaya_plugin.ground import phases


def bar(title: str, total: int | None = None, unit: str = "B"):
    """Return a tqdm bar on stderr, which is not shown outside a terminal; `reset(total)` states the size later."""
    from tqdm import tqdm

    phases.end()
    return tqdm(total=total, unit=unit, unit_scale=True, desc=title, leave=False, disable=None, file=sys.stderr)

# SPDX-License-Identifier: Apache-2.0
"""The one form of messages about a wrong argument or setting, and warnings that are written once. Needs no torch."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger("hip_ops")
_warnings: set[tuple] = set()  # keys of those that were written; one for a failed build, not one per operator


class NotCompiled(RuntimeError):
    """No shipped object fits a call, and the installed Triton cannot compile its kernel; another version can run."""


def mistake(subject: str, problem: str, allowed: str, fix: str = "") -> ValueError:
    """Return the ValueError `<subject>: <problem>. Allowed: <allowed>. Fix: <fix>.`

    subject: the setting as it is typed, `<key>=<value>`, or the function. fix: what to type; may be empty.
    """
    return ValueError(f"{subject}: {problem}. Allowed: {allowed}." + (f" Fix: {fix}." if fix else ""))


def warn_once(key: tuple, text: str, *values: Any) -> None:
    """Write a warning, unless one with this key was written."""
    if key not in _warnings:
        _warnings.add(key)
        logger.warning(text, *values)

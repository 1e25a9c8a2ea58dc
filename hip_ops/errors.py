# SPDX-License-Identifier: Apache-2.0
"""The one form of messages about a wrong argument or setting. Needs no torch."""

from __future__ import annotations


class NotCompiled(RuntimeError):
    """No shipped object fits a call, and the installed Triton cannot compile its kernel; another version can run."""


def mistake(subject: str, problem: str, allowed: str, fix: str = "") -> ValueError:
    """Return the ValueError `<subject>: <problem>. Allowed: <allowed>. Fix: <fix>.`

    subject: the setting as it is typed, `<key>=<value>`, or the function. fix: what to type; may be empty.
    """
    return ValueError(f"{subject}: {problem}. Allowed: {allowed}." + (f" Fix: {fix}." if fix else ""))

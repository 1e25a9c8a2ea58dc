# SPDX-License-Identifier: Apache-2.0
"""The one form of messages about a wrong argument or setting. Needs no torch."""

from __future__ import annotations


def mistake(given: str, problem: str, allowed: str, fix: str = "") -> ValueError:
    """Return the ValueError `<given>: <problem>. Allowed: <allowed>. Fix: <fix>.`

    given: the setting as it is typed, `<key>=<value>`, or the function. fix: what to type; left out where it is empty.
    """
    return ValueError(f"{given}: {problem}. Allowed: {allowed}." + (f" Fix: {fix}." if fix else ""))

# SPDX-License-Identifier: Apache-2.0
"""Removes secrets from text and settings that leave the machine. No torch import."""

from __future__ import annotations

import re
from collections.abc import Mapping

REMOVED = "<removed>"
WORDS = "KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|AUTH|COOKIE"
_NAME = re.compile(rf"(^|_)({WORDS})S?(_|$)", re.IGNORECASE)
# Assignments to such names, in shell, YAML, JSON and Python's reprs. The value ends at a quote, a space or a comma.
_ASSIGNED = re.compile(
    rf"""(?P<name>["']?\b[\w.-]*?(?:(?<![a-z])|_)(?:api_?|access_?|private_?|secret_?)?(?:{WORDS})S?(?:_\w+)?["']?"""
    r"""\s*[:=]\s*)(?P<quote>["']?)(?P<value>[^\s"',}]+)""",
    re.IGNORECASE,
)
_IN_URL = re.compile(r"(?P<scheme>\b[a-z][\w+.-]*://)[^\s/@:]*:[^\s/@]+@", re.IGNORECASE)
_BEARER = re.compile(r"\b(Bearer|Basic)\s+[\w.~+/=-]{8,}", re.IGNORECASE)
# Tokens with a form of their own: Hugging Face, GitHub, GitLab, AWS, Slack, OpenAI, W&B's 40 hexadecimal digits.
_FORMS = re.compile(
    r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[A-Z0-9]{12,}"
    r"|xox[abprs]-[\w-]{10,}|sk-[\w-]{16,}|wandb_v\d_\w{16,})"
)
_WANDB = re.compile(r"(?i)((?:wandb|api)[^\n]{0,40}?)\b[0-9a-f]{40}\b")
_HOME = re.compile(r"(?P<folder>/(?:home|Users)/)[^/\s\"':,]+")


def is_secret(name: str) -> bool:
    """Whether a variable or key of this name may hold a secret."""
    return _NAME.search(name) is not None


def without_secrets(variables: Mapping[str, str]) -> dict[str, str]:
    """Return `variables` with the values of secret ones replaced, and the others' text cleaned."""
    return {name: REMOVED if is_secret(name) else cleaned(value) for name, value in variables.items()}


def cleaned(text: str) -> str:
    """Return `text` without passwords in URLs, assigned secrets, tokens, and names of users in home folders."""
    text = _IN_URL.sub(rf"\g<scheme>{REMOVED}@", text)
    text = _BEARER.sub(rf"\1 {REMOVED}", text)
    text = _ASSIGNED.sub(rf"\g<name>\g<quote>{REMOVED}", text)
    text = _FORMS.sub(REMOVED, text)
    text = _WANDB.sub(rf"\1{REMOVED}", text)
    return _HOME.sub(r"\g<folder><user>", text)

# SPDX-License-Identifier: Apache-2.0
"""Removes secrets from text and settings that leave the machine. No torch import.

Patterns cannot know every secret: what they look for is in tests/verify/test_secrets.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "<removed>"
WORDS = "KEYS?|TOKEN|SECRETS?|PASSWORDS?|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|AUTHORIZATION|COOKIES?|SIGNATURE|SIG|NETRC"
_NAME = re.compile(rf"(^|_)({WORDS})(_|$)", re.IGNORECASE)
PATTERNS = (
    # the block of a private key
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REMOVED),
    # user and password before a host
    (re.compile(r"(\b[a-z][\w+.-]*://)[^\s/@\"']+@", re.IGNORECASE), rf"\1{REMOVED}@"),
    (re.compile(r"\b(Bearer|Basic|token|password)\s+[\w.~+/=!$-]{6,}", re.IGNORECASE), rf"\1 {REMOVED}"),
    (re.compile(r"(--?[\w-]*(?:key|token|secret|password)[= ]+)[^\s\"']+", re.IGNORECASE), rf"\1{REMOVED}"),
    # an assignment to a name that ends in such a word: shell, YAML, JSON, Python
    (
        re.compile(
            rf"(\b[\w.-]*?(?:(?<![a-z])|_)(?:api|access|private|secret)?[_-]?(?:{WORDS})[\"']?\s*[:=]\s*[\"']?)"
            r"(?!<removed>)[^\s\"',;&}]+",
            re.IGNORECASE,
        ),
        rf"\1{REMOVED}",
    ),
    # tokens with a form of their own: Hugging Face, GitHub, GitLab, AWS, Slack, OpenAI, W&B
    (
        re.compile(
            r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[A-Z0-9]{12,}"
            r"|xox[abprs]-[\w-]{10,}|sk-[\w-]{16,}|wandb_v\d_\w{16,})"
        ),
        REMOVED,
    ),
    (re.compile(r"((?:wandb|api)[^\n]{0,40}?)\b[0-9a-f]{40}\b", re.IGNORECASE), rf"\1{REMOVED}"),
    # the name of a user
    (re.compile(r"(/(?:home|Users)/)[^/\s\"':,]+"), r"\1<user>"),
)


def is_secret(name: str) -> bool:
    """Whether a variable or key of this name may hold a secret."""
    return _NAME.search(name) is not None


def of_data(value: Any) -> Any:
    """Return plain data for a JSON file that leaves the machine: texts cleaned, texts under a secret name removed, NaN
    and infinities as text.
    """
    if isinstance(value, Mapping):
        return {
            name: REMOVED if isinstance(each, str) and is_secret(str(name)) else of_data(each)
            for name, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [of_data(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return cleaned(value) if isinstance(value, str) else value


def cleaned(text: str) -> str:
    """Return `text` without passwords in URLs, assigned secrets, tokens, and names of users in home folders."""
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text

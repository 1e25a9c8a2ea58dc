# SPDX-License-Identifier: Apache-2.0
"""Removes secrets from text and settings that leave the machine. No torch import.

Patterns cannot know every secret: what they look for is in tests/ground/test_secrets.py. Every repetition is bounded or
can start only once in a run of its characters, so the time grows with the length of the text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

REMOVED = "<removed>"
# Anywhere in a name. A number below such a name is removed too.
PASSWORD = re.compile(r"secret|passw|passphrase|credential|(?<!by)(?<!com)pass$|pwd$", re.IGNORECASE)
# At the end of a name, or before _ID and the like. "TOKENS" alone counts tokens; PAT, SIG and AUTH also end other words.
KEY = re.compile(
    r"(?:keys?|token|(?:api|access|auth|refresh)[_-]?tokens|authorization|cookies?|signature|netrc"
    r"|(?:(?<![a-z])|(?-i:(?<=[a-z])(?=[A-Z])))(?:pat|sig|o?auth))(?:[_-](?:id|file|path|base|data|\d{1,3}))?$",
    re.IGNORECASE,
)
# Of tokenizers and state dictionaries.
HARMLESS = re.compile(
    r"(?:^|[_.-])(?:[bec]os|pad|unk|cls|sep|mask|image|per|special|added|next|last|first|missing|unexpected|sort|cache)"
    r"[_-](?:token|keys?)(?:_id)?$",
    re.IGNORECASE,
)
CONSTANT = re.compile(r"(?:true|false|null|none|yes|no|\d)(?=[\s,;}\])]|$)", re.IGNORECASE)
NUMBER = re.compile(r"-?\d{1,9}(?:\.\d{1,20})?(?:e[+-]?\d{1,3})?(?=[\s,;}\])]|$)", re.IGNORECASE)
# `name =`, `"name":`, `--flag ` and `'--flag', `, without the value
NAMED = re.compile(
    r"(?<![\w.-])(?:(?P<name>[\w.-]+)(?P<quote>\\?[\"'])?(?P<sign>[ \t]{0,8}(?:=>|:=|==?|:)[ \t]{0,8})"
    r"|(?P<flag>-[\w.-]+)(?:\\?[\"'])?,?\s{1,8}(?!\\?[\"']?--))"
)
# Values. A quote inside a word belongs to it; a backslash hides the next character.
INSIDE = r"\\.?|[\"'](?![\s,:;}\])]|$)"
QUOTED = re.compile(rf"(\\?[\"'])(?:\1\1|(?!\1)(?:\\.|[^\\])){{0,4096}}\1(?:{INSIDE}|[^\s\\,;}}\])\"'])*", re.DOTALL)
GROUP = re.compile(r"[\[{][^\[\]{}]{0,4096}[\]}]")  # of JSON, on one line or more
ITEMS = re.compile(r"(?:\n[ \t]{0,64}- [^\n]*)+")  # of YAML
IN_JSON = re.compile(r"[^\s,}\]]+")
WORD = re.compile(rf"(?:{INSIDE}|[^\s\\\"'])+")
LINE = re.compile(rf"(?:{INSIDE}|[^\n\\\"'])+", re.MULTILINE)
PATTERNS = (
    # the block of a private key
    (
        re.compile(r"-----BEGIN [A-Z ]{0,64}PRIVATE KEY-----.*?(-----END [A-Z ]{0,64}PRIVATE KEY-----|\Z)", re.DOTALL),
        REMOVED,
    ),
    # user and password before a host
    (re.compile(r"(\b[a-z][\w+.-]{0,20}://)[^\s/\"'<>]{1,512}@", re.IGNORECASE), rf"\1{REMOVED}@"),
    (re.compile(r"\b(Bearer|Basic|token|password)\s{1,64}[\w.~+/=!$-]{6,}", re.IGNORECASE), rf"\1 {REMOVED}"),
    # netrc, where short passwords count too
    (re.compile(r"\b((?:machine|login|account)\s{1,64}\S{1,256}\s{1,64}password\s{1,64})\S+"), rf"\1{REMOVED}"),
    # tokens with a form of their own: Hugging Face, GitHub, GitLab, AWS, Slack, OpenAI, W&B
    (
        re.compile(
            r"\b(hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|AKIA[A-Z0-9]{12,}"
            r"|xox[abprs]-[\w-]{10,}|sk-[\w-]{16,}|wandb_v\d_\w{16,})"
        ),
        REMOVED,
    ),
    (re.compile(r"((?:wandb|api)[^\n]{0,40}?)\b[0-9a-f]{40}\b", re.IGNORECASE), rf"\1{REMOVED}"),
)
USER = re.compile(r"(/(?:home|users|scratch)\d{0,3}/)[^/\s\"':,]+", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Whether a variable or key of this name may hold a secret."""
    return PASSWORD.search(name) is not None or KEY.search(name) is not None and HARMLESS.search(name) is None


def is_plain(name: str, text: str, place: int = 0) -> bool:
    """Return whether the value at `place` is not a secret though its name is one: true, null, a digit;
    a number of tokens.
    """
    number = PASSWORD.search(name) is None and NUMBER.match(text, place)
    return bool(number or CONSTANT.match(text, place))


def of_data(value: Any) -> Any:
    """Return plain data for a JSON file that leaves the machine: texts cleaned, values under a secret name removed, NaN
    and infinities as text.
    """
    if isinstance(value, Mapping):
        return {
            name: REMOVED
            if is_secret(str(name)) and (isinstance(item, str) or not is_plain(str(name), str(item)))
            else of_data(item)
            for name, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        flags = [isinstance(item, str) and item.startswith("-") and is_secret(item) for item in value]
        return [REMOVED if flag else of_data(item) for flag, item in zip([False, *flags], value, strict=False)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return cleaned(value) if isinstance(value, str) else value


def cleaned(text: str) -> str:
    """Return `text` without what the patterns find: passwords in URLs, values of secret names, tokens, and names of
    users in home folders.
    """
    return USER.sub(r"\1<user>", without_secrets(text))


def without_secrets(text: str) -> str:
    """Return `text` without passwords, values of secret names and tokens. Paths stay whole: the user reads them."""
    text = without_values(text)
    for pattern, replacement in PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def without_values(text: str) -> str:
    """Return `text` without the values of secret names: up to the closing quote, and without quotes up to the end of
    the word (`NAME=value`, `--flag value`), of the line (`name: value`) or of the JSON value (`"name": value`).
    """
    parts, end = [], 0
    for match in NAMED.finditer(text):
        start, name = match.end(), match["name"] or match["flag"]
        if match.start() < end or not is_secret(name) or is_plain(name, text, start):
            continue
        bare = IN_JSON if match["quote"] else LINE if (match["sign"] or "=") != "=" else WORD
        value = next(filter(None, (kind.match(text, start) for kind in (QUOTED, GROUP, ITEMS, bare))), None)
        if value is None:
            continue
        quote = value[1] if value.re is QUOTED else '"' if match["quote"] or value.re is GROUP else ""
        parts += text[end:start], quote, REMOVED, quote
        end = value.end()
    return "".join([*parts, text[end:]])

# SPDX-License-Identifier: Apache-2.0
"""`~` in the paths of users: in recipes' keys, and in the words of commands, where a shell expands it only at the
beginning of a word.
"""

import os
import re
from collections.abc import Sequence

from zaya_plugin.ground.errors import mistake

PATHS = (
    *("run_dir", "checkpoint.path", "checkpoint.local_path", "data.path", "data.valid_path", "data.cache_path"),
    *("data.tokenizer", "handover.from_run", "handover.from_hf", "handover.adapter", "stage.sample_prompts"),
    *("parallel.bucket_plan", "stage.record_routing", "stage.replay_routing"),
)
BLENDS = ("data.blend", "data.valid_blend", "data.consumed")  # entries are 'number path'
TEXTS = ("--prompt",)  # options whose value is no path, whatever it begins with


def expanded(key: str, path: str) -> str:
    """Return a path with the home directory in place of a `~` at its beginning;
    raises ValueError if it is not known.
    """
    if not path.startswith("~"):
        return path
    if (home := os.path.expanduser(path)) == path:
        raise mistake(
            key,
            path,
            problem="no such user, so `~` cannot be expanded",
            allowed="~/... for your home directory",
            fix=f"an absolute path, or ./{path} for a file of this name",
        )
    return home


def expanded_entry(key: str, entry: str) -> str:
    """Return an entry of a blend with its path expanded."""
    number, space, path = entry.rpartition(" ")
    return f"{number}{space}{expanded(key, path)}"


def expanded_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command with `~` expanded in `~/x` and `--option=~/x`; those behind `--` are of another
    program.
    """
    end = words.index("--") if "--" in words else len(words)
    result = []
    for position, word in enumerate(words[:end]):
        option, _, value = word.partition("=")
        if option in TEXTS or position and words[position - 1] in TEXTS:
            result.append(word)
        elif word == "~" or re.match(r"~[^/=]*/", word):  # not ~key, with which Hydra removes a key
            result.append(expanded(word, word))
        elif re.match(r"--?[\w-]+=~", word):
            result.append(f"{option}={expanded(option, value)}")
        else:
            result.append(word)
    return [*result, *words[end:]]

# SPDX-License-Identifier: Apache-2.0
"""Messages about single keys of a recipe: unknown keys, missing values, values that a key may not have, Hydra's
errors.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import get_type_hints

from omegaconf.errors import OmegaConfBaseException

from zaya_plugin.config.schema import Recipe, default_of, get, leaves
from zaya_plugin.ground.errors import as_typed, message, mistake, nearest_name

TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "list[str]": "a list such as [a,b]",
    "list[int]": "a list such as [0,1]",
    "dict[str, str]": "a mapping of names to text",
    "dict[str, Any]": "a mapping",
}

SIMILAR = 0.6  # of difflib; names that differ more are not suggested
# Names that other tools have for a key -> the key, or the group whose option is meant (optimizer=adamw).
OTHER_NAMES = {
    "learning_rate": "optim.lr",
    "max_steps": "stage.train_iters",
    "optimizer": "optim",
    "steps": "stage.train_iters",
}
TO_CONTINUE = "auto"  # what `resume=true` means


@cache
def schema() -> dict[str, Field]:
    """Return the dataclass field of every key, by dotted path."""
    return dict(leaves())


@cache
def groups() -> dict[str, type]:
    """Return the dataclass of every group, by name."""
    hints = get_type_hints(Recipe)
    return {f.name: hints[f.name] for f in fields(Recipe) if is_dataclass(hints[f.name])}


def known(path: str) -> bool:
    """Return whether `path` is a key or a group of the recipe."""
    return path in schema() or any(key.startswith(f"{path}.") for key in schema())


def allowed(field: Field) -> str:
    """Return in words what the key of `field` may hold: its choices, or its type and range."""
    choices, limit = field.metadata["choices"], field.metadata["limit"]
    if choices:
        return ", ".join(map(as_typed, choices))
    kind, _, optional = str(field.type).partition(" | ")
    return f"{TYPE_NAMES[kind]}{f' {limit.text}' if limit else ''}{', or null' if optional else ''}"


def refused(key: str, field: Field, value: object, value_of: Callable[[str], object] | None = None) -> str | None:
    """Return a message if `value` is not among the choices or in the range of `field`, else None."""
    choices, limit = field.metadata["choices"], field.metadata["limit"]
    if choices and value not in choices or limit and value is not None and not limit.holds(value):
        return refusal(key, field, value, value_of)
    return None


def refusal(key: str, field: Field, value: object, value_of: Callable[[str], object] | None = None) -> str:
    """Return the message that `key` may not have `value`; the fix is the recipe's own value, which `value_of` returns
    by key, else the schema's default.
    """
    default = default_of(field)
    default = default if value_of is None else value_of(field_path(key))
    default = TO_CONTINUE if key == "resume" and as_typed(value) == "true" else default
    typed = "<value>" if default == "???" else as_typed(default)
    return message(
        key, value, problem="this value is not allowed", allowed=allowed(field), fix=f"{field_path(key)}={typed}"
    )


def require(holds: bool, key: str, value: object, **text: str) -> Iterator[str]:
    """Yield the message about `key` unless `holds`; text: the parts of the message."""
    if not holds:
        yield message(key, value, **text)


def must_be(recipe: Recipe, key: str, required: object, condition: str, why: str) -> Iterator[str]:
    """Yield a message if `key` has another value than `wanted`, the only one allowed under `condition`, such as
    cluster.device=cpu.
    """
    value, typed = get(recipe, key), as_typed(required)
    yield from require(
        value == required, key, value, problem=why, allowed=f"{typed} with {condition}", fix=f"{key}={typed}"
    )


def must_divide(key: str, value: int, number: int, what: str, why: str) -> Iterator[str]:
    """Yield a message if `value` does not divide `number`, which `what` describes."""
    fix = f"{key}={math.gcd(number, value)}"
    yield from require(number % value == 0, key, value, problem=why, allowed=f"a divisor of {what}", fix=fix)


def must_be_multiple(key: str, value: int, unit: int, why: str) -> Iterator[str]:
    """Yield a message if `value` is not a multiple of `unit`."""
    yield from require(value % unit == 0, key, value, problem=why, **multiples(key, value, unit))


def multiples(key: str, value: int, unit: int) -> dict[str, str]:
    """Return `allowed` and `fix` of a message: the multiples of `unit` around `value`, of which the first is set for
    `key`.
    """
    below = value // unit * unit
    around = [below, below + unit] if below else [unit]
    return {"allowed": " or ".join(map(str, around)), "fix": f"{key}={around[0]}"}


def field_path(key: str) -> str:
    """Return the key of an entry such as profile.ranks[0]: profile.ranks."""
    return re.sub(r"\[\d+\]$", "", key)


def nearest(path: str, value: object = None) -> str | None:
    """Return the known key that `path` was most probably meant to be, or None: of similar ones rather one that may have
    `value`.
    """
    group, _, name = path.lower().rpartition(".")
    other = OTHER_NAMES.get(name)
    if other is not None and group in ("", other.partition(".")[0]):
        return other
    names = [*schema(), *(() if group else groups())]
    same = [known_path for known_path in names if known_path.rsplit(".", 1)[-1] == name]
    siblings = [known_path for known_path in schema() if group and known_path.startswith(f"{group.split('.')[0]}.")]

    def similarity(known_path: str) -> float:
        return difflib.SequenceMatcher(None, name, known_path.rsplit(".", 1)[-1]).ratio()

    for candidates in (same, siblings or names):
        similar = [known_path for known_path in candidates if similarity(known_path) >= SIMILAR]
        if similar:
            return max(similar, key=lambda known_path: (accepts(known_path, value), similarity(known_path)))
    return None if group else nearest_name(path, groups())


def accepts(path: str, value: object) -> bool:
    """Return whether a key may have `value`, as it was typed or read; True without a value."""
    field = schema().get(path)
    if field is None or value is None:
        return value is None
    kind, _, optional = str(field.type).partition(" | ")
    text = as_typed(value)
    choices = [as_typed(choice) for choice in field.metadata["choices"]]
    if choices or text == "null":
        return text in choices or text == "null" and bool(optional)
    try:
        number = float(text)
    except ValueError:
        return kind == {"true": "bool", "false": "bool", "[": "list[str]", "{": "dict[str"}.get(
            text if text in ("true", "false") else text[:1], "str"
        )
    limit = field.metadata["limit"]
    return (kind == "float" or kind == "int" and number.is_integer()) and (limit is None or limit.holds(number))


def unknown_key(path: str, value: object = None) -> str:
    """Return the message for a key that is not in the schema."""
    values = () if value is None else (value,)
    group = path.split(".", 1)[0]
    if group in groups() and "." in path:
        keys = f"keys of {group}: {', '.join(f.name for f in fields(groups()[group]))}"
    else:
        keys = f"groups and keys: {', '.join(f.name for f in fields(Recipe))}"
    guess = nearest(path, value)
    fix = "megatron.<name>=<value> for a Megatron argument that has no key"
    if guess is None and group in groups():
        fix = f"{group}.<one of these keys>=<value>, or {fix}"
    elif guess is not None and value in (None, "{...}"):
        fix = guess
    elif guess in OTHER_NAMES.values() and guess not in schema():
        fix = f"{guess}={as_typed(value)}"
    elif guess is not None:
        text = guess in schema() and str(schema()[guess].type) == "str" and not schema()[guess].metadata["choices"]
        fix = f"{guess}={as_typed(value) if text or accepts(guess, value) else '<value>'}"
    return message(path, *values, problem="no such key", allowed=keys, fix=fix)


def missing_key(path: str) -> str:
    """Return the message for a key that has no value."""
    field = schema()[path]
    problem = f"has no value ({field.metadata['help']})"
    return message(path, problem=problem, allowed=allowed(field), fix=f"{path}=<value>")


def explain(error: BaseException, value_of: Callable[[str], object] | None = None) -> str:
    """Return one message for an exception of Hydra or OmegaConf. value_of: as in `refusal`."""
    text = str(error)
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    in_file = re.search(
        r"In '(.+)': (\w+) raised while composing config:\n(.*)", text
    )  # Hydra drops the cause of these
    named = re.search(r"full_key: (\S+)", text)
    path = getattr(cause, "full_key", None) or (named.group(1) if named else "")
    key = field_path(path)
    name = in_file.group(2) if in_file else type(cause).__name__
    if in_file:
        quoted = re.search(r"Value '(.*?)'", in_file.group(3))
        if not known(key):
            problem = unknown_key(path)
        elif quoted and key in schema():
            problem = refusal(path, schema()[key], quoted.group(1))
        else:
            problem = in_file.group(3)
        return f"recipes {in_file.group(1)}.yaml: {problem}"
    if name in ("ConfigKeyError", "ConfigAttributeError") and path and not known(path):
        override = re.search(r"Could not override '([^']*)'(?:.*use \+[^=\s]+=(.*))?", text, re.DOTALL)
        return unknown_key(*override.groups()) if override else unknown_key(path, getattr(cause, "value", None))
    if option := re.search(r"Could not find '(.+)/(.+)'\n\nAvailable options in '[^']*':((?:\n\t\S+)+)", text):
        group, choice, available = option.groups()
        close = nearest_name(choice, available.split())
        fix = f"{group}={close}" if close else ""
        return message(group, choice, problem="no such recipe", allowed=", ".join(available.split()), fix=fix)
    if several := re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text):
        key, value = several.groups()
        a_list = f"{key}=[{value}] for a list, or " if key in schema() else ""
        return message(key, value, problem="several values", fix=f"{a_list}add -m to run every value")
    if name == "OverrideParseException":
        return message(
            getattr(cause, "override", None) or "override",
            problem=f"cannot be parsed ({text.splitlines()[0].rstrip('.')})",
            allowed="key=value, with quotes around a value that contains one of {}[](),=",
            fix="'key=\"value\"'",
        )
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing and missing.group(1) in schema():
        return missing_key(missing.group(1))
    if name.startswith("Interpolation") or "resolving interpolation" in text:
        return message(path, problem=f"${{...}} cannot be resolved: {str(cause).splitlines()[0]}")
    if "does not support deletion" in text:
        return message(
            path,
            problem="a key cannot be removed",
            allowed=allowed(schema()[path]) if path in schema() else "",
            fix=f"{path}=<value>",
        )
    if key in schema():
        return refusal(path, schema()[key], getattr(cause, "value", None), value_of)
    if key in groups():
        return message(
            key, getattr(cause, "value", None), problem="this is a group of keys", fix=f"{key}.<key>=<value>"
        )
    return " ".join(line.strip() for line in str(cause).splitlines() if "_type=" not in line)


def check_transformers_has(normalization: str) -> None:
    """Raise ValueError for norms that transformers' ZayaForCausalLM does not have."""
    if normalization != "RMSNorm":
        raise mistake(
            "model.normalization",
            normalization,
            problem="transformers' ZayaForCausalLM has RMSNorm alone",
            allowed="RMSNorm",
            fix="model.normalization=RMSNorm",
        )

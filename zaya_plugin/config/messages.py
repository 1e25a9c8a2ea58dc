# SPDX-License-Identifier: Apache-2.0
"""Words for what is wrong with a recipe: the key's full path, the value, what is allowed and the nearest known key."""

from __future__ import annotations

import difflib
import re
from dataclasses import fields, is_dataclass
from functools import cache
from typing import get_type_hints

from omegaconf.errors import OmegaConfBaseException

from zaya_plugin.config.schema import Recipe, leaves

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


# Keys of earlier versions: what became of them.
_OVERRIDE = "was replaced by cluster.kernel_overrides={{{}}}, or cluster.kernels for all operators (docs/kernels.md)"
REPLACED = {
    "cluster.hip_ops_backend": "was replaced by cluster.kernels (its value torch is now reference)",
    "cluster.grouped_gemm": _OVERRIDE.format("grouped_product: <version>"),
    "cluster.fused_residual_norm": _OVERRIDE.format("rms_norm: <version>"),
    "cluster.fused_cca_prologue": _OVERRIDE.format("cca_prologue: <version>"),
    "cluster.fused_router": _OVERRIDE.format("router_mlp: <version>"),
    "cluster.fused_expert_path": _OVERRIDE.format("expert_permutation: <version>, weighted_swiglu: <version>"),
    "cluster.fused_linear_cross_entropy": _OVERRIDE.format("linear_cross_entropy: <version>"),
    "cluster.fused_muon": _OVERRIDE.format("muon: <version>, newton_schulz: <version>"),
    "model.qk_norm_in_fp32": "was removed: the q-k norm is always in fp32. Fix: remove it",
    "model.router_softmax_in_fp32": "was removed: the router's softmax is always in fp32. Fix: remove it",
    "parallel.reduce_by_copies": "was removed: gradients are reduced by NCCL or RCCL. Fix: remove it",
    "parallel.reduce_by_copies_mib": "was removed: gradients are reduced by NCCL or RCCL. Fix: remove it",
}


@cache
def schema() -> dict:
    """Dotted path of every key -> its dataclass field."""
    return dict(leaves())


@cache
def _groups() -> dict[str, type]:
    """Name of every group -> its dataclass."""
    hints = get_type_hints(Recipe)
    return {f.name: hints[f.name] for f in fields(Recipe) if is_dataclass(hints[f.name])}


def known(path: str) -> bool:
    """Whether `path` is a key or a group of the recipe."""
    return path in schema() or path in _groups()


def expected(path: str) -> str:
    """What the key at `path` may hold."""
    field = schema()[path]
    choices = field.metadata["choices"]
    if choices:
        return "allowed: " + ", ".join("null" if choice is None else str(choice) for choice in choices)
    kind, _, optional = str(field.type).partition(" | ")
    return f"allowed: {TYPE_NAMES[kind]}{', or null' if optional else ''}"


def nearest(path: str) -> str | None:
    """The known key that `path` was most probably meant to be."""
    names = list(schema())
    name = path.rsplit(".", 1)[-1]
    group = path.split(".", 1)[0]
    candidates = [known_path for known_path in names if known_path.rsplit(".", 1)[-1] == name]
    if not candidates:
        siblings = [known_path for known_path in names if "." in path and known_path.startswith(f"{group}.")]
        candidates = difflib.get_close_matches(path, siblings or names, n=1, cutoff=0.6)
    if not candidates:
        candidates = difflib.get_close_matches(path, [*names, *_groups()], n=1, cutoff=0.6)
    return candidates[0] if candidates else None


def unknown_key(path: str, value: object = None) -> str:
    """Message for a key that no schema knows."""
    if path in REPLACED:
        return f"{path}{'' if value is None else f'={value}'}: this key {REPLACED[path]}"
    guess = nearest(path)
    text = f"{path}{'' if value is None else f' = {value}'}: no such key"
    text += f"; did you mean {guess}?" if guess else "."
    group = path.split(".", 1)[0]
    if group in _groups() and "." in path:
        text += f" Keys of {group}: {', '.join(f.name for f in fields(_groups()[group]))}"
    else:
        text += f" Groups and keys: {', '.join(f.name for f in fields(Recipe))}"
    return text if guess else f"{text}. A Megatron argument that no key fills is set as megatron.<name>=<value>"


def missing_key(path: str) -> str:
    """Message for a key that has no value yet."""
    return f"{path} has no value: {schema()[path].metadata['help']} ({expected(path)}). Set it with {path}=<value>"


def explain(error: BaseException) -> str:
    """One message for an exception of Hydra or OmegaConf."""
    text = str(error)
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    in_file = re.search(r"In '(.+)': (\w+) raised while composing config:\n(.*)", text)  # Hydra drops the cause here
    named = re.search(r"full_key: (\S+)", text)
    path = getattr(cause, "full_key", None) or (named.group(1) if named else "")
    key = re.sub(r"\[\d+\]$", "", path)  # an entry of a list -> the list
    name = in_file.group(2) if in_file else type(cause).__name__
    if in_file:
        quoted = re.search(r"Value '(.*?)'", in_file.group(3))
        problem = (
            unknown_key(path)
            if not known(key)
            else f"{path} = {quoted.group(1)!r}: {expected(key)}"
            if quoted and key in schema()
            else in_file.group(3)
        )
        return f"recipes {in_file.group(1)}.yaml: {problem}"
    if name in ("ConfigKeyError", "ConfigAttributeError") and path and not known(path):
        override = re.search(r"Could not override '([^']*)'(?:.*use \+[^=\s]+=(.*))?", text, re.DOTALL)
        return unknown_key(*override.groups()) if override else unknown_key(path, getattr(cause, "value", None))
    if option := re.search(r"Could not find '(.+)/(.+)'\n\nAvailable options in '[^']*':((?:\n\t\S+)+)", text):
        group, wanted, available = option.groups()
        return f"{group}={wanted}: no such recipe. Available: {', '.join(available.split())}"
    if several := re.search(r"Ambiguous value for argument '([^=]+)=([^']*)'", text):
        key, value = several.groups()
        return f"{key} = {value}: several values; write {key}=[{value}] for a list, or add -m to run every one"
    if name == "OverrideParseException":
        return f"{text.splitlines()[0]}; an override is written key=value, and '{{}}[](),=' in a value need quotes"
    missing = re.search(r"Missing mandatory value: (\S+)", text)
    if missing and missing.group(1) in schema():
        return missing_key(missing.group(1))
    if name.startswith("Interpolation") or "resolving interpolation" in text:
        return f"{path}: its ${{...}} cannot be resolved: {str(cause).splitlines()[0]}"
    if "does not support deletion" in text:
        return f"{path}: a key cannot be removed; {expected(path) if path in schema() else 'only changed'}"
    if key in schema():
        value = getattr(cause, "value", None)
        return f"{path} = {'null' if value is None else repr(value)}: {expected(key)}"
    if key in _groups():
        return f"{key} = {getattr(cause, 'value', None)!r}: allowed: its keys, as {key}.<key>=<value>"
    return " ".join(line.strip() for line in str(cause).splitlines() if "_type=" not in line)

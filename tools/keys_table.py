# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/keys.md, from the schema; tools/docs.py writes them."""

from dataclasses import MISSING

from zaya_plugin.config.schema import OnResume, leaves, megatron_argument
from zaya_plugin.ground.errors import as_typed


def keys_table() -> str:
    """Return a Markdown table: key, default, help, and the Megatron argument or module that gets the value."""
    rows = ["| key | default | what it is for | goes to | on a resume |", "|---|---|---|---|---|"]
    for path, field in leaves():
        default = field.default if field.default is not MISSING else field.default_factory()
        choices = ", ".join(as_typed(choice) for choice in field.metadata["choices"])
        text = field.metadata["help"] + (f" ({choices})" if choices else "")
        argument = megatron_argument(field)
        target = f"`--{argument.replace('_', '-')}`" if argument else f"`{field.metadata['reader'].rpartition('.')[2]}`"
        escaped = text.replace("|", "\\|").replace("<", "&lt;")
        shown = "must be given" if default == "???" else f"`{as_typed(default)}`"
        rows.append(f"| `{path}` | {shown} | {escaped} | {target} | {field.metadata['resume'].rule} |")
    return "\n".join(rows) + "\n"


def resume_table() -> str:
    """Return a Markdown table: what a resume does with a change, why, and the keys;
    keys that may change are left out.
    """
    keys: dict[OnResume, list[str]] = {}
    for path, field in leaves():
        keys.setdefault(field.metadata["resume"], []).append(f"`{path}`")
    order = sorted((rule for rule in keys if rule.why), key=lambda rule: ("refused", "kept", "warns").index(rule.rule))
    rows = ["| a change | because | keys |", "|---|---|---|"]
    return "\n".join(rows + [f"| {rule.rule} | {rule.why} | {', '.join(keys[rule])} |" for rule in order]) + "\n"

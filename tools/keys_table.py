# SPDX-License-Identifier: Apache-2.0
"""Write the tables of keys in docs/recipes.md from the schema: `python -m tools.keys_table docs/recipes.md`.

`tests/config/test_docs.py` fails where the page and the schema differ.
"""

import sys
from dataclasses import MISSING
from pathlib import Path

from zaya_plugin.config.schema import OnResume, leaves, megatron_argument
from zaya_plugin.ground.errors import as_typed

RESUME = "<!-- resume: made by tools.keys_table -->\n"
BEGIN, END = "<!-- keys: made by tools.keys_table -->\n", "<!-- end of keys -->\n"


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


def with_table(page: str) -> str:
    """Return `page` with new tables between their markers."""
    for begin, table in ((BEGIN, keys_table()), (RESUME, resume_table())):
        before, rest = page.split(begin)
        page = f"{before}{begin}{table}{END}{rest.partition(END)[2]}"
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))

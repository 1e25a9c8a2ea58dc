# SPDX-License-Identifier: Apache-2.0
"""Write the table of keys in docs/recipes.md from the schema: `python -m zaya_plugin.config.keys_table
docs/recipes.md`.

`tests/config/test_docs.py` fails where the page and the schema differ.
"""

import sys
from dataclasses import MISSING
from pathlib import Path

from zaya_plugin.config.schema import leaves, megatron_argument
from zaya_plugin.errors import as_typed

BEGIN, END = "<!-- keys: made by zaya_plugin.config.keys_table -->\n", "<!-- end of keys -->\n"


def keys_table() -> str:
    """Return a Markdown table: key, default, help, and the Megatron argument or module that gets the value."""
    rows = ["| key | default | what it is for | goes to |", "|---|---|---|---|"]
    for path, field in leaves():
        default = field.default if field.default is not MISSING else field.default_factory()
        choices = ", ".join(as_typed(choice) for choice in field.metadata["choices"])
        text = field.metadata["help"] + (f" ({choices})" if choices else "")
        argument = megatron_argument(field)
        target = f"`--{argument.replace('_', '-')}`" if argument else f"`{field.metadata['reader'].rpartition('.')[2]}`"
        escaped = text.replace("|", "\\|").replace("<", "&lt;")
        rows.append(
            f"| `{path}` | {'must be given' if default == '???' else f'`{as_typed(default)}`'} | {escaped} | {target} |"
        )
    return "\n".join(rows) + "\n"


def with_table(page: str) -> str:
    """Return `page` with a new table between its two markers."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{keys_table()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(with_table(path.read_text()))

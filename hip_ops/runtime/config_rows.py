# SPDX-License-Identifier: Apache-2.0
"""Rows of a JSON table of kernel configurations. A row's "config" holds only the fields that differ from the
defaults.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any


def parse(rows: list[dict], config: type, kinds: tuple[str, ...], table: str) -> list[dict]:
    """Returns the rows with "config" as an instance of the dataclass `config`. table: the file's name in messages."""
    known = {field.name for field in fields(config)}
    for row in rows:
        assert row["kind"] in kinds and set(row["config"]) <= known, f"{table}: {row}"
    return [{**row, "config": config(**row["config"])} for row in rows]


def dump(rows: list[dict], default: Any) -> str:
    """Returns the rows as JSON text, a line each; default: the configuration with all defaults."""
    defaults, lines = asdict(default), []
    for row in rows:
        config = {key: value for key, value in asdict(row["config"]).items() if value != defaults[key]}
        lines.append("    " + json.dumps({**row, "config": config}))
    return ",\n".join(lines)

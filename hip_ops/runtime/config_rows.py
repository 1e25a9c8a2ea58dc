# SPDX-License-Identifier: Apache-2.0
"""Rows of a JSON table of kernel configurations. A row's "config" holds only the fields that differ from the
defaults.
"""

from __future__ import annotations

from dataclasses import fields


def parse(rows: list[dict], config: type, kinds: tuple[str, ...], table: str) -> list[dict]:
    """Return the rows with "config" as an instance of the dataclass `config`. table: the file's name in messages."""
    known = {field.name for field in fields(config)}
    for row in rows:
        assert row["kind"] in kinds and set(row["config"]) <= known, f"{table}: {row}"
    return [{**row, "config": config(**row["config"])} for row in rows]

# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of docs/verification.md from docs/evidence.yaml; with --check only compares them (exit status 1: they differ)."""

import argparse
import sys
from pathlib import Path

import yaml

DOCS = Path(__file__).resolve().parents[1] / "docs"
COLUMNS = ("claim", "device", "commit", "figure")
TITLES = {"claims": "What is claimed", "runs": "What ran"}
BEGIN, END = "<!-- evidence: made of docs/evidence.yaml by `python tools/verification.py` -->\n", "<!-- /evidence -->"


def tables(evidence: dict[str, list[dict[str, str]]]) -> str:
    """Return one table for each group. Raises ValueError for a row whose columns are not COLUMNS, or that has a figure without a device."""
    lines = []
    for group, title in TITLES.items():
        lines += [f"## {title}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for row in evidence[group]:
            if tuple(row) != COLUMNS:
                raise ValueError(
                    f"docs/evidence.yaml, {group}: {row}. Allowed: the keys {', '.join(COLUMNS)}, in this order"
                )
            if not row["device"] and "not run" not in row["figure"]:
                raise ValueError(f"docs/evidence.yaml, {group}: {row['claim']!r} has a figure and no device")
            lines.append(f"| {' | '.join(row.values())} |")
        lines.append("")
    return "\n".join(lines)


def page(text: str, evidence: dict) -> str:
    """Return `text` of docs/verification.md with new tables."""
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}{tables(evidence)}{END}{after}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    path = DOCS / "verification.md"
    text = path.read_text()
    wanted = page(text, yaml.safe_load((DOCS / "evidence.yaml").read_text()))
    if not options.check:
        path.write_text(wanted)
    elif wanted != text:
        print(
            "docs/verification.md differs from docs/evidence.yaml. Fix: python tools/verification.py", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

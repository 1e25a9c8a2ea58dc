# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/verification.md, from docs/evidence.yaml, and the age of its rows; tools/docs.py writes them.

A row may have `covers`, the files and folders that its figure depends on. It is older than the code where a commit
changed them and is neither an ancestor of a commit that the row names nor listed in .git-blame-ignore-revs (changes of
layout and comments). Without git history there are no marks.
"""

import datetime
import re
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "evidence.yaml"
COLUMNS = ("claim", "device", "commit", "figure")
TITLES = {"claims": "What is claimed", "figures": "What was measured", "runs": "What ran"}
MARK = " (older than the code)"
HASH = re.compile(r"\b[0-9a-f]{7,40}\b")
MAX_AGE = datetime.timedelta(days=30)


def load() -> dict:
    """Return the rows, by group."""
    return yaml.safe_load(DATA.read_text())


def _git(*arguments: str) -> list[str] | None:
    """Return the lines that git prints, or None where it fails."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.split() if done.returncode == 0 else None


def commits_since(row: dict) -> list[str] | None:
    """Return the commits that changed the files of `row.covers` and came after every commit that it names, the newest
    first; None where git does not know.
    """
    since = [f"^{commit}" for commit in HASH.findall(row["commit"])]
    commits = _git("rev-list", "HEAD", *since, "--", *row["covers"])
    ignored = set((ROOT / ".git-blame-ignore-revs").read_text().split())
    return commits and [commit for commit in commits if commit not in ignored]


def age(row: dict, commits: list[str]) -> datetime.timedelta:
    """Return the time from the newest commit that a row names to the newest of `commits`."""

    def newest(names: list[str]) -> int:
        return max(int(_git("show", "-s", "--format=%ct", name)[0]) for name in names)

    return datetime.timedelta(seconds=newest(commits) - newest(HASH.findall(row["commit"])))


def older_rows(evidence: dict) -> dict[str, list[str] | None]:
    """Return, by claim, the commits since then for the rows that have `covers` and whose code is newer or of unknown
    age.
    """
    rows = [row for group in TITLES for row in evidence[group] if "covers" in row]
    since = {row["claim"]: commits_since(row) for row in rows}
    return {claim: commits for claim, commits in since.items() if commits != []}


def too_old(evidence: dict, older: dict[str, list[str] | None]) -> dict[str, int]:
    """Return, by claim, the days of the rows whose code changed more than MAX_AGE after their commit."""
    rows = [row for group in TITLES for row in evidence[group]]
    ages = {row["claim"]: age(row, commits) for row in rows if (commits := older.get(row["claim"]))}
    return {claim: span.days for claim, span in ages.items() if span > MAX_AGE}


def tables(evidence: dict, older: dict[str, list[str] | None]) -> str:
    """Return one table per group. Raises ValueError for other keys, for a figure without a device and for `covers`
    that names no file.
    """
    lines = []
    for group, title in TITLES.items():
        lines += [f"## {title}", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        for row in evidence[group]:
            problem = None
            if tuple(row) not in (COLUMNS, (*COLUMNS, "covers")):
                problem = f"its keys must be {', '.join(COLUMNS)} and optionally covers, in this order"
            elif not row["device"] and "not run" not in row["figure"]:
                problem = "it has a figure and no device"
            elif "covers" in row and not HASH.search(row["commit"]):
                problem = "covers needs a commit"
            elif missing := [path for path in row.get("covers", ()) if not (ROOT / path).exists()]:
                problem = f"covers names {', '.join(missing)}, which does not exist"
            if problem:
                raise ValueError(f"docs/evidence.yaml, {group}, {row.get('claim')!r}: {problem}")
            mark = MARK if "covers" in row and older.get(row["claim"]) else ""
            lines.append(f"| {row['claim']} | {row['device']} | {row['commit']}{mark} | {row['figure']} |")
        lines.append("")
    return "\n".join(lines)


def report(older: dict[str, list[str] | None]) -> bool:
    """Print the rows that are older than their code, and return whether one is too old."""
    if _git("rev-parse", "HEAD") is None:
        print("no git history: the age of the evidence is not known", file=sys.stderr)
    for claim, commits in older.items():
        why = "its commit is not in this history" if commits is None else f"{len(commits)} commits since"
        print(f"docs/evidence.yaml: older than the code ({why}): {claim}")
    for claim, days in (expired := too_old(load(), older)).items():
        print(f"docs/evidence.yaml: the code changed {days} days after the commit: measure again, or drop: {claim}")
    return bool(expired)

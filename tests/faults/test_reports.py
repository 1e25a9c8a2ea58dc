# SPDX-License-Identifier: Apache-2.0
"""The table of README.md: every report has a test that exists and names it."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|\n").split("|")]
    for line in (Path(__file__).with_name("README.md")).read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| Report")
]


def documented(cell: str) -> list[str]:
    """Return the docstrings of a cell's tests: with that of their file, since some files are about one report."""
    found, file = [], None
    for named in re.finditer(r"(\w+): all|`?([\w/.]+)`?: |`(\w+)(?:\[\w+\])?`|`([\w/]+\.py)`", cell):
        whole, prefix, test, path = named.groups()
        if (name := prefix or whole or path) is not None:
            file = TESTS / name if name.endswith(".py") else TESTS / "checkpoint" / f"test_{name}.py"
            assert file.is_file(), file
        tree = ast.parse(file.read_text())
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        if test is not None:
            assert f"test_{test}" in functions, f"{file.name} has no test_{test}"
            found.append(ast.get_docstring(functions[f"test_{test}"]) or "")
        if whole or path:
            found.append(ast.get_docstring(tree) or "")
    return found


def test_there_are_25():
    assert len(ROWS) == 25


@pytest.mark.parametrize("number", range(25))
def test_each_report_has_a_test_that_names_it(number):
    report, _, tests = ROWS[number]
    if tests == "the same":
        tests = ROWS[number - 1][2]
    if tests.startswith("as "):
        tests = next(row[2] for row in ROWS if row[0] == tests.removeprefix("as "))
    texts = documented(tests)
    assert texts
    threads = re.findall(r"[\w./-]*#\d+", report) or [report.split()[0]]
    assert [name for name in threads if not any(name in text for text in texts)] == [], tests

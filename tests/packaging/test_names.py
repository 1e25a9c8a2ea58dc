# SPDX-License-Identifier: Apache-2.0
"""A name is a noun of the field, or a verb for a function, and a docstring says what something does: names with a
participle, adverb or pronoun among their words and docstrings that begin with "What" are counted, and may only become
fewer. `python tests/packaging/test_names.py zaya_plugin/run` lists those of a folder. Messages, docstrings and documents
hold none of a few words that say too little.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).parents[2]
PACKAGES = ("hip_ops", "patches", "zaya_plugin")
WORDS = frozenset(
    "again already beside came each found given gone here made meanwhile said there told wanted whatever".split()
)
# Lower them with each name that is replaced.
NAMES, DOCSTRINGS = 13, 0

TEXT_WORDS = re.compile(r"\b(said|told|found|here|beside|so many|anew)\b", re.IGNORECASE)

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of everything that the code defines or assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def unclear(folders: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the names and the docstrings of folders that should be other ones, each with its place."""
    wrong_names, wrong_docstrings = [], []
    for path in sorted(path for folder in folders for path in (REPO / folder).rglob("*.py")):
        tree, place = ast.parse(path.read_text()), path.relative_to(REPO)
        wrong_names += [f"{place}:{line}: {name}" for line, name in names(tree) if WORDS & {*name.lower().split("_")}]
        wrong_docstrings += [
            f"{place}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"
            for node in ast.walk(tree)
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node) or "").startswith("What ")
        ]
    return wrong_names, wrong_docstrings


def test_unclear_names_and_docstrings_become_fewer():
    now = tuple(map(len, unclear(PACKAGES)))
    listing = "`python tests/packaging/test_names.py FOLDER` lists them"
    assert now[0] <= NAMES and now[1] <= DOCSTRINGS, f"{now}: more than {(NAMES, DOCSTRINGS)}; {listing}"
    assert now == (NAMES, DOCSTRINGS), f"fewer than before: set NAMES, DOCSTRINGS = {now[0]}, {now[1]}"


def test_messages_and_docstrings_hold_none_of_the_words():
    paths = (path for room in PACKAGES for path in sorted((REPO / room).rglob("*.py")))
    texts = ((path, node) for path in paths for node in ast.walk(ast.parse(path.read_text())))
    assert [
        f"{path.relative_to(REPO)}:{node.lineno}: {seen[0]}"
        for path, node in texts
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (seen := TEXT_WORDS.search(node.value))
    ] == []


def test_documents_hold_none_of_the_words():
    """Entries of the log stay as they were written."""
    pages = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md")), REPO / "docs" / "evidence.yaml"]
    lines = (
        (page, line) for page in pages if page.name != "log.md" for line in enumerate(page.read_text().splitlines())
    )
    assert [
        f"{page.relative_to(REPO)}:{number + 1}: {seen[0]}"
        for page, (number, line) in lines
        if (seen := TEXT_WORDS.search(line))
    ] == []


def test_the_words_are_seen_among_the_parts_of_a_name():
    tree = ast.parse(
        "def made_by(given, *, foundation):\n    self.found_inf = [each for each in given]\n    herein = 1"
    )
    seen = [name for _, name in names(tree) if WORDS & {*name.lower().split("_")}]
    assert sorted(seen) == ["each", "found_inf", "given", "made_by"]


if __name__ == "__main__":
    print(*(line for lines in unclear(tuple(sys.argv[1:]) or PACKAGES) for line in lines), sep="\n")

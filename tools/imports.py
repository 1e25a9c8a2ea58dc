# SPDX-License-Identifier: Apache-2.0
"""The imports of our packages, and the table in CONTRIBUTING.md that says which are allowed: for its test and for the
picture of the rooms in docs/architecture.md.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
# Folder -> import name, as setup.py maps them; longest import name first decides which room a module belongs to.
PACKAGES = {
    "zaya_plugin": "zaya_plugin",
    "patches": "zaya_plugin.patches",
    "recipes": "zaya_plugin.recipes",
    "hip_ops": "hip_ops",
}


@dataclass(frozen=True)
class Rule:
    files: str
    ours: frozenset[str]
    outside: tuple[str, ...]
    lazily: bool


@dataclass(frozen=True)
class Import:
    target: str  # dotted, as deep as the statement tells
    line: int
    runs_at_import: bool


def read_rules(markdown: str) -> list[Rule]:
    table = markdown.split("<!-- import-rules -->")[1].split("<!-- /import-rules -->")[0].strip().splitlines()
    rules = []
    for row in table[2:]:
        files, ours, outside, when = (cell.strip() for cell in row.strip("|").split("|"))
        assert when in ("", "lazily"), row
        words = [{word.strip() for word in cell.split(",")} - {""} for cell in (ours, outside)]
        rules.append(Rule(files.strip("`"), frozenset(words[0]), tuple(sorted(words[1])), when == "lazily"))
    return rules


def imports_of(source: str, module: str, is_package: bool) -> Iterator[Import]:
    """All `import`, `from ... import` and `import_module("constant")` of a file; relative ones are resolved against
    `module`.
    """

    def visit(node: ast.AST, runs: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                up = node.level - 1 if is_package else node.level
                base = ".".join([*parts[: len(parts) - up], *([base] if base else [])])
            yield from (Import(f"{base}.{alias.name}", node.lineno, runs) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield Import(str(node.args[0].value), node.lineno, runs)
        for field, value in ast.iter_fields(node):
            inside = runs
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and field == "body":
                inside = False
            if isinstance(node, ast.If) and field == "body" and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                inside = False
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child, inside)

    yield from visit(ast.parse(source), True)


def room_of(target: str) -> str | None:
    """The room of one of our modules: "config", "patches", "cli", "hip_ops"; "" is zaya_plugin itself; None is not
    ours.
    """
    parts = target.split(".")
    if parts[0] == "hip_ops":
        return "hip_ops"
    if parts[0] != "zaya_plugin":
        return None
    if parts[1:3] == ["patches", "hooks"]:
        return "hooks"
    return parts[1] if len(parts) > 1 and parts[1] in known_rooms() else ""


def known_rooms(root: Path = REPO) -> set[str]:
    inside = {path.stem for path in (root / "zaya_plugin").glob("*") if path.is_dir() or path.suffix == ".py"}
    return (inside | {"patches", "recipes", "hooks"}) - {"__init__", "__pycache__"}


def import_graph() -> dict[str, set[str]]:
    """Our modules by dotted name -> those of ours that they import, lazily too."""
    paths = {}
    for folder, package in PACKAGES.items():
        for path in (REPO / folder).rglob("*.py"):
            if folder != "zaya_plugin" or path.relative_to(REPO / folder).parts[0] not in ("patches", "recipes"):
                dotted = ".".join([package, *path.relative_to(REPO / folder).with_suffix("").parts])
                paths[dotted.removesuffix(".__init__")] = path
    found = {}
    for module, path in paths.items():
        targets = [each.target for each in imports_of(path.read_text(), module, path.name == "__init__.py")]
        # `from a.b import c` names a module or something in it
        nearest = (target if target in paths else target.rpartition(".")[0] for target in targets)
        # zaya_plugin itself holds the version; its other names are imported at their first use
        found[module] = {target for target in nearest if target in paths and target not in (module, "zaya_plugin")}
    return found

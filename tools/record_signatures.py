# SPDX-License-Identifier: Apache-2.0
"""Record signatures of a Python package as JSON, from its sources alone: nothing of the package is imported or run.

The tests of optional packages that cannot be installed on a developer's machine (AITER, Transformer Engine) compare our
calls with this data, and build stand-ins from it. One file holds one version of a package.

    python tools/record_signatures.py CHECKOUT --rev v0.1.20 --symbols aiter.flash_attn_func > aiter-0.1.20.json
    python tools/record_signatures.py UNPACKED_WHEEL --symbols package.module.Class --methods __init__ forward

CHECKOUT is a working tree, a bare repository (with --rev), or a folder with an unpacked wheel. A symbol is the dotted
name by which a caller imports it; `from ... import` lines are followed to the definition, also `import *`.

For a function the data holds each parameter's name, kind, annotation and default (both as source text), the decorators,
and the return statements. For a class it holds the bases and each of the --methods that the class itself defines. An
autograd function must return one gradient for each parameter of `forward` after ctx: compare `parameters` of forward
with `values` and `none` (the places of a literal None) in `returns` of backward. `values` is null where the source does
not tell how many values a return statement gives (a call, a name, or a starred expression).
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

Read = Callable[[str], "str | None"]  # path in the checkout -> text, or None
METHODS = ("__init__", "forward", "backward")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def reader(source: Path, rev: str | None) -> Read:
    """Return a function that reads a file of the commit `rev`, or of the folder where `rev` is None."""

    def of_commit(path: str) -> str | None:
        shown = subprocess.run(["git", "-C", source, "show", f"{rev}:{path}"], capture_output=True, check=False)
        return shown.stdout.decode() if shown.returncode == 0 else None

    def of_folder(path: str) -> str | None:
        return (source / path).read_text() if (source / path).is_file() else None

    return of_folder if rev is None else of_commit


def definition(read: Read, symbol: str, seen: frozenset[str] = frozenset()) -> tuple[str, ast.AST] | None:
    """Return the file and the syntax node that define `symbol`, or None; imports are followed."""
    module, _, name = symbol.rpartition(".")
    found = module_file(read, module)
    if found is None or symbol in seen:
        return None
    path, text = found
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for node in reversed([*top_level(ast.parse(text).body)]):  # the last definition wins
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
            return path, node
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(each, ast.Name) and each.id == name for each in targets):
                return path, node
        if isinstance(node, ast.ImportFrom):
            for each in node.names:
                if each.name == "*" or (each.asname or each.name) == name:
                    origin = absolute(node, package)
                    target = f"{origin}.{name if each.name == '*' else each.name}"
                    there = definition(read, target, seen | {symbol})
                    if there is not None:
                        return there
    return None


def module_file(read: Read, module: str) -> tuple[str, str] | None:
    """Return path and text of a module."""
    folder = module.replace(".", "/")
    for path in (f"{folder}.py", f"{folder}/__init__.py"):
        text = read(path) if module else None
        if text is not None:
            return path, text
    return None


def absolute(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module that `from ... import` names inside `package`."""
    if not node.level:
        return node.module or ""
    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*parents, *([node.module] if node.module else [])])


def top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Return the statements of a module, with those inside if, try and with."""
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            yield from top_level(node.body)
            for handler in getattr(node, "handlers", ()):
                yield from top_level(handler.body)
            yield from top_level(getattr(node, "orelse", []))


def record(node: ast.AST, path: str, methods: tuple[str, ...], doc: str | None) -> dict:
    """Return the data of a definition."""
    place = {"file": path, "line": node.lineno}
    if isinstance(node, ast.ClassDef):
        defined = {each.name: each for each in top_level(node.body) if isinstance(each, FUNCTIONS)}
        return {
            "kind": "class",
            **place,
            "bases": [ast.unparse(base) for base in node.bases],
            "decorators": [ast.unparse(each) for each in node.decorator_list],
            "methods": {name: function(defined[name], doc) for name in methods if name in defined},
        }
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        return {"kind": "value", **place, "value": ast.unparse(node.value)}
    return {"kind": "function", **place, **function(node, doc)}


def function(node: ast.FunctionDef | ast.AsyncFunctionDef, doc: str | None) -> dict:
    """Return parameters, decorators and return statements of a function, and the lines of its docstring with `doc`."""
    lines = [line.strip() for line in (ast.get_docstring(node) or "").splitlines()]
    return {
        "decorators": [ast.unparse(each) for each in node.decorator_list],
        "parameters": [*parameters(node.args)],
        "returns": [returned(each) for each in returns(node)],
        **({} if doc is None else {"doc": [line for line in lines if re.search(doc, line)]}),
    }


def parameters(arguments: ast.arguments) -> Iterator[dict]:
    """Return the parameters in order, with the names of inspect.Parameter's kinds."""
    listed = [("POSITIONAL_ONLY", each) for each in arguments.posonlyargs]
    listed += [("POSITIONAL_OR_KEYWORD", each) for each in arguments.args]
    defaults = [None] * (len(listed) - len(arguments.defaults)) + arguments.defaults
    if arguments.vararg:
        listed.append(("VAR_POSITIONAL", arguments.vararg))
        defaults.append(None)
    listed += [("KEYWORD_ONLY", each) for each in arguments.kwonlyargs]
    defaults += arguments.kw_defaults
    if arguments.kwarg:
        listed.append(("VAR_KEYWORD", arguments.kwarg))
        defaults.append(None)
    for (kind, each), default in zip(listed, defaults, strict=True):
        yield {
            "name": each.arg,
            "kind": kind,
            **({} if each.annotation is None else {"annotation": ast.unparse(each.annotation)}),
            **({} if default is None else {"default": ast.unparse(default)}),
        }


def returns(node: ast.AST) -> Iterator[ast.Return]:
    """Return the return statements of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from returns(child)


def returned(node: ast.Return) -> dict:
    """Return how many values a return statement gives, and the places of a literal None."""
    value = node.value
    values = [value]
    if isinstance(value, ast.Tuple):
        values = value.elts
    known = isinstance(value, ast.Tuple) and not any(isinstance(each, ast.Starred) for each in values)
    single = value is None or isinstance(value, ast.Constant)
    return {
        "line": node.lineno,
        **({"source": ast.unparse(value)} if value is not None and len(ast.unparse(value)) <= 60 else {}),
        "values": len(values) if known or single else None,
        "none": [place for place, each in enumerate(values) if is_none(each)],
    }


def is_none(node: ast.expr | None) -> bool:
    """Return whether an expression is the literal None, or absent as in a bare return."""
    return node is None or isinstance(node, ast.Constant) and node.value is None


def version_of(source: Path, rev: str | None, package: str) -> tuple[str | None, str | None]:
    """Return version and commit: of git's tag, or of the wheel's METADATA."""
    described = ["git", "-C", source, "describe", "--tags", "--exact-match", "--match", "v[0-9]*", rev or "HEAD"]
    parsed = ["git", "-C", source, "rev-parse", f"{rev or 'HEAD'}^{{commit}}"]
    tag, commit = (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        for command in (described, parsed)
    )
    if rev and rev.startswith("v"):  # several tags may name one commit
        tag = rev
    for metadata in source.glob("*.dist-info/METADATA"):
        lines = dict(line.split(": ", 1) for line in metadata.read_text().splitlines()[:20] if ": " in line)
        if package in lines["Name"].replace("-", "_"):
            return lines["Version"], None
    return tag.removeprefix("v") or None, commit or None


def formatted(value: object, indent: str = "") -> str:
    """Return JSON with one parameter a line, so that the difference of two versions can be read."""
    items = [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    plain = all(not isinstance(each, dict) for each in items)
    if plain and all(not isinstance(one, dict) for each in items if isinstance(each, list) for one in each):
        return json.dumps(value)
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(items)
    inner = indent + " "
    lines = [f"{inner}{key}{formatted(each, inner)}" for key, each in zip(keys, items, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return "\n".join([opening, ",\n".join(lines), indent + closing])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="CHECKOUT", help="working tree, bare repository or unpacked wheel")
    parser.add_argument("--rev", help="commit or tag to read; default: the files of CHECKOUT")
    parser.add_argument("--symbols", nargs="+", required=True, metavar="NAME", help="dotted names to record")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, metavar="NAME", help=f"of classes; default: {' '.join(METHODS)}"
    )
    parser.add_argument("--doc", metavar="REGEX", help="record the lines of docstrings that match")
    parser.add_argument("--version", help="default: the tag (--rev v1.2, or the tag of HEAD), or the wheel's METADATA")
    parser.add_argument(
        "--absent", action="store_true", help="record null for a symbol that this version does not have, not an error"
    )
    options = parser.parse_args(arguments)
    read = reader(options.source, options.rev)
    found = {symbol: definition(read, symbol) for symbol in options.symbols}
    absent = [symbol for symbol, place in found.items() if place is None]
    if absent and not options.absent:
        parser.error(
            f"no definition of {', '.join(absent)} in {options.source}. Fix: correct the name, or --absent to record "
            "that this version does not have it"
        )
    package = options.symbols[0].partition(".")[0]
    version, commit = version_of(options.source, options.rev, package)
    if not (options.version or version):
        parser.error("the version is not known: neither a tag nor METADATA. Fix: --version VERSION")
    data = {
        "package": package,
        "version": options.version or version,
        "commit": commit,
        "made_by": "tools/record_signatures.py",
        "symbols": {
            symbol: None if place is None else record(place[1], place[0], tuple(options.methods), options.doc)
            for symbol, place in found.items()
        },
    }
    print(formatted(data))
    return 0


if __name__ == "__main__":
    sys.exit(main())

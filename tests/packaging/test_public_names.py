# SPDX-License-Identifier: Apache-2.0
"""Editors and type checkers see every public name: the imports under TYPE_CHECKING are those of EXPORTS."""

import ast
import importlib
from pathlib import Path

import pytest


@pytest.mark.parametrize("package", ["hip_ops", "zaya_plugin"])
def test_the_imports_for_type_checkers_are_those_of_exports(package):
    module = importlib.import_module(package)
    (block,) = [node for node in ast.parse(Path(module.__file__).read_text()).body if isinstance(node, ast.If)]
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    # `import name as name` marks a name as public; without it a type checker takes the import for the package's own.
    aliases = [alias for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert all(alias.asname in (alias.name, f"_{alias.name}") for alias in aliases)
    names: dict = {}
    exec(compile(ast.Module(block.body, []), package, "exec"), {}, names)
    public = {name: value for name, value in names.items() if not name.startswith("_")}
    assert public.keys() == module.EXPORTS.keys()
    assert all(value is getattr(module, name) for name, value in public.items())

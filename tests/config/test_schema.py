# SPDX-License-Identifier: Apache-2.0
"""Every key of the recipe fills a Megatron argument or is read by the module in its metadata."""

import ast
import importlib.util
from dataclasses import MISSING, is_dataclass
from functools import cache
from pathlib import Path

import pytest

from zaya_plugin.config.messages import TYPE_NAMES, allowed, schema
from zaya_plugin.config.schema import Recipe, leaves, megatron_argument

LEAVES = list(leaves())
OWN = [(path, field) for path, field in LEAVES if field.metadata["reader"]]


@cache
def attribute_chains(module: str) -> frozenset[tuple[str, str]]:
    """Return (owner, attribute) of every attribute access in the module's source: `recipe.data.path` -> ("data",
    "path").
    """
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin, f"{module} does not exist"
    found = set()
    for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
        if isinstance(node, ast.Attribute):
            owner = node.value
            found.add((getattr(owner, "attr", None) or getattr(owner, "id", None), node.attr))
    return frozenset(found)


def test_a_leaf_has_a_megatron_argument_or_a_reader_but_not_both():
    for path, field in LEAVES:
        assert (megatron_argument(field) is None) != (field.metadata["reader"] is None), path


def test_leaves_are_all_the_keys():
    assert len(LEAVES) == len(dict(LEAVES)) > 70
    assert {"name", "model.num_layers", "megatron", "cluster.environment", "profile.ranks"} <= dict(LEAVES).keys()


@pytest.mark.parametrize(("path", "field"), OWN, ids=[path for path, _ in OWN])
def test_the_named_module_reads_the_key(path, field):
    group, _, name = ("recipe." + path).rpartition(".")
    owner = group.rpartition(".")[2]
    assert (owner, name) in attribute_chains(field.metadata["reader"]), (
        f"{field.metadata['reader']} has no {owner}.{name}"
    )


def test_two_keys_never_fill_the_same_megatron_argument():
    names = [megatron_argument(field) for _, field in LEAVES if megatron_argument(field)]
    assert len(names) == len(set(names))


def test_every_key_has_help_and_a_type_that_messages_can_name():
    for path, field in LEAVES:
        assert len(field.metadata["help"]) > 8, path
        assert field.metadata["choices"] or str(field.type).partition(" | ")[0] in TYPE_NAMES, path
        assert allowed(field)


def test_a_default_is_one_of_the_choices():
    for path, field in LEAVES:
        if field.metadata["choices"] and field.default != "???":
            assert field.default in field.metadata["choices"], path


def test_defaults_are_not_shared_between_recipes():
    one, other = Recipe(), Recipe()
    one.parallel.recompute_modules.append("moe")
    one.cluster.environment["A"] = "1"
    assert other.parallel.recompute_modules == [] and other.cluster.environment == {}
    assert all(field.default is MISSING or not is_dataclass(field.default) for field in schema().values())

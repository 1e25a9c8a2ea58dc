# SPDX-License-Identifier: Apache-2.0
"""Holds every import of our packages, lazy ones included, against the table in CONTRIBUTING.md."""

import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tools.imports import PACKAGES, REPO, Rule, import_graph, imports_of, read_rules, room_of


def violations(root: Path, rules: list[Rule]) -> list[str]:
    found = []
    for folder, package in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            matching = [rule for rule in rules if fnmatch(name, rule.files)]
            if not matching:
                found.append(f"{name}: no row of the table matches it")
                continue
            ours = frozenset().union(*(rule.ours for rule in matching))
            outside = tuple(word for rule in matching for word in rule.outside)
            at_import = {"ground"}.union(*((*rule.ours, *rule.outside) for rule in matching if not rule.lazily))
            lazily = any(rule.lazily for rule in matching)
            dotted = ".".join([package, *path.relative_to(root / folder).with_suffix("").parts])
            is_package = path.name == "__init__.py"
            module = dotted.removesuffix(".__init__")
            for each in imports_of(path.read_text(), module, is_package):
                where = f"{name}:{each.line}: imports {each.target}"
                if each.target.split(".")[0] in sys.stdlib_module_names:
                    continue
                room = room_of(each.target)
                if room is None:
                    if not any(f"{each.target}.".startswith(f"{word}.") for word in outside):
                        found.append(f"{where}, allowed from outside: {', '.join(outside) or 'nothing'}")
                elif room == "":
                    if folder == "hip_ops":
                        found.append(f"{where}, hip_ops stands alone")
                    continue  # zaya_plugin itself holds the version and imports nothing
                elif room == room_of(module):
                    continue
                elif room not in ours and "all" not in ours:
                    found.append(f"{where}, allowed of ours: {', '.join(sorted(ours)) or 'nothing'}")
                if lazily and each.runs_at_import and room not in at_import:
                    found.append(f"{where} at the top; only inside functions here")
    return found


@pytest.fixture(scope="module")
def rules() -> list[Rule]:
    return read_rules((REPO / "CONTRIBUTING.md").read_text())


def test_every_import_is_allowed(rules):
    assert violations(REPO, rules) == []


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return import_graph()


def test_imports_only_go_down(rules, graph):
    rooms = [
        room_of(f"zaya_plugin.{rule.files.removeprefix('zaya_plugin/').removesuffix('.py').replace('/', '.')}")
        for rule in rules
    ]
    order = {room or rule.files: number for number, (room, rule) in enumerate(zip(rooms, rules, strict=True))}
    order |= {"__init__": -1, "hip_ops": len(rules)}
    up = []
    for module, targets in graph.items():
        for target in targets:
            here, there = room_of(module) or "__init__", room_of(target)
            if here != there and order[there] <= order[here]:
                up.append(f"{module} imports {target}")
    assert len(graph) > 200 and up == []


def test_no_circles(graph):
    left = dict(graph)
    while free := {module for module, targets in left.items() if not targets & left.keys()}:
        left = {module: targets for module, targets in left.items() if module not in free}
    assert sorted(left) == [], "each of them imports another one of them"


# What operators may import of hip_ops; saved_bytes and newton_schulz_form are arithmetic that plans read too.
SHARED = ("runtime.", "versions.", "errors.", "saved_bytes", "newton_schulz_form", "ops.dense_product.dense_product_")


def test_operators_stand_apart():
    """Code that two operators of hip_ops share is in its runtime, which imports no operator. The head calls the product's
    operator.
    """
    found = []
    for path in sorted((REPO / "hip_ops").glob("*/**/*.py")):
        module = ".".join(path.relative_to(REPO).with_suffix("").parts)
        own = module.rpartition(".")[0]  # of an operator, or hip_ops.runtime
        for each in imports_of(path.read_text(), module, path.name == "__init__.py"):
            if each.target.startswith("hip_ops") and not each.target.startswith(
                (own, *(f"hip_ops.{name}" for name in SHARED))
            ):
                found.append(f"{path}:{each.line}: imports {each.target}")
    assert found == []


def test_table_restates_the_design(rules):
    """No row of the table may allow imports that the design excludes."""
    for rule in rules:
        room = rule.files.removeprefix("zaya_plugin/").split("/")[0]
        if room in ("run", "handover", "plan", "config", "aegis"):
            assert not {"torch", "megatron.core", "transformers"} & set(rule.outside), rule
        if room == "run":  # it starts ranks as a program
            assert "hosts" not in rule.ours, rule
        if room == "hip_ops":
            assert not rule.ours and set(rule.outside) == {"torch", "triton", "quack", "aiter"}, rule
        if {"megatron.training", "primus", "megatron"} & set(rule.outside):
            assert room in ("hosts", "patches", "primus", "spec.py"), rule
        if room == "cli.py":  # it finds a command in the table and loads that one
            assert not rule.outside and rule.ours == {"commands", "config", "ground"}


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        (
            "zaya_plugin/config/a.py",
            "import torch",
            "config/a.py:1: imports torch, allowed from outside: hydra, omegaconf",
        ),
        ("zaya_plugin/config/a.py", "def f():\n    import torch.nn", "config/a.py:2: imports torch.nn"),
        (
            "zaya_plugin/config/a.py",
            "if TYPE_CHECKING:\n    from torch import Tensor",
            "config/a.py:2: imports torch.Tensor",
        ),
        (
            "zaya_plugin/plan/a.py",
            "from importlib import import_module\nimport_module('torch')",
            "plan/a.py:2: imports torch",
        ),
        (
            "zaya_plugin/plan/a.py",
            "from zaya_plugin.model.router import ZayaRouter",
            "imports zaya_plugin.model.router.ZayaRouter",
        ),
        ("zaya_plugin/plan/a.py", "from ..model import router", "imports zaya_plugin.model.router"),
        ("zaya_plugin/plan/__init__.py", "from ..model import router", "imports zaya_plugin.model.router"),
        ("zaya_plugin/model/a.py", "from zaya_plugin import training", "imports zaya_plugin.training"),
        ("zaya_plugin/model/a.py", "from megatron import training", "imports megatron.training"),
        ("zaya_plugin/model/a.py", "import megatron", "imports megatron,"),
        (
            "zaya_plugin/training/loop.py",
            "from megatron.training import pretrain",
            "imports megatron.training.pretrain",
        ),
        ("zaya_plugin/optim/a.py", "import zaya_plugin.model", "imports zaya_plugin.model"),
        ("hip_ops/a.py", "from zaya_plugin import __version__", "hip_ops stands alone"),
        ("hip_ops/a.py", "import numpy", "imports numpy, allowed from outside: aiter, quack, torch, triton"),
        ("patches/a.py", "from zaya_plugin.hosts import pretrain", "imports zaya_plugin.hosts.pretrain"),
        ("recipes/a.py", "from zaya_plugin.config import compose", "imports zaya_plugin.config.compose"),
        ("zaya_plugin/bench/a.py", "import torch", "imports torch at the top"),
        ("zaya_plugin/bench/a.py", "class A:\n    import numpy", "imports numpy at the top"),
        ("zaya_plugin/bench/a.py", "from zaya_plugin.model import router", "router at the top"),
        (
            "zaya_plugin/__init__.py",
            "from zaya_plugin.model import layer_specs",
            "imports zaya_plugin.model.layer_specs",
        ),
        ("zaya_plugin/common.py", "", "no row of the table matches it"),
    ],
)
def test_the_checker_sees(tmp_path, rules, file, source, complaint):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    (found,) = violations(tmp_path, rules)
    assert complaint in found


@pytest.mark.parametrize(
    ("file", "source"),
    [
        (
            "zaya_plugin/hosts/pretrain.py",
            "from megatron.training import pretrain\nfrom zaya_plugin.model import layer_specs",
        ),
        ("zaya_plugin/hosts/args.py", "import megatron.training.arguments"),
        ("zaya_plugin/hosts/primus/trainer.py", "import primus\nfrom zaya_plugin import training"),
        ("zaya_plugin/config/a.py", "import json, os.path\nfrom . import schema\nfrom zaya_plugin import __version__"),
        (
            "zaya_plugin/bench/a.py",
            "import argparse\nfrom zaya_plugin import __version__\ndef f():\n    import torch\n    import "
            "zaya_plugin.model",
        ),
    ],
)
def test_the_checker_lets_pass(tmp_path, rules, file, source):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    assert violations(tmp_path, rules) == []


PROGRAM = """
import importlib, pkgutil, sys
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    for each in pkgutil.walk_packages(getattr(module, "__path__", []), f"{name}."):
        importlib.import_module(each.name)
print(*sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("rooms", "absent"),
    [
        (("config", "plan", "handover", "run", "aegis"), "torch,megatron,transformers"),
        (("cli",), "torch,megatron,transformers,hydra,omegaconf,numpy"),
    ],
)
def test_nothing_heavy_is_loaded(rooms, absent):
    """The same rule at run time, which also finds an import through a third module."""
    modules = [
        f"zaya_plugin.{room}"
        for room in rooms
        if (REPO / "zaya_plugin" / room).exists() or (REPO / f"zaya_plugin/{room}.py").exists()
    ]
    assert modules
    done = subprocess.run([sys.executable, "-I", "-c", PROGRAM, absent, *modules], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""

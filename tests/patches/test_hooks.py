# SPDX-License-Identifier: Apache-2.0
"""Symbols that a run replaces for its own time: restored afterwards, refused outside the table and its versions."""

import importlib
import sys
from dataclasses import replace
from types import ModuleType

import pytest

import zaya_plugin.patches

zaya_plugin.patches.apply()  # before Megatron is imported

from zaya_plugin.patches import hooks  # noqa: E402

SAVE = hooks.TRAINING + "save_checkpoint"


def value(symbol):
    module, _, name = symbol.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.fixture(autouse=True)
def training(monkeypatch):
    """Megatron's module, with a function of the test in place of its save."""
    from megatron.training import training

    monkeypatch.setattr(training, "save_checkpoint", lambda iteration: f"saved {iteration}")
    return training


@pytest.mark.parametrize("symbol", [symbol for symbol in hooks.HOOKS if symbol.startswith("megatron.")])
def test_each_symbol_is_megatrons(symbol):
    hook = hooks.HOOKS[symbol]
    assert value(symbol) is not None and hook.fits and hook.symbol == symbol
    assert hook.reason and hook.until and hook.upstream.startswith("https://github.com/")


def test_a_function_gets_the_one_that_it_replaces(training):
    before = training.save_checkpoint
    with hooks.wrapped([(SAVE, lambda save, iteration: f"first {save(iteration)}")]):
        assert training.save_checkpoint(3) == "first saved 3"
        with hooks.wrapped([(SAVE, lambda save, iteration: f"second {save(iteration)}")] * 2):
            assert training.save_checkpoint(3) == "second second first saved 3"
        assert training.save_checkpoint(3) == "first saved 3"
    assert training.save_checkpoint is before


def test_values_are_restored_after_an_error():
    symbols = ("megatron.core.optimizer.Adam", "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER")
    before = [value(symbol) for symbol in symbols]
    with pytest.raises(RuntimeError), hooks.replaced(dict.fromkeys(symbols, 7)):
        assert [value(symbol) for symbol in symbols] == [7, 7]
        raise RuntimeError
    assert [value(symbol) for symbol in symbols] == before


def test_for_the_rest_of_the_process(training):
    before = training.save_checkpoint
    restore = hooks.install([(SAVE, lambda save, iteration: f"ours {save(iteration)}")])
    assert training.save_checkpoint(1) == "ours saved 1"
    restore()
    assert training.save_checkpoint is before


def test_what_is_refused_changes_nothing(training, monkeypatch):
    before = training.save_checkpoint, training.load_checkpoint
    with pytest.raises(KeyError), hooks.replaced({SAVE: None, hooks.TRAINING + "get_model": None}):
        pass
    assert training.save_checkpoint is before[0]
    name = hooks.TRAINING + "load_checkpoint"
    monkeypatch.setitem(hooks.HOOKS, name, replace(hooks.HOOKS[name], versions="<0.16"))
    with pytest.raises(ImportError, match=r"^megatron-core=.*load_checkpoint.*Allowed: <0.16"):
        with hooks.wrapped([(SAVE, print), (name, print)]):
            pass
    assert (training.save_checkpoint, training.load_checkpoint) == before


@pytest.mark.parametrize("symbol", hooks.INSTANCES)
def test_a_change_of_an_object_is_described_and_refused_outside_its_versions(symbol, monkeypatch):
    class Each:
        pass

    class Other(Each):
        pass

    change, each, name = hooks.INSTANCES[symbol], Each(), symbol.rpartition(".")[2]
    assert change.fits and change.reason and change.until and change.upstream.startswith("https://github.com/")
    monkeypatch.setitem(hooks.INSTANCES, symbol, replace(change, versions="<0.16"))
    with pytest.raises(ImportError, match=r"^megatron-core=.*Allowed: <0.16"):
        hooks.set_attribute(symbol, each, Other)
    assert getattr(each, name, None) in (None, Each), "nothing is set"
    monkeypatch.setitem(hooks.INSTANCES, symbol, change)
    hooks.set_attribute(symbol, each, Other)
    assert getattr(each, name) is Other
    with pytest.raises(KeyError):
        hooks.set_attribute("GPTModel().decoder", each, Other)


def test_primus_is_hooked_before_it_has_chosen_its_megatron(monkeypatch):
    """A hook of Primus does not read megatron.core's version, which would be that of another installation and is
    cached.
    """
    runner = ModuleType("primus.core.patches.patch_runner")
    runner.error_rank_0 = print
    monkeypatch.setitem(sys.modules, runner.__name__, runner)
    monkeypatch.setattr(hooks.compat, "core_version", lambda: pytest.fail("megatron.core was asked for its version"))
    restore = hooks.install([(f"{runner.__name__}.error_rank_0", lambda report, message: (report, message))])
    assert runner.error_rank_0("failed") == (print, "failed")
    restore()
    assert runner.error_rank_0 is print

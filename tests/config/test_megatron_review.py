# SPDX-License-Identifier: Apache-2.0
"""The review of Megatron's arguments: complete for the installed Megatron, in one list each, and effective."""

import argparse

import pytest

from zaya_plugin.config.arguments import HOST, OWN_ARGUMENTS, ZAYA
from zaya_plugin.config.compose import compose
from zaya_plugin.config.megatron_review import (
    HOLDS,
    IMPOSSIBLE,
    OWNED_BY_KEY,
    PASSED_ON,
    impossible,
    owners,
    passed_on,
    review_problems,
    unchecked_lines,
)
from zaya_plugin.config.schema import leaves
from zaya_plugin.config.validate import validate


@pytest.fixture(scope="module")
def installed() -> set[str]:
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return {action.dest for action in parser._actions} - {"help"}


def test_every_argument_of_the_installed_megatron_is_reviewed(installed):
    reviewed = {*owners(), *ZAYA, *HOST, *impossible(), *passed_on()}
    assert sorted(installed - reviewed) == [], "new in this Megatron: put each into a list of megatron_review.py"
    assert sorted(reviewed - installed - {*OWN_ARGUMENTS}) == [], "no longer in Megatron: remove it"


def test_an_argument_is_in_one_list():
    named = [
        name for lists in (OWNED_BY_KEY, IMPOSSIBLE, PASSED_ON) for names in lists.values() for name in names.split()
    ]
    assert sorted(named) == sorted(set(named))
    assert not set(named) & {*ZAYA, *HOST}
    assert set(OWNED_BY_KEY) <= {path for path, _ in leaves()} and set(PASSED_ON) == set(HOLDS)


def test_only_what_is_passed_on_is_accepted(installed):
    """Every argument of Megatron, with its own name, under both groups: 0 contradictions of the recipe."""
    recipe = compose(["experiment=cpu_demo"])
    accepted = []
    for name in installed:
        for group in ("megatron", "megatron_unchecked"):
            recipe.megatron, recipe.megatron_unchecked = {}, {}
            setattr(recipe, group, {name: True})
            problems = list(review_problems(recipe, frozenset({**ZAYA, **HOST})))
            accepted += [name] if not problems else []
            for problem in problems:
                assert problem.startswith(f"{group}.{name}=true: ") and "Fix: " in problem
    assert sorted(accepted) == sorted(2 * PASSED_ON["true or false"].split())


@pytest.mark.parametrize(
    "override, parts",
    [
        ("megatron.fp16=true", ["decided by cluster.dtype", "Fix: cluster.dtype=<value>"]),
        ("megatron.lr=1", ["decided by optim.lr", "Fix: optim.lr=1"]),
        ("megatron.swiglu=false", ["set by the plugin"]),
        ("megatron.moe_grouped_gemm=true", ["ZAYA's own router and experts", "Fix: remove megatron.moe_grouped_gemm"]),
        ("megatron.train_sync_interval=1e3", ["Allowed: a whole number above 0"]),
        ("megatron.manual_gc=1", ["Allowed: true or false"]),
        ("megatron.brand_new=2", ["not reviewed", "megatron_unchecked.brand_new=2"]),
        ("megatron_unchecked.lr=1", ["decided by optim.lr"]),
        ("megatron_unchecked.rl_profile=true", ["reinforcement learning"]),
    ],
)
def test_the_message_names_the_key_or_the_reason(override, parts):
    with pytest.raises(ValueError) as error:
        validate(compose(["experiment=cpu_demo", override]), 2)
    assert all(part in str(error.value) for part in parts), error.value


def test_what_is_unchecked_is_reported():
    recipe = compose(["experiment=cpu_demo", "megatron_unchecked.brand_new=2"])
    validate(recipe, 2)
    (line,) = unchecked_lines(recipe)
    assert line.startswith("zaya: megatron_unchecked.brand_new=2: passed to Megatron without a review")

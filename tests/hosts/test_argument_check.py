# SPDX-License-Identifier: Apache-2.0
"""The dry run's check of Megatron's validation and optim.overrides, in a process without a device."""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.run import before_start
from zaya_plugin.run.rank_plan import make_plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "override, problem",
    [
        ("optim.overrides=['*.nothing.* optimizer=adamw']", "optim.overrides: no parameter matches"),
        ("megatron_unchecked.no_such_thing=1", "no_such_thing: Megatron has no such argument"),
    ],
)
def test_what_a_rank_would_refuse_is_found(override, problem):
    recipe = compose(["experiment=cpu_demo", override])
    with pytest.raises(ValueError, match=f"^{problem.replace('.', '[.]')}"):
        before_start.check_arguments(recipe, make_plan(recipe, {}))

# SPDX-License-Identifier: Apache-2.0
"""What of a recipe reaches the optimizer's surroundings. tests/optim/ has the optimizer."""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.training import optimizer


class Reached(Exception):
    """Stops the factory before it builds anything."""


@pytest.mark.parametrize(
    "overrides, expected",
    [((), (2**26, 10)), (("parallel.reduce_by_copies_mib=3", "cluster.distributed_timeout_minutes=7"), (3 * 2**20, 7))],
    ids=["defaults", "set"],
)
def test_windows_have_the_recipe_s_size_and_timeout(monkeypatch, overrides, expected):
    def reached(chunks, slot_bytes, timeout_minutes):
        raise Reached(chunks, slot_bytes, timeout_minutes)

    monkeypatch.setattr(optimizer, "reduce_by_copies", reached)
    recipe = compose(["experiment=cpu_demo", "parallel.reduce_by_copies=true", *overrides])
    with pytest.raises(Reached) as found:
        optimizer.optimizer_factory(recipe, None)(None, ["chunk"])
    assert found.value.args == (["chunk"], *expected)

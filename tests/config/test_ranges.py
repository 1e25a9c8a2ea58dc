# SPDX-License-Identifier: Apache-2.0
"""Every numeric key has a range, with its reason, that refuses what cannot be meant."""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import leaves

NUMERIC = {path: field for path, field in leaves() if str(field.type).split(" | ")[0] in ("int", "float", "list[int]")}
ABSURD = (float("inf"), float("-inf"), float("nan"), 1e30, -1e30, 10**12)


@pytest.mark.parametrize("path", NUMERIC)
def test_a_number_has_a_range(path):
    field = NUMERIC[path]
    limit, default = field.metadata["limit"], field.default
    assert limit is not None
    for value in ABSURD:
        assert not limit.holds([value] if str(field.type) == "list[int]" else value), value
    if isinstance(default, (int, float)):
        assert limit.holds(default)


@pytest.mark.parametrize(
    "override, parts",
    [
        ("seed=4294967296", ["seed=4294967296", "at most 4294967295 (numpy's seeds have 32 bits)"]),
        ("optim.lr=inf", ["optim.lr=inf", "a number above 0, at most 100.0"]),
        ("optim.lr=nan", ["optim.lr=nan"]),
        ("optim.clip_grad=1e30", ["at most 1000000.0"]),
        ("stage.train_iters=10000000", ["folders of checkpoints have seven digits"]),
        ("model.hidden_size=1000000000000", ["at most 1048576 (no device holds a layer of more)"]),
        ("profile.ranks=[-1]", ["numbers from 0"]),
        ("nproc=1000000", ["at most 1024"]),
        ("checkpoint.upload_limit=inf", ["above 0"]),
    ],
)
def test_the_message_says_the_range_and_why(override, parts):
    with pytest.raises(ValueError) as error:
        compose(["experiment=cpu_demo", override])
    assert all(part in str(error.value) for part in parts), error.value
    assert "Fix: " in str(error.value)

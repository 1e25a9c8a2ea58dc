# SPDX-License-Identifier: Apache-2.0
"""Random models are exact through export, import and transformers, or refused with the field's name."""

from collections import Counter

import pytest

from tests.checkpoint.convert.random_configurations import draw, outcome


@pytest.mark.parametrize("number", [0, 2, 3, 16, 25, 29])
def test_a_random_model(tmp_path, number):
    expected = {True: "refused", False: "folded" if draw(number).folded else "exact"}[draw(number).refused is not None]
    assert outcome(draw(number), tmp_path) == expected


def test_the_cases_are_mixed():
    cases = [draw(number) for number in range(200)]
    found = Counter("refused" if case.refused else "folded" if case.folded else "exact" for case in cases)
    assert found["exact"] >= 120 and found["refused"] >= 10 and found["folded"] >= 20
    assert len({case.refused for case in cases}) == 5


@pytest.mark.slow
def test_200_random_models(tmp_path):
    found = Counter(outcome(draw(number), tmp_path / str(number)) for number in range(200))
    assert sum(found.values()) == 200 and found["exact"] >= 120

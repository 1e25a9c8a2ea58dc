# SPDX-License-Identifier: Apache-2.0
"""Test predicted times: their arithmetic, and that they are marked as predictions."""

import pytest

from tests.gfx942.emulator import Counters
from tests.gfx942.predictions import instruction_seconds, predict, predict_from_counters


def test_bounds():
    copy = predict(4.33e9)
    assert copy.seconds == pytest.approx(1e-3) and copy.bound_by == "memory"
    product = predict(1e6, 600e9)
    assert product.seconds == pytest.approx(1e-3) and product.bound_by == "matrix"
    assert "prediction" in str(product) and "not measured" in str(product)
    with pytest.raises(ValueError, match="at least 0"):
        predict(-1)


def test_instructions():
    found = {"v_mfma_f32_32x32x8_bf16": 1216e3, "v_mfma_f32_16x16x16_bf16": 1216e3, "v_add_f32": 1216e3 * 20}
    assert instruction_seconds(found, overlap=False) == pytest.approx(4e3 * (8 + 4 + 20) / 2.1e9)
    assert instruction_seconds(found, overlap=True) == pytest.approx(4e3 * 20 / 2.1e9)


def test_from_counters():
    counters = Counters(per_opcode={"v_mfma_f32_32x32x8_bf16": 10, "v_mfma_f32_16x16x16_bf16": 10, "v_add_f32": 5})
    counters._xcd_words, counters.distinct_store_bytes = {1: [1000]}, 500
    found = predict_from_counters(counters)
    assert found.memory_seconds == pytest.approx(4500 / 4.33e12)
    assert found.matrix_seconds == pytest.approx(10 * (16384 + 8192) / 600e12)

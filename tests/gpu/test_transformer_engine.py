# SPDX-License-Identifier: Apache-2.0
"""The real Transformer Engine against the local modules: losses, and a checkpoint that moves both ways.

tests/gpu/test_layouts.py -k te has the parallel layouts, tests/gpu/test_core_attention.py its attention. Not run to its end yet.
"""

import pytest

from tests.gpu.test_demo import continued

TE = "cluster.transformer_impl=transformer_engine"
FP32 = ("cluster=gpu", "cluster.dtype=fp32", "checkpoint.save_interval=4", "exit_interval=24")


@pytest.fixture(autouse=True)
def package():
    pytest.importorskip("transformer_engine.pytorch")


def test_twenty_steps_from_a_local_checkpoint_and_back(demo, tmp_path):
    """In fp32 without TF32: from the same checkpoint the losses differ by rounding only, and each resumes to the bit."""
    local = demo(tmp_path / "local", *FP32, "cluster.environment.NVIDIA_TF32_OVERRIDE=0")
    theirs = demo(continued(tmp_path / "local", tmp_path / "te", 4), *FP32, TE, "resume=must")
    again = demo(continued(tmp_path / "te", tmp_path / "again", 8), *FP32, TE, "resume=must")
    back = demo(continued(tmp_path / "te", tmp_path / "back", 8), *FP32, "resume=must")
    assert list(local) == list(theirs) == list(again) == list(back) == list(range(1, 25))
    difference = {step: abs(theirs[step] - local[step]) / local[step] for step in local}
    print("relative differences to the local modules:", {step: f"{d:.1e}" for step, d in difference.items()})
    assert max(difference[step] for step in range(5, 15)) < 1e-5 and max(difference.values()) < 1e-3
    assert again[9] == theirs[9], "the first resumed step sees other weights"
    assert abs(back[9] - theirs[9]) / theirs[9] < 1e-5

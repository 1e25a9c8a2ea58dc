# SPDX-License-Identifier: Apache-2.0
"""The real Transformer Engine against the local modules: losses, a checkpoint that moves both ways, and pretrain_gpt.py
(ZAYA_MEGATRON_LM=<directory of Megatron-LM>).

tests/gpu/test_layouts.py -k te has the parallel layouts, tests/gpu/test_core_attention.py its attention.
"""

import pytest
import torch

from tests.gpu.test_demo import continued
from tests.gpu.test_layouts import BASE, LOSS
from tests.gpu.test_layouts import TE as TE_WITH_ATTENTION
from tests.hosts.conftest import checkout  # noqa: F401  a fixture
from tests.hosts.test_pretrain_gpt import pretrain_gpt
from tests.running import train

TE = "cluster.transformer_impl=transformer_engine"
FP32 = (
    "cluster=gpu",
    "cluster.dtype=fp32",
    "cluster.kernels=reference",
    "checkpoint.save_interval=4",
    "exit_interval=24",
)


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


@pytest.mark.parametrize("ranks", [1, 2])
def test_pretrain_gpt_and_zaya_train(checkout, corpus, tmp_path, ranks):  # noqa: F811  the fixture
    """pretrain_gpt.py --transformer-impl transformer_engine, 20 steps in bf16, and `zaya train` with it and without."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    shared = (*BASE, "stage.train_iters=20", "stage.eval_iters=0", "checkpoint.save_interval=null")
    local = train(tmp_path / "local", corpus, f"nproc={ranks}", recipe=shared).steps()
    own = train(tmp_path / "own", corpus, f"nproc={ranks}", *TE_WITH_ATTENTION, recipe=shared).steps()
    guest, output = pretrain_gpt(
        checkout, tmp_path / "guest", corpus, *TE_WITH_ATTENTION, ranks=ranks, recipe=shared, environment={}
    )
    words = (tmp_path / "guest" / "megatron.args").read_text()
    assert "--transformer-impl transformer_engine" in words and "is not used for" not in output
    losses = guest["lm loss"]
    assert list(losses) == list(local) == list(own) == list(range(1, 21))
    for name, steps in (("zaya train with Transformer Engine", own), ("the local modules", local)):
        print(f"differences to {name}:", {n: f"{abs(losses[n] - steps[n]['loss']):.1e}" for n in losses})
        assert max(abs(losses[n] - steps[n]["loss"]) for n in losses) < LOSS
    assert losses[1] == pytest.approx(own[1]["loss"], rel=1e-6)
    assert guest["grad-norm"][1] == pytest.approx(own[1]["grad_norm"], rel=1e-3)
    assert losses[20] < losses[1] - 0.5, "the model does not learn"

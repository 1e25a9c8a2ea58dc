# SPDX-License-Identifier: Apache-2.0
"""optim.grad_reduce_in_fp32=false halves the gradients of a bf16 model in memory and on the links."""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.plan.parallelism import sent_bytes
from zaya_plugin.plan.prediction import predict
from zaya_plugin.plan.recipe_plan import batch_of

WORDS = ("experiment=zaya1_base", "cluster=mi300x_8", "data.path=none", "stage.global_batch_size=128")


def test_gradients_in_bf16_have_half_the_bytes():
    in_fp32, in_bf16 = (predict(compose([*WORDS, *more]), 8) for more in ((), ("optim.grad_reduce_in_fp32=false",)))
    assert in_fp32.memory.components["gradients"] == 4 * 8_840_488_784
    assert in_bf16.memory.components["gradients"] == 2 * 8_840_488_784
    sent = [sent_bytes(step.shape, step.layout, batch_of(step.recipe, 8)) for step in (in_fp32, in_bf16)]
    assert sent[0]["gradients"] == 2 * sent[1]["gradients"] > 0 and sent[0]["weights"] == sent[1]["weights"]
    times = [step.record()["communication"]["gradients"]["ms"] for step in (in_fp32, in_bf16)]
    assert times[0] == pytest.approx(2 * times[1], rel=0.06)  # the latencies of the messages stay


@pytest.mark.parametrize(
    ("words", "size"),
    [((), 4), (("cluster.dtype=fp32",), 4), (("cluster.dtype=fp32", "optim.grad_reduce_in_fp32=false"), 4)],
)
def test_an_fp32_model_has_fp32_gradients(words, size):
    assert batch_of(compose([*WORDS, *words]), 8).gradient_bytes == size

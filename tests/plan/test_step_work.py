# SPDX-License-Identifier: Apache-2.0
"""Operations and least bytes of a step, against numbers worked out by hand."""

from dataclasses import replace

import pytest

from tests.plan.shapes import ZAYA1_BASE
from zaya_plugin.config.compose import compose
from zaya_plugin.plan.flops import count_parameters, forward_flops_by_part, training_flops
from zaya_plugin.plan.step_work import OptimizerShare, Rank, step_work, work_of

RANK = Rank(layers=40, tokens=65_536, micro_batches=4, experts=16)


def test_operations_add_up_to_the_models():
    work = step_work(ZAYA1_BASE, 4096, RANK)
    assert sum(part.flops for part in work.values()) == pytest.approx(
        training_flops(ZAYA1_BASE, 65_536, 4096), rel=1e-12
    )
    parts = forward_flops_by_part(ZAYA1_BASE, 4096)
    assert parts["head"] == 2 * 2048 * 262_272 and parts["attention"] == 40 * 2 * 2 * 1024 * 2048
    assert parts["experts"] == 40 * 2 * (4096 * 2048 + 2048 * 2048)


def test_bytes_of_the_passes_are_those_of_the_kernels():
    """The figures of docs/kernels.md: 12 and 18 bytes an element of merge and norm, 8704 a token of the prologue's
    backward.
    """
    one = replace(ZAYA1_BASE, num_layers=1)
    rank = Rank(layers=1, tokens=32_768, micro_batches=0, experts=16)
    work = step_work(one, 4096, rank)
    assert work["norms"].bytes == 2 * 32_768 * 2048 * (12 + 18)
    assert work["prologue"].bytes == 32_768 * (2 * 1536 * 2 + 8704)
    # permute, unpermute and their gradients 4 x 2h, products forward 3h + 3f and 2f, backward twice, SwiGLU 3f and 6f
    h = f = 2048
    assert work["experts"].bytes == 2 * 32_768 * (8 * h + (2 * h + 3 * f) + 3 * f + (4 * h + 6 * f) + 6 * f)
    assert work["attention"].bytes == 2 * 32_768 * ((1536 + 1024) + (2 * 1536 + 2 * 1024))
    assert work["gradients"].bytes == 0


def test_weights_are_met_once_a_micro_batch_and_pass():
    none, four = (step_work(ZAYA1_BASE, 4096, replace(RANK, micro_batches=n)) for n in (0, 4))
    parts = count_parameters(ZAYA1_BASE)
    met = {part: four[part].bytes - none[part].bytes for part in four}
    assert met["experts"] == 3 * 2 * 4 * parts["experts"] and met["head"] == 3 * 2 * 4 * parts["embedding"]
    assert met["projections"] + met["prologue"] == 3 * 2 * 4 * parts["attention"]
    assert met["router"] == 3 * 2 * 4 * parts["router"] and met["norms"] == met["embedding"] == 0
    half = step_work(ZAYA1_BASE, 4096, replace(RANK, experts=8))
    assert four["experts"].bytes - half["experts"].bytes == 3 * 2 * 4 * parts["experts"] / 2


def test_tensor_parallel_ranks_share_attentions_matrices_and_the_vocabulary():
    whole, half = (step_work(ZAYA1_BASE, 4096, replace(RANK, tensor=ranks)) for ranks in (1, 2))
    parts = count_parameters(ZAYA1_BASE)
    met = {part: whole[part].bytes - half[part].bytes for part in whole}
    assert met["head"] == 3 * 2 * 4 * parts["embedding"] / 2
    assert met["projections"] + met["prologue"] == 3 * 2 * 4 * parts["attention"] / 2
    assert met["experts"] == met["router"] == 0  # whole on every rank, for its tokens


def test_gradients_are_added_where_they_are_made_or_in_a_pass():
    plain = step_work(ZAYA1_BASE, 4096, RANK)
    apart = step_work(ZAYA1_BASE, 4096, replace(RANK, accumulated={"gradients": 1000}))
    inside = step_work(ZAYA1_BASE, 4096, replace(RANK, accumulated={"experts": 1000}))
    assert apart["gradients"].bytes == 1000 * (4 * (8 + 2) + 4)
    assert inside["gradients"].bytes == 1000 * 4
    assert inside["experts"].bytes - plain["experts"].bytes == 1000 * 4 * (8 - 2), (
        "read and written in fp32, not written in bf16"
    )
    # weights read twice, gradients read and written, in each of four micro-batches
    assert inside["experts"].weights == 1000 * 4 * (2 * 2 + 2 * 4) and plain["experts"].weights == 0
    written = step_work(
        ZAYA1_BASE, 4096, replace(RANK, accumulated={"experts": 1000, "head": 10}, written=frozenset({"experts"}))
    )
    assert written["gradients"].bytes == 10 * 4
    assert inside["experts"].bytes - written["experts"].bytes == 1000 * 4, (
        "the first of four micro-batches reads nothing"
    )


def test_the_optimizer_and_stages():
    work = step_work(
        ZAYA1_BASE, 4096, RANK, OptimizerShare(muon=1000, adamw=10, momentum_bytes=2, newton_schulz_flops=7.0)
    )
    assert work["optimizer"].flops == 7.0
    assert work["optimizer"].bytes == 1000 * (8 + 8 + 2 + 6) + 10 * (8 + 8 + 2 + 16)
    assert "optimizer" not in step_work(ZAYA1_BASE, 4096, RANK)
    first = step_work(ZAYA1_BASE, 4096, replace(RANK, layers=20, head=False))
    assert (first["head"].flops, first["head"].bytes) == (0, 0)
    assert first["experts"].flops == step_work(ZAYA1_BASE, 4096, RANK)["experts"].flops / 2


def test_the_first_stage_of_a_pipeline_has_its_layers_and_no_head():
    """Two stages on eight ranks: half the layers, for twice the tokens of a rank."""
    words = ["experiment=zaya1_base", "cluster=mi300x_8", "data.path=none", "stage.global_batch_size=128"]
    halves = [*words, "parallel.pipeline_model_parallel_size=2"]
    whole, stage = (work_of(compose(overrides), 8, 262_272) for overrides in (words, halves))
    assert stage["experts"].flops == whole["experts"].flops and stage["head"].flops == 0 < whole["head"].flops
    assert stage["optimizer"].flops == pytest.approx(whole["optimizer"].flops)
    assert whole["gradients"].bytes < stage["gradients"].bytes  # those of the embedding are added in a pass

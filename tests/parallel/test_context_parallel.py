# SPDX-License-Identifier: Apache-2.0
"""Context-parallel ranks against one rank: losses, expert choices and gradients of a small ZAYA. Four gloo
processes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.parallel.context_ranks import CASES, RANKS
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.parallelism import Batch, ParallelSizes, sent_bytes

pytestmark = pytest.mark.slow  # tests/distributed/test_layouts.py has context parallelism in every run


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list[dict]]:
    """Results of every rank, by the name of the case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.context_ranks", str(folder)],
        env=environment,
        text=True,
        timeout=800,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stdout
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {case.name: [rank[i] for rank in ranks] for i, case in enumerate(CASES)}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case for case in CASES if not case.deaf], ids=lambda case: case.name)
def test_loss_and_gradients_are_those_of_one_rank(found, case):
    exact = case.dtype == "float64"
    for result in found[case.name]:
        assert result["experts"] == 5 and result["skipped"] > 0, "every class, the skip class included, must be used"
        assert result["flips"] == 0, "expert choices differ"
        assert result["loss_difference"] < 1e-6
        assert result["token_difference"] < (1e-6 if exact else 1e-5)  # Megatron's cross-entropy is fp32 in any model
        assert result["gradient"] < (1e-12 if exact else 1e-4), result["worst"]


def test_the_comparison_notices_missing_boundary_rows(found):
    for result in found["cp2-deaf"]:
        assert result["token_difference"] > 1e-2 and result["gradient"] > 1e-2


@pytest.mark.parametrize("case", [case for case in CASES if not (case.config or case.deaf)], ids=lambda case: case.name)
def test_the_traffic_is_what_the_plan_says(found, case):
    shape = Shape(
        num_layers=3,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        num_experts=4,
        moe_ffn_hidden_size=24,
        router_hidden_size=16,
        vocab_size=64,
    )
    batch = Batch(case.length, micro_batch_size=2, dtype_bytes=8 if case.dtype == "float64" else 4)
    planned = sent_bytes(shape, ParallelSizes(context=case.size, zigzag=case.order == "zigzag"), batch)
    for result in found[case.name]:
        assert result["traffic"] == {  # boundary rows are gathered in both directions
            "all_gather_into_tensor": planned["key_values"] / 2 + planned["boundary"],
            "reduce_scatter_tensor": planned["key_values"] / 2,
            "all_to_all_single": 0,
        }


def test_a_window_moves_the_rows_that_it_reaches(found):
    """Of 40 rows in 8 chunks each rank receives 3 rows a chunk from other ranks, and their gradients back, in two of
    the three layers; gathering would receive 30 rows. A window of 30 rows is gathered.
    """
    row = 2 * 2 * 2 * 8 * 8  # two sequences; keys and values of two heads with 8 channels in fp64
    halo = [result["traffic"]["all_to_all_single"] for result in found["cp4-window"]]
    # Both directions: rank 0 holds the chunks 0 and 7, and rank 3 the neighbours 3 and 4.
    assert halo == [2 * rows * row for rows in (3 + 3, 6 + 6, 6 + 6, 3 + 3)]
    of_one_layer = found["cp4-packed"][0]["traffic"]["reduce_scatter_tensor"] / 3
    assert of_one_layer == 30 * row
    for result in found["cp4-window"]:
        assert result["traffic"]["reduce_scatter_tensor"] == of_one_layer
    for result in found["cp4-window-gathered"]:
        assert result["traffic"]["all_to_all_single"] == 0
        assert result["traffic"]["reduce_scatter_tensor"] == 3 * of_one_layer

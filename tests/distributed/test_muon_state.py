# SPDX-License-Identifier: Apache-2.0
"""Muon's sharded state: the same bits at any number of ranks after a checkpoint, within its bound, untouched by a
skipped step.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def run(what: str, ranks: int, directory: Path, *by: str) -> dict | None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("muon_state.py")), what, str(directory), str(ranks), *by],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    result = directory / "".join((what, str(ranks), *by, ".pt"))
    return torch.load(result) if result.is_file() else None


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    directory = tmp_path_factory.mktemp("muon_state")
    return directory, run("save", 4, directory)


def check_equal(a: dict, b: dict) -> None:
    for part in ("state", "after"):  # "after": the next step from there
        assert a[part].keys() == b[part].keys()
        for key, value in b[part].items():
            assert a[part][key].dtype == value.dtype and torch.equal(a[part][key], value), (part, key)


@pytest.mark.slow
@pytest.mark.parametrize("by", [(), ("stock",)], ids=["ours", "megatron"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_loads_the_same_bits(saved, ranks, by):
    """What every rank has written alone, by our loader and by Megatron's own."""
    directory, before = saved
    check_equal(run("load", ranks, directory, *by), before)


@pytest.mark.slow
def test_a_checkpoint_of_megatrons_own_writer_loads(saved, tmp_path):
    """It gathers the state and writes whole tensors, as earlier versions of this package did."""
    check_equal(run("save", 4, tmp_path, "stock"), saved[1])
    check_equal(run("load", 2, tmp_path), saved[1])


@pytest.mark.slow
def test_each_keeps_what_it_needs_and_no_rank_more_than_its_share(saved):
    _, before = saved
    kept = {}
    for name, key in before["state"]:
        kept.setdefault(name, set()).add(key)
    muon = {name for name, keys in kept.items() if keys == {"main", "weight", "exp_avg"}}
    adamw = {name for name, keys in kept.items() if keys == {"main", "weight", "exp_avg", "exp_avg_sq"}}
    assert muon | adamw == set(kept) and "embedding.word_embeddings.weight" in adamw
    assert sum("experts" in name for name in muon) == 2 * 8 * 3
    largest = 6 * 2 * 48 * 64  # fp32 weight and bf16 momentum of an fc1 matrix
    assert max(before["sizes"]) <= 1.1 * sum(before["sizes"]) / 4 + largest


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(tmp_path):
    run("skip", 2, tmp_path)


@pytest.mark.slow
def test_matrices_that_the_host_cuts_are_updated_and_saved_as_if_whole(saved, tmp_path):
    """With Megatron's own layout, as before 0.19: matrices that are cut between ranks."""
    cut = run("cut", 4, tmp_path)
    check_equal(cut, saved[1])
    check_equal(run("load", 2, tmp_path), saved[1])

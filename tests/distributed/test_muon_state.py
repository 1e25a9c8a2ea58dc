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


def run(what: str, ranks: int, directory: Path) -> dict | None:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    done = subprocess.run(
        [*command, str(Path(__file__).with_name("muon_state.py")), what, str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-6000:]
    result = directory / f"{what}{ranks}.pt"
    return torch.load(result) if result.is_file() else None


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict]:
    directory = tmp_path_factory.mktemp("muon_state")
    return directory, run("save", 4, directory)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_another_number_of_ranks_loads_the_same_bits(saved, ranks):
    directory, before = saved
    loaded = run("load", ranks, directory)
    assert loaded["state"].keys() == before["state"].keys()
    for key, value in before["state"].items():
        assert loaded["state"][key].dtype == value.dtype and torch.equal(loaded["state"][key], value), key
    for key, value in before["after"].items():  # and the next step from there
        assert torch.equal(loaded["after"][key], value), key


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


def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(tmp_path):
    run("skip", 2, tmp_path)


@pytest.mark.slow
def test_matrices_that_the_host_cuts_are_updated_as_if_whole(saved, tmp_path):
    """With Megatron's own layout, as before 0.19, matrices that are cut between ranks are updated as if whole."""
    _, whole = saved
    cut = run("cut", 4, tmp_path)
    assert cut["after"].keys() == whole["after"].keys()
    for key, value in whole["after"].items():
        assert torch.equal(cut["after"][key], value), key

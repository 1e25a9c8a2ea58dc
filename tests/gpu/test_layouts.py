# SPDX-License-Identifier: Apache-2.0
"""The grid of parallel layouts on GPUs of one host: bf16 through NCCL, 20 steps, losses within 2e-2 of one rank. Prints a table.

Layouts that need more GPUs than there are, are left out.
"""

import pytest
import torch

from tests.distributed.layout_grid import COMMON, Grid
from tests.distributed.layouts import PACKED, QUICK, RECOMPUTED, SLOW

STEPS, LOSS = 20, 2e-2
# Sizes that the kernels take: heads of 16 channels, rows of 16 bytes.
BASE = (
    "experiment=cpu_demo", "cluster=gpu", "stage.seq_length=256", "stage.micro_batch_size=2", "stage.global_batch_size=8",
    "stage.train_iters=60", "optim.lr=1e-3", "optim.lr_warmup_iters=10", "checkpoint.keep_last=0", "logger=none",
)
LAYOUTS = QUICK + SLOW + RECOMPUTED


def compared(grid: Grid, layout) -> tuple[float, float, str]:
    """Largest difference of the losses from one rank, tokens a second of the last steps, and both as a line."""
    rows = grid.run(layout)["reported"]
    pairs = list(zip(rows, grid.one["reported"], strict=True))
    assert len(pairs) == STEPS
    difference = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
    seconds = sorted(row["seconds"] for row in rows[STEPS // 2 :])[STEPS // 4]
    speed = 8 * 256 / seconds
    last = pairs[-1]
    return difference, speed, (
        f"{layout.name:24} {layout.ranks} GPUs  largest loss difference {difference:.1e}  "
        f"last loss {last[0]['loss']:.4f} (one rank {last[1]['loss']:.4f})  {speed:,.0f} tokens/s"
    )


def make_grid(directory, data, *overrides: str) -> Grid:
    return Grid(directory, data, overrides, last=COMMON + STEPS, gradients=False, base=BASE, forked=False)


@pytest.fixture(scope="module")
def table(request):
    lines = []
    yield lines
    with request.config.pluginmanager.get_plugin("capturemanager").global_and_fixture_disabled():
        print("\n" + "\n".join(lines))


@pytest.fixture(scope="module", params=[(), PACKED], ids=["plain", "packed"])
def grid(request, tmp_path_factory, corpus):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs at least two GPUs")
    return make_grid(tmp_path_factory.mktemp("layouts"), corpus, *request.param)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_follows_one_rank(grid, table, layout):
    if torch.cuda.device_count() < layout.ranks:
        pytest.skip(f"needs {layout.ranks} GPUs")
    difference, _, line = compared(grid, layout)
    table.append(line + ("  packed" if PACKED[0] in grid.recipe else ""))
    assert difference < LOSS

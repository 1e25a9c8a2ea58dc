# SPDX-License-Identifier: Apache-2.0
"""Training with gradients that are reduced by copies (zaya_plugin/parallel/copied_reduction.py), on a CPU through files in shared memory."""

import pytest

from tests.distributed.layout_grid import run_job
from tests.running import MICRO

STEPS = 5


def sent_by_reduce_scatter(run):
    """Bytes of rank 0 in the last step."""
    return sum(count for (kind, _), count in run["sent"][0][-1].items() if kind == "_reduce_scatter_base_")


@pytest.mark.parametrize(
    "ranks, overlap, layout, windows",
    [
        (2, "false", (), [2]),
        (2, "true", (), [2]),
        pytest.param(4, "true", (), [4], marks=pytest.mark.slow),
        pytest.param(4, "true", ("parallel.expert_model_parallel_size=2",), [4, 2], marks=pytest.mark.slow),
        pytest.param(4, "true", ("parallel.pipeline_model_parallel_size=2",), [2], marks=pytest.mark.slow),
    ],
    ids=["at once", "overlapped", "four ranks", "two groups of experts", "two stages"],
)
def test_training_is_the_same(tmp_path, corpus, servers, ranks, overlap, layout, windows):
    """Of two ranks' gradients there is one sum, so it is the same to the bit; gloo adds four in another order. windows: sizes of their groups."""
    recipe = (
        *MICRO,
        f"data.path={corpus}",
        "optim=muon",
        "stage.eval_iters=0",
        f"exit_interval={STEPS}",
        f"parallel.overlap_grad_reduce={overlap}",
        f"parallel.overlap_param_gather={overlap}",
        "parallel.ddp_bucket_size=20000",
        *layout,
    )
    usual, copied = (
        run_job(servers, tmp_path / name, ranks, (*recipe, f"parallel.reduce_by_copies={by_copies}"), traffic=True)
        for name, by_copies in (("usual", "false"), ("copied", "true"))
    )
    assert [row["step"] for row in copied["reported"]] == list(range(1, STEPS + 1))
    mine, theirs = ([row["loss"] for row in run["reported"]] for run in (copied, usual))
    assert mine == theirs if ranks == 2 else mine == pytest.approx(theirs, rel=2e-5)
    assert copied["windows"] == [windows] * ranks and usual["windows"] == [[]] * ranks, "one for each set of ranks"
    assert sent_by_reduce_scatter(usual) > 0 == sent_by_reduce_scatter(copied)
    assert mine[-1] < mine[0]

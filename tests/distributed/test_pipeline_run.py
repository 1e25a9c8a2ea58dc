# SPDX-License-Identifier: Apache-2.0
"""`zaya train` over pipeline stages as a user meets it: console, metrics of all layers, validation, a checkpoint for
one rank.
"""

import shutil

import pytest

from tests.running import train

STEPS = ("stage.train_iters=8", "checkpoint.save_interval=4", "stage.eval_interval=4")

pytestmark = pytest.mark.slow


def test_a_run_over_interleaved_stages_reports_everything_and_one_rank_continues_it(tmp_path, corpus):
    sizes = ("parallel=pipeline_parallel", "parallel.virtual_pipeline_stages=2")
    run = train(tmp_path / "run", corpus, "nproc=2", *sizes, *STEPS)
    assert list(run.steps()) == list(range(1, 9)) and list(run.validation()) == [4, 8]
    assert "step 4: checkpoint saved" in run.output and "step 8/8" in run.output
    assert run.output.count("from the start") == 1  # not once for every virtual stage
    load = run.steps()[8]["expert_load"]
    assert [len(layer) for layer in load] == [16] * 4
    assert all(sum(layer) == pytest.approx(1, abs=1e-3) for layer in load)

    continued = tmp_path / "continued"
    shutil.copytree(run.run_dir, continued)
    shutil.rmtree(continued / "checkpoints" / "iter_0000008")
    (continued / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    one = train(continued, corpus, "nproc=1", "resume=must", *STEPS)
    for step in range(5, 9):
        assert one.steps()[step]["loss"] == pytest.approx(run.steps()[step]["loss"], abs=5e-5)
    assert one.steps()[5]["expert_load"] == run.steps()[5]["expert_load"]
    assert one.validation()[8] == pytest.approx(run.validation()[8], abs=5e-5)

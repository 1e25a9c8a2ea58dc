# SPDX-License-Identifier: Apache-2.0
import gzip
import json

import pytest

from tests.running import train


@pytest.mark.slow
def test_a_trace_is_written_on_request(tmp_path, corpus):
    run = train(
        tmp_path,
        corpus,
        "nproc=1",
        "profile.enabled=true",
        "profile.step_start=3",
        "profile.step_end=5",
        "exit_interval=6",
        "stage.eval_interval=100",
    )
    with gzip.open(run.run_dir / "torch_profile" / "rank-0.json.gz", "rt") as trace:
        events = json.load(trace)["traceEvents"]
    names = [event.get("name") for event in events]
    # two steps, four micro-batches each, four layers
    assert names.count("ExpertMLP") == 2 * 4 * 4
    assert names.count("ExpertMLPBackward") == 2 * 4 * 4

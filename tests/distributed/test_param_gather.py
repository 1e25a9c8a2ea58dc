# SPDX-License-Identifier: Apache-2.0
"""Parameters that are gathered while the model already runs must have arrived where they are read, also those of
modules that are never called (see `gathered` of zaya_plugin/model/parameters.py; tests/model/test_gathered_parameters.py looks at
each).
"""

import pytest

from tests.distributed.layout_grid import run_job
from tests.running import MICRO

STEPS = 5


@pytest.mark.slow
@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_overlapping_the_gather_changes_no_bit(tmp_path, corpus, servers, optim):
    """Overlapping the gather of parameters changes no bit, with the smallest buckets that the layout makes; some hold
    several parameters, and tests/model/test_gathered_parameters.py looks at each.
    """
    recipe = (
        *MICRO,
        f"data.path={corpus}",
        f"optim={optim}",
        "stage.eval_iters=0",
        f"exit_interval={STEPS}",
        "parallel.overlap_grad_reduce=true",
        "parallel.ddp_bucket_size=1",
    )
    at_once, overlapped = (
        run_job(servers, tmp_path / name, 2, (*recipe, f"parallel.overlap_param_gather={overlap}"))
        for name, overlap in (("at_once", "false"), ("overlapped", "true"))
    )
    assert [row["step"] for row in overlapped["reported"]] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in overlapped["reported"]] == [row["loss"] for row in at_once["reported"]]
    assert at_once["reported"][-1]["loss"] < at_once["reported"][0]["loss"]

# SPDX-License-Identifier: Apache-2.0
"""Ranks that tests of one file take their turns on."""

import pytest

from tests.distributed.rank_server import RankServers


@pytest.fixture(scope="module")
def servers():
    """Processes that run one job after the other; see layout_grid.run_job."""
    servers = RankServers()
    yield servers
    servers.close()

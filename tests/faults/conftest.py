# SPDX-License-Identifier: Apache-2.0
"""One process that runs the commands of all tests of a file, each in a fork."""

import pytest

from tests.faults.micro_curriculum import Ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    started = Ranks(tmp_path_factory.mktemp("log") / "ranks.log")
    yield started
    started.close()

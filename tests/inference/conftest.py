# SPDX-License-Identifier: Apache-2.0
"""One gloo rank with Megatron's groups, and a small random model in a folder."""

from pathlib import Path

import pytest

from tests.inference.small import open_decoder, open_theirs, publish_small
from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this folder)


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """A native folder with a tokenizer: small random weights in fp32, every 1-D tensor random."""
    return publish_small(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def decoder(published):
    return open_decoder(published)


@pytest.fixture(scope="session")
def theirs(published):
    return open_theirs(published)

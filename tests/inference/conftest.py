# SPDX-License-Identifier: Apache-2.0
"""One gloo rank with Megatron's groups, and a small random model in a folder."""

from pathlib import Path

import pytest

from tests.inference.small import publish_small
from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this folder)


@pytest.fixture(scope="session")
def published(tmp_path_factory) -> Path:
    """A native folder with a tokenizer: small random weights in fp32, every 1-D tensor random."""
    return publish_small(tmp_path_factory.mktemp("small") / "model")


@pytest.fixture(scope="session")
def decoder(published):
    from zaya_plugin.checkpoint.convert.importing import open_source
    from zaya_plugin.checkpoint.convert.loading import load_model
    from zaya_plugin.inference.decoder import Decoder

    source = open_source(published)
    return Decoder(load_model(source.model, source.tensors))


@pytest.fixture(scope="session")
def theirs(published):
    """The same model in transformers."""
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(published, dtype="float32").eval()

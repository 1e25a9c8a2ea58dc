# SPDX-License-Identifier: Apache-2.0
"""load_hf and save_hf: on models split among ranks, and on one that holds another model."""

import subprocess
import sys

import pytest
import torch

from tests.checkpoint.convert.published import TINY, publish
from zaya_plugin.checkpoint.convert import verification
from zaya_plugin.checkpoint.convert.importing import open_source


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tensor", "expert", "pipeline"])
def test_two_ranks_read_and_write_published_weights(tmp_path, layout):
    folder, output = publish(tmp_path / "published"), tmp_path / "export"
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    words += ["-m", "tests.checkpoint.convert.two_ranks", layout, str(folder), str(output)]
    done = subprocess.run(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]
    different = verification.differences(open_source(folder), open_source(output))
    assert [line for line in different if "balancing_biases: torch.bfloat16" not in line] == []
    assert not (tmp_path / "export.parts").exists()


def test_another_model_is_refused_before_a_weight_changes(tmp_path):
    from zaya_plugin import build_zaya_model, config_from_hf, load_hf

    folder = publish(tmp_path / "published")
    config, rest = config_from_hf(folder, use_cpu_initialization=True)
    assert rest == dict(vocab_size=64, max_sequence_length=64, rotary_base=1_000_000, rotary_percent=0.5)
    config.router_norm_epsilon = 1e-4
    model = build_zaya_model(config, **rest)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor is not None}
    with pytest.raises(
        ValueError, match=r"holds another model \(here and there\): router_norm_epsilon 0.0001 and None"
    ):
        load_hf(model, folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items() if name in before)
    assert TINY.num_layers == config.num_layers


def test_rows_of_padding_are_zero(tmp_path):
    from zaya_plugin import build_zaya_model, config_from_hf, load_hf

    folder = publish(tmp_path / "published")
    config, rest = config_from_hf(folder, use_cpu_initialization=True)
    model = build_zaya_model(config, **rest | {"vocab_size": 128})
    load_hf(model, folder)
    table = model.embedding.word_embeddings.weight
    assert table[:64].any(1).all() and not table[64:].any()

# SPDX-License-Identifier: Apache-2.0
"""A compiled step: the logits of the layers of training, in one graph for all layers, and in few kernels."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from hip_ops.runtime.compiled import compile_function
from tests.inference.small import SMALL, open_decoder, publish_small
from tests.inference.test_decoder import apart, prompts
from zaya_plugin.inference import compiled_step
from zaya_plugin.inference import decoder as decoder_module
from zaya_plugin.inference.compiled_step import OPTIONS, layer_step
from zaya_plugin.inference.decoder import Decoder
from zaya_plugin.inference.sampling import generate

CLOSE = 1e-5  # of each step's logits, relative to their norm: fp32 sums in another order
SLIDING = dict(sliding_window=9, window_attn_skip_freq=2, swa_rotary_base=700)


@pytest.mark.parametrize(
    ("backend", "fields", "lengths", "room", "steps", "expected"),
    [
        ("eager", SLIDING, (9, 1, 23), 16, 40, 2),  # windows, and a ring that is passed many times
        pytest.param("eager", dict(skip_output="identity"), (3, 1, 4, 1, 5), 256, 12, 1, marks=pytest.mark.slow),
        pytest.param("inductor", {}, (120,), 256, 40, 1, marks=pytest.mark.slow),  # over the edge of a block of keys
        pytest.param("inductor", SLIDING, (9, 1, 23, 3, 4), 16, 40, 2, marks=pytest.mark.slow),
    ],
)
def test_as_the_layers_of_training(tmp_path, monkeypatch, backend, fields, lengths, room, steps, expected):
    monkeypatch.setattr(decoder_module, "ROOM", room)
    torch._dynamo.reset()
    counters.clear()
    # A formula is not compiled on a CPU.
    options = OPTIONS if backend == "inductor" else None
    on_a_cpu = compile_function(layer_step, fullgraph=True, backend=backend, options=options)
    monkeypatch.setattr(compiled_step, "compiled", lambda batch, length: on_a_cpu)
    model = open_decoder(publish_small(tmp_path / "model", model=replace(SMALL, **fields))).model
    plain, compiled = Decoder(model), Decoder(model, compiled=True)
    given = prompts(*lengths)
    for decoder in (plain, compiled):
        decoder.begin(given, steps)
    tokens = torch.tensor(generate(Decoder(model), given, steps))
    for place in range(steps - 1):
        one, other = (decoder.step(tokens[:, place]).clone() for decoder in (plain, compiled))
        assert apart(other, one) < CLOSE, place
    assert counters["stats"]["unique_graphs"] == expected, "the layers with one length of cache share a graph"

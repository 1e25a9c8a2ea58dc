# SPDX-License-Identifier: Apache-2.0
"""The check of a decoding step's kernels, with faulty ones that are made of the layers of training."""

from dataclasses import replace

import pytest
import torch

from tests.inference.small import SMALL, publish_small
from tests.inference.test_decoder import prompts
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.convert.loading import load_model
from zaya_plugin.inference import decode_check
from zaya_plugin.inference import decoder as decoder_module
from zaya_plugin.inference.decoder import Decoder
from zaya_plugin.inference.sampling import generate


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """More layers than are checked, and windows in every second one."""
    fields = dict(num_layers=5, sliding_window=9, window_attn_skip_freq=2, swa_rotary_base=700)
    source = open_source(publish_small(tmp_path_factory.mktemp("model") / "small", model=replace(SMALL, **fields)))
    return load_model(source.model, source.tensors, torch.float32)


def newest(cache, kernels):
    """Keys or values [b, g, d] of the newest token."""
    return cache[torch.arange(len(cache)), :, kernels.states[0].progress.positions % cache.shape[2]]


def put(cache, kernels, value):
    cache[torch.arange(len(cache)), :, kernels.states[0].progress.positions % cache.shape[2]] = value


def last_row_of_attention(kernels):
    kernels.attended[..., -1, :] = kernels.attended[..., -1, :].flip(-1)


def experts(kernels):
    kernels.output *= 1.2


def keys(kernels):
    cache = kernels.states[1].keys
    put(cache, kernels, newest(cache, kernels).roll(1, -1))


def values_that_are_no_numbers(kernels):
    put(kernels.states[0].values, kernels, float("nan"))


def rounding(kernels):
    kernels.output *= 1.02


FAULTS = [
    (last_row_of_attention, "outputs of attention differ by"),
    (experts, "outputs of the experts differ by 0.2 of"),
    (keys, "keys of layer 2 differ by"),
    (values_that_are_no_numbers, "values of layer 1 differ by nan of"),
    (rounding, None),
]


@pytest.mark.parametrize(("fault", "said"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_kernels_far_from_the_layers_of_training_are_not_taken(model, monkeypatch, caplog, fault, said):
    class Kernels:
        def __init__(self, model, states):
            self.states = states

        def __call__(self, embedding, angles):
            self.states[0].progress.show(own.room)
            last = model.decoder.layers[len(self.states) - 1]
            hooks = [
                module.register_forward_hook(lambda module, _, result, name=name: setattr(self, name, result[0]))
                for name, module in (("attended", last.self_attention), ("output", last.mlp))
            ]
            hidden = own._layers(embedding, angles, self.states)
            for hook in hooks:
                hook.remove()
            self.attended, self.output = self.attended.clone(), self.output.clone()
            fault(self)
            return hidden

    monkeypatch.setattr(decoder_module, "refusal", lambda *model_and_batch: None)
    monkeypatch.setattr(decoder_module, "DecodeStep", Kernels)
    monkeypatch.setattr(decode_check, "DecodeStep", Kernels)
    expected = generate(Decoder(model), prompts(5, 9), 8)
    own = Decoder(model, kernels=True)
    assert generate(own, prompts(5, 9), 8) == expected
    messages = [message.rpartition("RuntimeError: ")[2] for message in caplog.messages]
    if said is None:
        assert not messages and len(own.decode_step.states) == 5
    else:
        assert own.decode_step is None and len(messages) == 1 and messages[0].startswith(said), messages
        assert messages[0].endswith("of their norm from the layers of training, at most 0.1")

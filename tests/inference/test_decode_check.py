# SPDX-License-Identifier: Apache-2.0
"""The check of a decoding step's kernels, with faulty ones that are made of the layers of training."""

from contextlib import ExitStack, contextmanager
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
    fields = dict(num_layers=5, sliding_window=250, window_attn_skip_freq=2, swa_rotary_base=700)
    source = open_source(publish_small(tmp_path_factory.mktemp("model") / "small", model=replace(SMALL, **fields)))
    return load_model(source.model, source.tensors, torch.float32)


class Kernels:
    """The layers of training with a fault, which may change `embedding`, `angles`, the states and what is visible before
    it yields, and the states, `attended`, `output` and `hidden` behind.
    """

    fault = decoder = None  # of a test

    def __init__(self, model, states):
        self.model, self.states, self.progress = model, states, states[0].progress
        self.calls = 0

    def __call__(self, embedding, angles):
        self.embedding, self.angles, self.calls = embedding, angles, self.calls + 1
        self.progress.show(decode_check.PLACES)
        last = self.model.decoder.layers[len(self.states) - 1]
        with ExitStack() as hooks, contextmanager(Kernels.fault)(self):
            for name, module in (("attended", last.self_attention), ("output", last.mlp)):
                keep = lambda _, __, result, name=name: setattr(self, name, result[0].clone())  # noqa: E731
                hooks.enter_context(module.register_forward_hook(keep))
            self.hidden = Kernels.decoder._layers(self.embedding, self.angles, self.states)
        self.progress.show(decode_check.PLACES)
        return self.hidden

    def new(self, layer, name):
        """Keys or values of the newest token, to be read and written: [b, g, d]."""
        cache = getattr(self.states[layer], name)
        return cache, (torch.arange(len(cache)), slice(None), self.progress.positions % cache.shape[2])


def nothing(kernels):
    yield


def rounding(kernels):
    yield
    kernels.output *= 1.02


def one_step_far(kernels):
    yield
    if kernels.calls % 3 == 1:
        kernels.output *= -1


def second_block_unseen(kernels):
    kernels.progress.visible[..., 128:] = False
    yield


def first_block_read_whole(kernels):
    kernels.progress.visible[..., :128] = True
    yield


def newest_key_unseen(kernels):
    kernels.progress.visible &= torch.arange(decode_check.PLACES) != kernels.progress.positions[:, None, None, None]
    yield


def ring_read_to_the_newest_place(kernels):
    positions, room = kernels.progress.positions, kernels.states[0].keys.shape[2]
    if (positions >= room).all():
        kernels.progress.visible &= torch.arange(decode_check.PLACES) <= (positions % room)[:, None, None, None]
    yield


def positions_of_the_first_sequence(kernels):
    kernels.angles = kernels.angles[:, :1].expand_as(kernels.angles).contiguous()
    yield


def older_token_forgotten(kernels):
    kernels.states[0].z[0] = 0
    yield


def delayed_values_not_kept(kernels):
    before = kernels.states[1].delayed.clone()
    yield
    kernels.states[1].delayed.copy_(before)


def convolutions_state_not_kept(kernels):
    before = kernels.states[1].z.clone()
    yield
    kernels.states[1].z.copy_(before)


def last_sequence(kernels):
    yield
    kernels.attended[..., -1, :] = kernels.attended[..., -1, :].flip(-1)


def last_program_of_the_experts(kernels):
    yield
    kernels.output[..., -8:] = 0


def experts(kernels):
    yield
    kernels.output *= 1.2


def keys(kernels):
    yield
    cache, place = kernels.new(1, "keys")
    cache[place] = cache[place].roll(1, -1)


def values_that_are_no_numbers(kernels):
    yield
    cache, place = kernels.new(0, "values")
    cache[place] = float("nan")


def older_key_written(kernels):
    yield
    cache, (rows, heads, places) = kernels.new(1, "keys")
    cache[rows, heads, (places + 1) % cache.shape[2], :1] += 1


def older_value_written_once(kernels):
    yield
    if kernels.calls == 20:
        cache, (rows, heads, places) = kernels.new(0, "values")
        cache[rows, heads, places - 1] = cache[rows, heads, places]


def last_norm(kernels):
    yield
    kernels.hidden = kernels.hidden * 1.2


def a_layer_behind_the_checked_ones(kernels):
    if len(kernels.states) > decode_check.LAYERS:
        raise ValueError("not compiled")
    yield


FAULTS = {
    nothing: None,
    rounding: None,
    one_step_far: None,
    second_block_unseen: "hidden states",
    first_block_read_whole: "hidden states",
    newest_key_unseen: "hidden states",
    ring_read_to_the_newest_place: "hidden states",
    positions_of_the_first_sequence: "hidden states",
    older_token_forgotten: "hidden states",
    delayed_values_not_kept: "delayed values of layer 2",
    convolutions_state_not_kept: "inputs of the convolutions of layer 2",
    last_sequence: "outputs of attention",
    last_program_of_the_experts: "outputs of the experts",
    experts: "outputs of the experts are 0.2 ",
    keys: "keys of layer 2",
    values_that_are_no_numbers: "values of layer 1 are nan ",
    older_key_written: "layer 2 changes keys or values of older tokens",
    older_value_written_once: "layer 1 changes keys or values of older tokens",
    last_norm: "hidden states are 0.2 ",
    a_layer_behind_the_checked_ones: "not compiled",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_kernels_with_a_fault_are_not_taken(model, monkeypatch, caplog, fault):
    monkeypatch.setattr(decoder_module, "refusal", lambda *model_and_batch: None)
    for module in (decoder_module, decode_check):
        monkeypatch.setattr(module, "DecodeStep", Kernels)
    expected = generate(Decoder(model), prompts(5, 9), 8)
    own = Decoder(model, kernels=True)
    monkeypatch.setattr(Kernels, "fault", staticmethod(fault))
    monkeypatch.setattr(Kernels, "decoder", own)
    random = torch.get_rng_state()
    assert generate(own, prompts(5, 9), 8) == expected
    assert torch.equal(torch.get_rng_state(), random), "a sampled text would depend on the check"
    assert not any(m._forward_hooks for m in model.modules())
    if FAULTS[fault] is None:
        assert not caplog.messages and len(own.decode_step.states) == 5
    else:
        assert own.decode_step is None and not own.own_kernels and len(caplog.messages) == 1, caplog.messages
        assert caplog.messages[0].split("Error: ")[1].startswith(FAULTS[fault])

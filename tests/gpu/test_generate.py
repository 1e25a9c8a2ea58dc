# SPDX-License-Identifier: Apache-2.0
"""Decoding on an accelerator: steps replayed as graphs are the steps, and fp32 gives transformers' tokens."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from tests.inference import small
from zaya_plugin.checkpoint.convert import hf_config
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.convert.loading import load_model
from zaya_plugin.inference import decode_step
from zaya_plugin.inference import decoder as decoder_module
from zaya_plugin.inference.decoder import Decoder
from zaya_plugin.inference.sampling import generate

# Widths that every kernel takes; the prologue of ZAYA1's heads.
MODEL = Description(3, 256, 4, 2, 128, 4, 128, 64, 512, max_position_embeddings=1024, bos=0, eos=0, pad=1)
PROMPTS = [[5, 6, 7], [9], list(range(10, 40))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_file(small.random_tensors(model=MODEL), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_config.write("native", MODEL, "float32")))
    return folder


def model(folder, dtype):
    source = open_source(folder)
    return load_model(source.model, source.tensors, dtype, "cuda")


def test_a_replayed_step_is_the_step(folder, monkeypatch):
    """Room for 16 tokens at first: several graphs, and a second batch in the same memory."""
    monkeypatch.setattr(decoder_module, "ROOM", 16)
    loaded = model(folder, torch.bfloat16)
    plain, graphs = Decoder(loaded, graphs=False), Decoder(loaded, kernels=False)
    assert graphs.graphs
    tokens = generate(plain, PROMPTS, 100)
    assert generate(graphs, PROMPTS, 100) == tokens and sorted(graphs.captured) == [32, 64, 128, 256]
    assert generate(graphs, PROMPTS, 100) == tokens
    given = torch.tensor(tokens, device="cuda")
    for decoder in (plain, graphs):
        decoder.begin(PROMPTS, 100)
    for place in range(99):
        one, other = (decoder.step(given[:, place]).clone() for decoder in (plain, graphs))
        assert torch.equal(one, other), place


@pytest.mark.parametrize(
    ("prompts", "fields", "splits"),
    [
        (PROMPTS[2:], {}, {}),
        (PROMPTS, dict(sliding_window=40, window_attn_skip_freq=2, swa_rotary_base=700), {}),
        (PROMPTS[2:], {}, dict(SPLITS=3, BLOCK=16)),
    ],
    ids=["one", "windows", "several blocks a part"],
)
def test_the_kernels_of_a_step_are_near_the_layers_of_training(tmp_path, monkeypatch, caplog, prompts, fields, splits):
    """One captured step, over the edges of blocks of keys and round a ring that is no whole block; kernels that start
    while the one before ends give the numbers of those that do not; six sequences have no kernels. By default a part
    has several blocks above 8,192 tokens.
    """
    for name, value in splits.items():
        monkeypatch.setattr(decode_step, name, value)
    loaded = model(small.publish_small(tmp_path / "model", model=replace(MODEL, **fields)), torch.bfloat16)
    plain, own, one_by_one = Decoder(loaded, kernels=False), Decoder(loaded), Decoder(loaded)
    tokens = torch.tensor(generate(plain, prompts, 120), device="cuda")
    plain.begin(prompts, 120)
    own.begin(prompts, 120)
    with monkeypatch.context() as patched:
        patched.setattr(decode_step, "overlap", lambda device: {"OVERLAP": False})
        one_by_one.begin(prompts, 120)
    apart = []
    for place in range(119):
        one, other = (decoder.step(tokens[:, place]).float().clone() for decoder in (plain, own))
        apart.append((other - one).norm(dim=-1) / one.norm(dim=-1))
        assert torch.equal(other, one_by_one.step(tokens[:, place]).float()), place
    assert torch.stack(apart).median() < 0.05  # a token that another expert takes is further away
    assert own.decode_step is not None and [*own.captured] == [own.room]
    own.begin(PROMPTS * 2, 4)
    assert own.decode_step is None
    assert not [message for message in caplog.messages if message.startswith("decoding")]


def test_a_state_in_bf16_is_near_the_whole_sequence(folder):
    decoder = Decoder(model(folder, torch.bfloat16))
    (tokens,) = generate(decoder, PROMPTS[2:], 40)
    whole = torch.tensor([PROMPTS[2] + tokens], device="cuda")
    expected = decoder.logits(decoder.hidden_states(whole)[:, 0])[len(PROMPTS[2]) - 1 : -1].float()
    logits = [decoder.begin(PROMPTS[2:], 40).clone()]
    logits += [decoder.step(torch.tensor([token], device="cuda")).clone() for token in tokens[:-1]]
    apart = (torch.cat(logits).float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert apart.median() < 0.05  # a token that another expert takes is further away


def test_fp32_gives_the_tokens_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    theirs = theirs.cuda().eval()
    prompt = torch.tensor(PROMPTS[2:], device="cuda")
    options = dict(max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=1)
    expected = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, 30:].tolist()
    assert generate(Decoder(model(folder, torch.float32)), PROMPTS[2:], 64) == [expected]

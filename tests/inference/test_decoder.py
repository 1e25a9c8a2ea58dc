# SPDX-License-Identifier: Apache-2.0
"""Decoding with a state: against transformers' generate, and against whole sequences without a state."""

from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.inference.small import SMALL, open_decoder, open_theirs, publish_small
from zaya_plugin.inference import decoder as decoder_module
from zaya_plugin.inference.decoder import Decoder
from zaya_plugin.inference.sampling import generate

CLOSE = 1e-5  # of each step's logits, relative to their norm
NEW = 72


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(2, SMALL.vocab_size, (length,), generator=generator).tolist() for length in lengths]


def apart(logits, others) -> float:
    return ((logits - others).norm(dim=-1) / others.norm(dim=-1)).max().item()


def run_theirs(theirs, given):
    """New tokens [b, NEW] and the logits of each step [b, NEW, v] of transformers' greedy generate."""
    length = max(map(len, given))
    ids = torch.tensor([[1] * (length - len(prompt)) + prompt for prompt in given])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in given])
    options = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=1)
    out = theirs.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    return out.sequences[:, length:], torch.stack(out.logits, dim=1)


def run_ours(decoder, given, chosen):
    """The logits [b, NEW, v] when the tokens `chosen` [b, NEW] follow the prompts."""
    logits = [decoder.begin(given, NEW).clone()]
    logits += [decoder.step(chosen[:, place]).clone() for place in range(NEW - 1)]
    return torch.stack(logits, dim=1)


SLOW = pytest.mark.slow


def test_no_mode_watches_the_calls_of_a_step(decoder):
    class Counting(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.calls += 1
            return function(*args, **(kwargs or {}))

    given = prompts(3, 2)
    with Counting() as counting:
        logits = decoder.begin(given, 2)
        decoder.step(torch.tensor([3, 4]))
        assert counting.calls == 1  # torch.tensor above
        logits.sum()
        assert counting.calls == 2  # it watches again


@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    "lengths", [(9,), (7, 1, 23), pytest.param((1,), marks=SLOW), pytest.param((2, 3, 4), marks=SLOW)]
)
def test_equal_to_transformers_generate(decoder, theirs, lengths):
    given = prompts(*lengths)
    tokens, logits = run_theirs(theirs, given)
    assert all(len(row.unique()) > 3 for row in tokens), "the text repeats itself, so it shows little"
    assert generate(decoder, given, NEW) == tokens.tolist()
    mine = run_ours(decoder, given, tokens)
    assert apart(mine, logits) < CLOSE


@pytest.mark.parametrize("window", [1, pytest.param(9, marks=SLOW)])
def test_a_ring_of_the_window_gives_the_tokens_of_transformers(window, tmp_path):
    """Prompts shorter and longer than the window, and steps that go round the ring many times."""
    sliding = replace(SMALL, sliding_window=window, window_attn_skip_freq=2, swa_rotary_base=700)
    folder = publish_small(tmp_path / "model", model=sliding)
    mine, hf = open_decoder(folder), open_theirs(folder)
    given = prompts(3, 1, 23)
    tokens, logits = run_theirs(hf, given)
    assert all(len(row.unique()) > 3 for row in tokens), "the text repeats itself, so it shows little"
    assert generate(mine, given, NEW) == tokens.tolist()
    assert [state.keys.shape[2] for state in mine.states] == [window + 1, mine.room] * 2
    assert apart(run_ours(mine, given, tokens), logits) < CLOSE


@pytest.mark.parametrize("room", [16, pytest.param(256, marks=SLOW)])
def test_with_a_state_as_without(decoder, monkeypatch, room):
    """room 16: a step reads growing parts of the state."""
    monkeypatch.setattr(decoder_module, "ROOM", room)
    decoder = Decoder(decoder.model)
    given = prompts(5, 1, 13)
    tokens = torch.tensor(generate(decoder, given, NEW))
    stepped = run_ours(decoder, given, tokens)
    for row, (prompt, new) in enumerate(zip(given, tokens, strict=True)):
        whole = torch.tensor([[*prompt, *new.tolist()]])
        logits = decoder.logits(decoder.hidden_states(whole)[:, 0])
        assert apart(stepped[row], logits[len(prompt) - 1 : -1]) < CLOSE


def test_whole_sequences_are_those_of_the_model(decoder):
    tokens = torch.tensor(prompts(17))
    logits = decoder.model(tokens, torch.arange(17).unsqueeze(0), None)[0]
    assert torch.equal(decoder.logits(decoder.hidden_states(tokens)[:, 0]), logits)


def test_a_batch_leaves_nothing_to_the_next(decoder):
    given = prompts(4, 2)
    alone = generate(Decoder(decoder.model), given, 12)
    shared = Decoder(decoder.model)
    generate(shared, prompts(30, 31), 20)
    room = shared.states[0].keys.data_ptr()
    assert generate(shared, given, 12) == alone and shared.states[0].keys.data_ptr() == room
    routed = Decoder(decoder.model, routed=True)
    assert generate(routed, prompts(3), 12) == generate(shared, prompts(3), 12)
    assert len(routed.chosen) == 12 * SMALL.num_layers, "its hooks saw the tokens of another decoder"


def test_a_row_does_not_depend_on_the_others(decoder):
    (one, two), other = prompts(6, 11), prompts(40)[0]
    assert generate(decoder, [one, two], 24)[0] == generate(decoder, [one, other], 24)[0]


def test_more_steps_than_room(decoder):
    decoder = Decoder(decoder.model)
    decoder.begin(prompts(250), 6)
    for _ in range(6):
        decoder.step(torch.tensor([3]))
    with pytest.raises(AssertionError, match="room"):
        decoder.step(torch.tensor([3]))


def test_kernels_or_a_capture_that_fail_are_warnings(decoder, monkeypatch, caplog):
    """Triton has no GPU to compile for. A call may not be allowed in a graph, as on HIP; in this test none is."""
    captures = []

    def fails(call):
        captures.append(call)
        raise RuntimeError("operation not permitted when stream is capturing\nsecond line")

    monkeypatch.setattr(decoder_module, "capture", fails)
    expected = generate(Decoder(decoder.model), prompts(5, 9), 8)
    monkeypatch.setattr(decoder_module, "refusal", lambda *model_and_batch: None)
    captured = Decoder(decoder.model, graphs=True)
    assert generate(captured, prompts(5, 9), 8) == expected and generate(captured, prompts(5, 9), 8) == expected
    first, warning = caplog.messages
    assert first.startswith("decoding: the kernels of a step fail, so its layers are those of training: RuntimeError")
    assert len(captures) == 1 and warning.endswith("one by one: operation not permitted when stream is capturing")

    class CompilationError(Exception):
        """Triton's, by name."""

    def quotes_its_source(*arguments):
        raise CompilationError("at 22:14:\n    x = f(y)\n        ^\nAttributeError()\n")

    monkeypatch.setattr(decoder_module, "check_kernels", quotes_its_source)
    Decoder(decoder.model, graphs=True).begin(prompts(5), 8)
    assert caplog.messages[-1].endswith("of training: CompilationError: AttributeError()")

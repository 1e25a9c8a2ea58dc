# SPDX-License-Identifier: Apache-2.0
"""Sampling: masks against transformers' warpers, draws against their probabilities, the same draws for the same seed."""

import pytest
import torch

from zaya_plugin.inference.sampling import Sampling, choose, generate, kept


def scores(rows: int = 6, size: int = 50):
    """Random logits; of two rows some are equal."""
    found = torch.randn(rows, size, generator=torch.Generator().manual_seed(2)) * 2
    found[1, 10:20] = found[1].max()
    found[2] = 0.0
    return found


@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 1.7])
def test_masks_are_those_of_transformers(temperature, top_k, top_p):
    process = pytest.importorskip("transformers.generation.logits_process")
    given = scores()
    expected = process.TemperatureLogitsWarper(temperature)(None, given)
    if top_k:
        expected = process.TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = process.TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(kept(given, Sampling(temperature, top_k, top_p)).isinf(), expected.isinf())
    assert torch.allclose(kept(given, Sampling(temperature, top_k, top_p)), expected)


def test_draws_have_the_probabilities_of_what_is_kept():
    sampling, draws = Sampling(2.0, 12, 0.95), 40_000
    given = scores()[:1]
    probabilities = kept(given, sampling).softmax(-1)[0]
    chosen = choose(given.expand(draws, -1), sampling, torch.Generator().manual_seed(3))
    counts = torch.bincount(chosen, minlength=50)
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities > 0.005
    expected = draws * probabilities[likely]
    squares = ((counts[likely] - expected) ** 2 / expected).sum()
    assert 3 < likely.sum() < 13 and squares < 3 * likely.sum()  # chi-squared: about the number of classes


def test_greedy_takes_the_first_of_the_largest():
    assert choose(scores(), Sampling(), None).tolist()[1:3] == [10, 0]


def test_a_seed_repeats_and_another_does_not(decoder):
    prompts = [[5, 6, 7], [9]]
    one, again, other = (generate(decoder, prompts, 12, Sampling(1.0, 0, 0.95, seed)) for seed in (1, 1, 2))
    assert one == again and one != other
    assert generate(decoder, prompts, 12, Sampling(1.0, top_k=1)) == generate(decoder, prompts, 12)


def test_equal_to_transformers_sampling_token_by_token(decoder, theirs):
    """One generator of numbers gives both the same draws: three prompts of different lengths, 40 new tokens."""
    given, length = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17]], 7
    ids = torch.tensor([[1] * (length - len(prompt)) + prompt for prompt in given])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in given])
    options = dict(max_new_tokens=40, do_sample=True, temperature=0.8, top_k=50, top_p=0.95)
    torch.manual_seed(3)
    tokens = theirs.generate(ids, attention_mask=mask, eos_token_id=None, pad_token_id=1, **options)[:, length:]
    assert generate(decoder, given, 40, Sampling(0.8, 50, 0.95, seed=3)) == tokens.tolist()


def test_a_text_ends_with_its_end_token(decoder):
    (free,) = generate(decoder, [[5, 6, 7]], 40)
    stop = free[9]
    both = generate(decoder, [[5, 6, 7], [9, 8]], 40, stop=[stop])
    assert both[0] == free[: free.index(stop) + 1]
    assert len(both[1]) == 40 or both[1][-1] == stop


@pytest.mark.parametrize(
    ("values", "option"),
    [
        (dict(temperature=-1.0), "--temperature=-1.0: is out of range"),
        (dict(temperature=float("nan")), "--temperature=nan"),
        (dict(temperature=1e-300), "--temperature=1e-300: is out of range"),
        (dict(temperature=1.0, top_k=-1), "--top-k=-1"),
        (dict(temperature=1.0, top_p=0.0), "--top-p=0.0"),
        (dict(temperature=1.0, top_p=1.5), "--top-p=1.5"),
        (dict(top_k=5), "--temperature=0.0: takes the most probable token"),
    ],
)
def test_values_out_of_range(values, option):
    with pytest.raises(ValueError, match=option):
        Sampling(**values)

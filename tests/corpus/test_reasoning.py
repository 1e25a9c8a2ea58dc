# SPDX-License-Identifier: Apache-2.0
"""Answer-preserving trimming: each branch of the rule, and finding the blocks in two kinds of tokenizer."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

from zaya_plugin.corpus import reasoning
from zaya_plugin.corpus.reasoning import Block, BlockFinder, trim

BEGIN, END, EOD = 90, 91, 0


def sample(*turns):
    """Turns of (question, reasoning, answer) lengths; questions are 1s, reasoning 2, 3, ..., answers 50s. Returns ids
    and blocks.
    """
    ids, blocks = [], []
    for question, thought, answer in turns:
        ids += [1] * question
        blocks.append(Block(len(ids), len(ids) + 1, len(ids) + 1 + thought, len(ids) + 2 + thought))
        ids += [BEGIN, *range(2, 2 + thought), END, *[50] * answer]
    return np.array([*ids, EOD], np.int32), blocks


def test_fitting_sample_is_kept():
    ids, blocks = sample((3, 5, 2))
    assert trim(ids, blocks, len(ids))[1] == reasoning.KEPT and trim(ids, blocks, len(ids))[0] is ids


def test_tail_of_the_last_block_is_cut_right_before_the_answer():
    ids, blocks = sample((3, 5, 2))
    shortened, outcome = trim(ids, blocks, len(ids) - 4)
    assert outcome == reasoning.TAIL_CUT
    assert shortened.tolist() == [1, 1, 1, BEGIN, 2, END, 50, 50, EOD]
    assert trim(ids, blocks, len(ids) - 5) == (None, reasoning.TOO_LONG)  # one token of reasoning has to stay


def test_earlier_reasoning_goes_when_the_last_is_not_enough():
    ids, blocks = sample((2, 6, 1), (2, 3, 1))
    shortened, outcome = trim(ids, blocks, len(ids) - 3)
    assert outcome == reasoning.EARLIER_DROPPED
    assert shortened.tolist() == [1, 1, 50, 1, 1, BEGIN, 2, 3, 4, END, 50, EOD]
    shortened, outcome = trim(ids, blocks, len(ids) - 10)
    assert outcome == reasoning.EARLIER_DROPPED_TAIL_CUT
    assert shortened.tolist() == [1, 1, 50, 1, 1, BEGIN, 2, END, 50, EOD]
    assert trim(ids, blocks, len(ids) - 11) == (None, reasoning.TOO_LONG)


def test_samples_without_reasoning_or_answer():
    ids, blocks = sample((2, 6, 0))
    assert trim(ids, blocks, 5) == (None, reasoning.NO_ANSWER)
    assert trim(ids, [], 5) == (None, reasoning.NO_REASONING)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=4),
    st.integers(1, 40),
)
def test_questions_and_answers_survive(turns, limit):
    ids, blocks = sample(*turns)
    shortened, outcome = trim(ids, blocks, limit)
    if shortened is None:
        least = 1 + sum(question + answer for question, _, answer in turns) + 2 + min(1, turns[-1][1])
        assert outcome == reasoning.TOO_LONG and least > limit
        return
    assert len(shortened) == min(limit, len(ids)) or outcome == reasoning.EARLIER_DROPPED
    assert len(shortened) <= limit

    def outside(tokens):
        return [token for token in tokens if token in (1, 50, EOD)]

    assert outside(shortened.tolist()) == outside(ids.tolist())


TEXT = "Why?<think>first it is so\nthen so</think>Because.\nAnd?<think>hm</think>Thus."


@pytest.fixture(scope="module", params=["text", "special tokens"])
def finder(request, prepared):
    tokenizer = Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json"))
    if request.param == "special tokens":
        tokenizer.add_special_tokens([AddedToken("<think>"), AddedToken("</think>")])
    return BlockFinder(tokenizer, "<think>", "</think>")


def ids_of(finder, text):
    return np.array([*finder.tokenizer.encode(text, add_special_tokens=False).ids, EOD])


def parts_of(finder, text):
    ids = ids_of(finder, text)
    return [
        tuple(
            finder.tokenizer.decode(ids[a:b].tolist(), skip_special_tokens=False)
            for a, b in ((block.begin, block.inside), (block.inside, block.end), (block.end, block.after))
        )
        for block in finder.find(ids)
    ]


def test_blocks_are_recognised(finder):
    found = parts_of(finder, TEXT)
    assert len(found) == 2
    for (begin, inside, end), thought in zip(found, ("first it is so\nthen so", "hm"), strict=True):
        # A marker that is no token of its own takes what its first and last token hold apart from it.
        assert "<think>" in begin and "</think>" in end and begin + inside + end in TEXT and inside in thought
    assert len(finder.find(ids_of(finder, "no thought at all"))) == 0
    assert len(finder.find(ids_of(finder, "x</think>y"))) == 0


def test_block_that_is_not_closed_has_no_answer(finder):
    ids = ids_of(finder, TEXT + "<think>and then it ended")
    blocks = finder.find(ids)
    assert len(blocks) == 3 and blocks[-1].after == len(ids) - 1
    assert trim(ids, blocks, len(ids) - 1) == (None, reasoning.NO_ANSWER)


def test_blocks_behind_a_bos_are_recognised():
    """The decoder of Llama 2 takes the first space off a text, but not behind a bos."""
    tokenizer, thought = Tokenizer(models.BPE()), "the river <think>hm</think> runs"
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=24, special_tokens=["<eos>", "<bos>"], show_progress=False)
    tokenizer.train_from_iterator([thought], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    ids = np.array([*tokenizer.encode(thought).ids, EOD])
    (block,) = BlockFinder(tokenizer, "<think>", "</think>").find(ids)
    assert ids[0] == 1 and tokenizer.decode(ids[: block.inside].tolist()).endswith("river <think>")


def test_tokens_that_are_not_those_of_their_text_are_noticed(prepared):
    finder = BlockFinder(Tokenizer.from_file(str(prepared / "tokenizer" / "tokenizer.json")), "<think>", "</think>")
    merged = next(
        token for token in finder.tokenizer.get_vocab() if len(token) == 2 and token.isascii() and token.isalpha()
    )
    letters = [finder.tokenizer.token_to_id(letter) for letter in merged]
    assert finder.find(np.array([*letters, EOD])) is None
    assert finder.find(np.array([finder.tokenizer.token_to_id(merged), EOD])) == []

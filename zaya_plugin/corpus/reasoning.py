# SPDX-License-Identifier: Apache-2.0
"""Trim chains of thought that are too long: a sample loses reasoning, never its question or answer.

Rule (ZAYA1-8B technical report, arXiv 2605.05365, section III-A), applied to the original sample for each context
length: a sample that fits is kept; else the tail of the last reasoning block, right before the answer, is cut; else the
reasoning of earlier turns is dropped and both are tried again; else the sample is dropped. This project's choice, which
the report does not state: of a block that is cut at least one token of reasoning stays,
and a block is dropped with its two markers.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zaya_plugin.data.tokenizer import added_tokens

KEPT, TAIL_CUT, EARLIER_DROPPED, EARLIER_DROPPED_TAIL_CUT = (
    "kept",
    "tail cut",
    "earlier dropped",
    "earlier dropped, tail cut",
)
NO_REASONING, NO_ANSWER, TOO_LONG, UNALIGNED = "no reasoning", "no answer", "still too long", "markers unaligned"


@dataclass(frozen=True)
class Block:
    """Token positions of one reasoning block: markers are [begin, inside) and [end, after), reasoning is
    [inside, end).
    """

    begin: int
    inside: int
    end: int
    after: int


def trim(ids: np.ndarray, blocks: Sequence[Block], limit: int) -> tuple[np.ndarray | None, str]:
    """Shorten a sample to at most `limit` tokens.

    Args:
        ids: the sample, int [tokens], its end-of-document token included.
        blocks: its reasoning blocks in order, see `BlockFinder`.

    Returns:
        The sample, None if it must be dropped, and the outcome: one of the names above.
    """
    if len(ids) <= limit:
        return ids, KEPT
    if not blocks:
        return None, NO_REASONING
    last = blocks[-1]
    if last.after >= len(ids) - 1:  # nothing between the block and the end of the document
        return None, NO_ANSWER
    excess, spare = len(ids) - limit, max(0, last.end - last.inside - 1)
    if excess <= spare:
        return np.concatenate((ids[: last.end - excess], ids[last.end :])), TAIL_CUT
    keep = np.ones(len(ids), bool)
    for block in blocks[:-1]:
        keep[block.begin : block.after] = False
    excess = int(keep.sum()) - limit
    if excess > spare:
        return None, TOO_LONG
    if excess > 0:
        keep[last.end - excess : last.end] = False
    return ids[keep], EARLIER_DROPPED if excess <= 0 else EARLIER_DROPPED_TAIL_CUT


class BlockFinder:
    """Finds reasoning blocks between two markers in tokenised text.

    Markers that are added tokens of the tokenizer are recognised by their ids. Others may be spelled with different
    tokens, merged with the text around them: then the document is decoded and encoded again, and the markers are
    searched in the text.
    """

    def __init__(self, tokenizer, begin: str, end: str):
        self.tokenizer, self.begin, self.end = tokenizer, begin, end
        self.ids = tokenizer.token_to_id(begin), tokenizer.token_to_id(end)
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        self.by_id = {begin, end} <= added
        self.before = added_tokens(tokenizer)[0]

    def find(self, ids: np.ndarray) -> list[Block] | None:
        """Return the blocks of a document; None if the tokens of its text are not `ids`.

        A block that is not closed ends where the document does, and so has no answer behind it. A begin marker inside a
        block, or one that is never closed and not the last, opens no block.

        Args:
            ids: int [tokens], the end-of-document token included.
        """
        places = self._places(ids)
        if places is None:
            return None
        (begins, ends), blocks, last = places, [], len(ids) - 1
        for at, end, after in ends:
            opened = [begin for begin in begins if begin[0] < at]
            begins = begins[len(opened) :]
            if opened:
                blocks.append(Block(opened[0][1], min(opened[0][2], end), end, after))
        if begins:
            blocks.append(Block(begins[-1][1], min(begins[-1][2], last), last, last))
        return blocks

    def _places(self, ids: np.ndarray) -> list[list[tuple[int, int, int]]] | None:
        """Return the places of both markers: position, first token, and the token behind the last."""
        if self.by_id:
            return [[(at, at, at + 1) for at in np.flatnonzero(ids == marker).tolist()] for marker in self.ids]
        skipped = len(self.before) if ids[: len(self.before)].tolist() == self.before else 0
        inner = ids[skipped:-1].tolist()
        text = self.tokenizer.decode(inner, skip_special_tokens=False)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if encoding.ids != inner:
            return None
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)

        def tokens(match: re.Match) -> tuple[int, int, int]:
            # A token that holds part of a marker belongs to it whole.
            first, behind = (
                np.searchsorted(offsets[:, 1], match.start(), "right"),
                np.searchsorted(offsets[:, 0], match.end()),
            )
            return match.start(), skipped + int(first), skipped + int(behind)

        return [list(map(tokens, re.finditer(re.escape(marker), text))) for marker in (self.begin, self.end)]

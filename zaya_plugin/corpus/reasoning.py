# SPDX-License-Identifier: Apache-2.0
"""Answer-preserving trimming: a chain of thought that is too long loses reasoning, never its question or answer.

Rule (ZAYA1-8B technical report, arXiv 2605.05365, section III-A), done anew for each context length: a sample that fits is
kept; else the tail of the last reasoning block, right before the answer, is cut; else the reasoning of earlier turns is
dropped and both are tried again; else the sample is dropped. Unpublished, this project's choice: of a block that is cut
at least one token of reasoning stays, and a dropped block goes with its two markers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

KEPT, TAIL_CUT, EARLIER_DROPPED, EARLIER_DROPPED_TAIL_CUT = (
    "kept",
    "tail cut",
    "earlier dropped",
    "earlier dropped, tail cut",
)
NO_REASONING, NO_ANSWER, TOO_LONG, UNALIGNED = "no reasoning", "no answer", "still too long", "markers unaligned"


@dataclass(frozen=True)
class Block:
    """Token positions of one reasoning block: markers are [begin, inside) and [end, after), reasoning is [inside, end)."""

    begin: int
    inside: int
    end: int
    after: int


def trim(ids: np.ndarray, blocks: Sequence[Block], limit: int) -> tuple[np.ndarray | None, str]:
    """Shortens a sample to at most `limit` tokens.

    Args:
        ids: the sample, int [tokens], its end-of-document token included.
        blocks: its reasoning blocks in order, see `BlockFinder`.

    Returns:
        The sample, None if it must be dropped, and which of the outcomes above it was.
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

    A marker that is one token of the vocabulary is looked for by its id. Any other may be spelled with different tokens,
    merged with what stands around it: then the document is decoded, encoded again, and markers are found in the text.
    """

    def __init__(self, tokenizer, begin: str, end: str):
        self.tokenizer, self.begin, self.end = tokenizer, begin, end
        self.ids = tokenizer.token_to_id(begin), tokenizer.token_to_id(end)
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        self.by_id = {begin, end} <= added

    def find(self, ids: np.ndarray) -> list[Block] | None:
        """Blocks of a document, int [tokens] with its end-of-document token; None if its text has other tokens.

        A block that is not closed ends where the document does, and so has no answer behind it.
        """
        if self.by_id:
            begins, ends = (np.flatnonzero(ids == marker).tolist() for marker in self.ids)
            closed = [Block(a, a + 1, b, b + 1) for a, b in _pairs(begins, ends)]
            left_open = begins[-1:] if begins and begins[-1] > max(ends, default=-1) else []
            return closed + [Block(a, a + 1, len(ids) - 1, len(ids) - 1) for a in left_open]
        text = self.tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False)
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if encoding.ids != ids[:-1].tolist():
            return None
        begins, ends = _occurrences(text, self.begin), _occurrences(text, self.end)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        first, past = offsets[:, 0], offsets[:, 1]
        blocks = []
        for a, b in _pairs(begins, ends):
            # A token that holds part of a marker belongs to it whole.
            inside = int(np.searchsorted(first, a + len(self.begin)))
            end = int(np.searchsorted(past, b, "right"))
            after = int(np.searchsorted(first, b + len(self.end)))
            blocks.append(Block(int(np.searchsorted(past, a, "right")), min(inside, end), end, after))
        if begins and begins[-1] > max(ends, default=-1):
            blocks.append(
                Block(int(np.searchsorted(past, begins[-1], "right")), len(ids) - 1, len(ids) - 1, len(ids) - 1)
            )
        return blocks


def _occurrences(text: str, marker: str) -> list[int]:
    found, at = [], text.find(marker)
    while at >= 0:
        found.append(at)
        at = text.find(marker, at + len(marker))
    return found


def _pairs(begins: list[int], ends: list[int]) -> list[tuple[int, int]]:
    """Each end with the first begin since the end before it. A begin inside a block, or that is never closed, opens nothing."""
    pairs, at = [], 0
    for end in ends:
        inside = [begin for begin in begins[at:] if begin < end]
        if inside:
            pairs.append((inside[0], end))
            at += len(inside)
    return pairs

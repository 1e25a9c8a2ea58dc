# SPDX-License-Identifier: Apache-2.0
"""Encode text with the ids of the tokenizer, several times faster, by looking up chunks that were encoded before.

Text is cut at word ends, where no token can reach across. Most chunks were seen before and their ids are looked up;
only new chunks go through the tokenizer. A larger cache inside tokenizers (`BPE._resize_cache`) does not help: the time
goes into its pre-tokenisation. Where a cut is safe depends on the tokenizer's parts, which are read from its own
description; with a tokenizer that is not recognised nothing is cut. tests/corpus compare every kind with the tokenizer
on random text.
"""

import json
import re
from dataclasses import dataclass

import numpy as np

# White space in the regular expressions of the tokenizers (Unicode White_Space); Python's \s has four more characters.
SPACE, OTHER = r"[^\S\x1c-\x1f]", r"[\S\x1c-\x1f]"
LETTER, DIGIT, MARK = "[A-Za-z]", "[0-9]", r"[\x00-\x08\x0e-\x1f!-/:-@\[-`{-\x7f]"
BEYOND = "\x80-\U0010ffff"


def _run(kind: str) -> str:
    """Return the pattern of a whole run of one kind of ASCII characters, unless characters beyond ASCII follow, whose
    kind Python may not know.
    """
    return f"{kind}+(?!{kind[:-1]}{BEYOND}])"


# The words of GPT-2. Text that is not all ASCII stays in one piece up to the next white space.
GPT2_WORDS = re.compile(
    f" ?{_run(LETTER)}|'(?:[stmd]|re|ve|ll)| ?{_run(DIGIT)}| ?{_run(MARK)}| ?{OTHER}+|{SPACE}+(?!{OTHER})|{SPACE}+"
)
# The same for Llama 3 and Qwen 2, where a mark belongs to the letters behind it, and line ends to the marks before
# them.
GPT4_WORDS = re.compile(
    rf"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])|(?:[\t\x0b\x0c ]|{MARK})?{_run(LETTER)}|{_run(DIGIT)}| "
    rf"?{_run(MARK)}[\r\n]*"
    rf"|(?:(?![\r\n]){SPACE})?{OTHER}+(?:(?<![A-Za-z0-9])(?! ){SPACE}{SPACE}*{OTHER}*)*"
    rf"|{SPACE}*[\r\n]+|{SPACE}+(?!{OTHER})|{SPACE}+"
)
# Coarser, for texts in which an added token may occur: before any white space that follows something else, and
AT_WHITE_SPACE = re.compile(rf"{SPACE}*{OTHER}+|{SPACE}+")
# before a space, and before other white space only behind a letter or digit.
AT_SPACE = re.compile(rf"{SPACE}*{OTHER}+(?:(?<![A-Za-z0-9])(?! ){SPACE}{SPACE}*{OTHER}*)*|{SPACE}+")
# Before a space: no token of the vocabulary crosses one. Spaces become U+2581.
AT_METASPACE = re.compile("[ \u2581]*[^ \u2581]+|[ \u2581]+")

GPT4_LIKE = (
    # Llama 3 and Qwen 2, as their tokenizer.json spell them.
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

MOST_MARKS = 8  # searched for in every text
LONGEST_REMEMBERED = 48  # characters; longer chunks are seldom repeated
MOST_REMEMBERED = 400_000  # chunks, 48 MB; then all are forgotten


class ChunkEncoder:
    """Encodes texts to token ids as bytes.

    Args:
        tokenizer: a `tokenizers.Tokenizer` without truncation and padding.
        dtype: of the ids.
    """

    def __init__(self, tokenizer, dtype: np.dtype):
        self.tokenizer, self.dtype = tokenizer, dtype
        self.cut = Cut.of(json.loads(tokenizer.to_str()))
        self.remembered: dict[str, bytes] = {}

    def encode(self, texts: list[str]) -> list[bytes]:
        """Return the ids of each text, without special tokens that the tokenizer would add."""
        if self.cut is None:
            return self._tokenizer_alone(texts)
        chunked = list(map(self.cut.chunks, texts))
        remembered = self.remembered
        new = list(set().union(*chunked).difference(remembered))
        remembered.update(zip(new, self._tokenizer_alone(new), strict=True))
        documents = [b"".join(map(remembered.__getitem__, chunks)) for chunks in chunked]
        for chunk in new:
            if len(chunk) > LONGEST_REMEMBERED:
                del remembered[chunk]
        if len(remembered) > MOST_REMEMBERED:
            remembered.clear()
        return documents

    def _tokenizer_alone(self, texts: list[str]) -> list[bytes]:
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self.dtype).tobytes() for encoding in encodings]


@dataclass(frozen=True)
class Cut:
    """How texts are cut: into words, or only at spaces if one of `marks`, the beginnings of added tokens, occurs."""

    words: re.Pattern
    spaces: re.Pattern
    marks: tuple[str, ...]

    def chunks(self, text: str) -> list[str]:
        """Return pieces that make up the text and can be encoded one by one."""
        return (self.spaces if any(mark in text for mark in self.marks) else self.words).findall(text)

    @staticmethod
    def of(description: dict) -> "Cut | None":
        """Return the cut for the content of tokenizer.json; None where no cut is known to be safe."""
        model, normalizer, pre = description["model"], description["normalizer"], description["pre_tokenizer"]
        if model["type"] != "BPE" or any(
            model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
        ):
            return None
        space = r"\s"
        if _is_byte_level(pre, use_regex=True) and normalizer is None:
            words, spaces = GPT2_WORDS, AT_WHITE_SPACE
        elif _is_gpt4_like(pre) and (normalizer is None or normalizer["type"] == "NFC"):
            words, spaces = GPT4_WORDS, AT_SPACE
        elif _is_metaspace(normalizer, pre) and (model.get("byte_fallback") or not model.get("fuse_unk")):
            if any(re.search("[^\u2581]\u2581", token) for token in model["vocab"]):
                return None
            words, spaces, space = AT_METASPACE, AT_METASPACE, "[ \u2581]"
        else:
            return None
        across = re.compile(f"(?!{space}).{space}", re.DOTALL)
        added = description["added_tokens"]
        if any(
            token["single_word"] or token["lstrip"] or token["rstrip"] or across.search(token["content"])
            for token in added
        ):
            return None
        marks = tuple(sorted({token["content"][:2] for token in added}))
        return Cut(words if len(marks) <= MOST_MARKS else spaces, spaces, marks if words is not spaces else ())


def _is_byte_level(pre: dict | None, use_regex: bool) -> bool:
    return (
        pre is not None
        and pre["type"] == "ByteLevel"
        and not pre["add_prefix_space"]
        and pre.get("use_regex", True) == use_regex
    )


def _is_gpt4_like(pre: dict | None) -> bool:
    if pre is None or pre["type"] != "Sequence" or len(pre["pretokenizers"]) != 2:
        return False
    split, level = pre["pretokenizers"]
    return (
        split["type"] == "Split"
        and split["pattern"].get("Regex") in GPT4_LIKE
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and _is_byte_level(level, use_regex=False)
    )


def _is_metaspace(normalizer: dict | None, pre: dict | None) -> bool:
    """Return whether spaces become U+2581 and the text stays in one piece, as Gemma's: its pre-tokenizer finds no
    spaces.
    """
    replaces = normalizer is not None and normalizer["type"] == "Replace"
    if not replaces or normalizer["pattern"] != {"String": " "} or normalizer["content"] != "\u2581":
        return False
    return pre is None or (pre["type"] == "Split" and pre["pattern"] == {"String": " "} and not pre["invert"])

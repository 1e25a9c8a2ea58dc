# SPDX-License-Identifier: Apache-2.0
"""Types for argparse: numbers with a range, the options' counterpart of the limits in the schema.

Each option of a command with a number has one of these types, so that no number reaches a loop, an allocation or a
sleep unchecked (`tests/commands/test_option_ranges.py`).
"""

import argparse
import contextlib
import re
from collections.abc import Callable

# Upper ends, each with a margin: folders of checkpoints have seven digits; positions are counted in fp32; numpy's seeds
# have 32 bits; ids of tokens and the elements of a message are counted in 32 bits.
MOST_STEPS = 9_999_999
MOST_TOKENS = 2**24
MOST_SEED = 2**32 - 1
INT32 = 2**31 - 1
MOST_AMOUNT = 10**12  # of documents, samples, characters: compared with the input
MOST_RANKS = 2**20
MOST_RANKS_OF_A_MACHINE = 1024
DAY, YEAR = 86_400.0, 31_536_000.0  # seconds


def number(kind: Callable, allowed: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a type for argparse: `kind` of the text, refused unless `holds`; `allowed` completes "is not ..."."""

    def parse(text: str):
        with contextlib.suppress(ValueError, OverflowError):
            value = kind(text)
            if holds(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")

    return parse


def whole(text: str) -> int:
    """Return a whole number of decimal digits; raises ValueError for other text."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):  # int() takes 1_0 and the digits of other scripts
        raise ValueError(text)
    return int(text)


def real(text: str) -> float:
    """Return a number of decimal digits, with an exponent or without; raises ValueError for other text."""
    if not re.fullmatch(r"[+-]?[0-9.]+([eE][+-]?[0-9]+)?", text):
        raise ValueError(text)
    return float(text)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """Return a type for argparse: a whole number from `least` to `most`."""
    return number(whole, f"a whole number from {least} to {most}", lambda value: least <= value <= most)


def real_number(least: float, most: float) -> Callable[[str], float]:
    """Return a type for argparse: a number from `least` to `most`."""
    return number(real, f"a number from {least:g} to {most:g}", lambda value: least <= value <= most)


def _bytes(text: str, thousand: int = 1000) -> int:
    """Return a number of bytes, with or without K, M, G or T, of which K is `thousand`; raises ValueError otherwise."""
    power = {"K": 1, "M": 2, "G": 3, "T": 4}.get(text[-1:].upper())
    return int(real(text[:-1]) * thousand**power) if power else whole(text)


def size_up_to(most: int) -> Callable[[str], int]:
    """Return a type for argparse: a size whose amount is held in memory."""
    return number(_bytes, f"a size from 1 to {most // 10**6}M bytes", lambda value: 0 < value <= most)


# Type for argparse: bytes of a message, with the powers of 1024 that rccl-tests and Primus mean by K, M and G.
message_size = number(
    lambda text: _bytes(text, 1024),
    "a size from 1K to 64G, such as 64K or 8G (powers of 1024)",
    lambda value: 2**10 <= value <= 2**36,
)
# Types for argparse: bytes from 4000000, 4M or 1.5G (powers of ten); a share.
size = number(_bytes, "a size: a number of bytes, or one with K, M, G or T, such as 4M", lambda value: value > 0)
fraction = number(real, "a fraction from 0 (no split) to below 1", lambda value: 0 <= value < 1)

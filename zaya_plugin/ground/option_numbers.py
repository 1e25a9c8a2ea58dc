# SPDX-License-Identifier: Apache-2.0
"""Types for argparse: numbers with a range, the options' counterpart of the limits in the schema.

Each option of a command with a number has one of these types, so that no number reaches a loop, an allocation or a
sleep unchecked (`tests/cli/test_option_ranges.py`).
"""

import argparse
import re
from collections.abc import Callable

# Upper ends, each with a margin: folders of checkpoints have seven digits; positions are counted in fp32; numpy's seeds
# have 32 bits; ids of tokens and the elements of a message are counted in 32 bits.
MOST_STEPS = 9_999_999
MOST_TOKENS = 2**24
MOST_SEED = 2**32 - 1
INT32 = 2**31 - 1
MOST_AMOUNT = 10**12  # of documents, samples, characters: compared with what there is
MOST_RANKS = 2**20
MOST_RANKS_OF_A_MACHINE = 1024
DAY, YEAR = 86_400.0, 31_536_000.0  # seconds


def number(kind: Callable, allowed: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a type for argparse: `kind` of the text, refused unless `holds`; `allowed` completes "is not ..."."""

    def parse(text: str):
        try:
            value = kind(text)
            if holds(value):
                return value
        except (ValueError, OverflowError):
            pass
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

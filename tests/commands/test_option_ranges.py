# SPDX-License-Identifier: Apache-2.0
"""Every number on the command line of every command is held to a range before anything is read, built or waited for."""

import argparse
import time

import pytest

from zaya_plugin.commands.table import COMMANDS, parser_of

WRONG = ["", " ", "x", "-1", "nan", "inf", "-inf", "1e400", "1" * 5000, "0x10", "1.5.2", "∞", "٣", "1_0", "-5G", "nanT"]
HUGE = ["1000000000000000000000", "1e30", "1000000000001"]
# Compared with what there is: bytes to read.
BY_CONTENT = ("max_bytes", "train_bpe_bytes")


def numbers(parser):
    """Yield the options that take a number."""
    for action in parser._actions:
        if action.option_strings and action.type is not None:
            try:
                value = action.type("3")
            except (argparse.ArgumentTypeError, ValueError):
                value = 0
            if isinstance(value, (int, float)):
                yield action


@pytest.mark.parametrize("command", [name for name, (row, _) in COMMANDS.items() if row])
def test_every_number_has_a_range(command):
    for action in numbers(parser_of(command)):
        name = f"zaya {command} {action.option_strings[0]}"
        assert action.type not in (int, float), f"{name}: takes every number"
        for text in WRONG:
            begin = time.monotonic()
            with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
                action.type(text)
            assert time.monotonic() - begin < 60, name
        if action.dest not in BY_CONTENT:
            for text in HUGE:
                with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
                    action.type(text)

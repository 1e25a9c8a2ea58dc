# SPDX-License-Identifier: Apache-2.0
"""Every number on the command line of every command is held to a range before anything is read, built or waited for."""

import argparse
import importlib
import time

import pytest

from zaya_plugin import cli

WRONG = ["", " ", "x", "-1", "nan", "inf", "-inf", "1e400", "1" * 5000, "0x10", "1.5.2", "∞", "٣", "1_0", "-5G", "nanT"]
HUGE = ["1000000000000000000000", "1e30", "1000000000001"]
# Compared with what there is: bytes to read.
BY_CONTENT = ("max_bytes", "train_bpe_bytes")
MODULES = {  # of the commands that cli.py prepares torch for, which takes seconds
    "convert": "zaya_plugin.run.convert_commands",
    "generate": "zaya_plugin.inference.generate_command",
    "eval": "zaya_plugin.inference.eval_command",
}
BELOW = {
    "convert": ("import", "export", "roundtrip"),
    "checkpoint": ("list", "show", "verify", "warm", "prune", "adopt", "reshape"),
}
WITHOUT_PARSER = ("train", "slurm", "doctor", "curriculum", "export")  # no option of theirs is a number


class _Found(Exception):
    pass


def commands():
    """Yield the words before the options of every command that zaya's tables list."""
    for name in cli.COMMANDS:
        below = {"data": cli.DATA_COMMANDS, "aegis": cli.AEGIS_COMMANDS, "bench": ("step", "expect")}.get(name)
        below = BELOW.get(name, below)
        yield from ((name, each) for each in below) if below else [(name,)]


def parser_of(words):
    """Return the parser that a command builds, or None for one that has none."""
    found = []

    def record(self, *unused, **more):
        found.append(self)
        raise _Found

    with pytest.MonkeyPatch.context() as patch:
        for name in ("parse_args", "parse_known_args", "parse_intermixed_args"):
            patch.setattr(argparse.ArgumentParser, name, record)
        if words[0] in ("data", "aegis"):
            module, function = f"zaya_plugin.{ {'data': 'corpus'}.get(words[0], words[0]) }.{words[1]}", "main"
            rest = ["x=1"]
        else:
            module, _, function = (MODULES.get(words[0]) or cli.COMMANDS[words[0]][0]).partition(":")
            rest = [*words[1:], "x=1"]
        with pytest.raises(_Found):
            getattr(importlib.import_module(module), function or "main")(rest)
    (made,) = found
    for action in made._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices[words[1]]
    return made


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


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands()])
def test_every_number_has_a_range(words):
    if words[0] in WITHOUT_PARSER:
        return
    for action in numbers(parser_of(words)):
        name = f"zaya {' '.join(words)} {action.option_strings[0]}"
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

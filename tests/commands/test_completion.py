# SPDX-License-Identifier: Apache-2.0
"""`zaya --completion bash` completes commands, options and the words of a recipe; bash itself runs the script."""

import subprocess

import pytest

from zaya_plugin import cli

ASK = """
COMP_WORDS=({words}) COMP_CWORD={place}
_shtab_zaya
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def test_commands_options_groups_and_their_values(capsys):
    pytest.importorskip("shtab")
    assert cli.main(["--completion", "bash"]) == 0
    script = capsys.readouterr().out
    for words, found in (
        ("zaya che", {"checkpoint"}),
        ("zaya data pre", {"prepare"}),
        ("zaya data pack --seq", {"--sequence-length"}),
        ("zaya generate x --device c", {"cpu", "cuda"}),
        ("zaya train experiment = cpu_demo_stage", {"cpu_demo_stage1", "cpu_demo_stage2", "cpu_demo_stage3"}),
        ("zaya curriculum optim.lr_warmup_it", {"optim.lr_warmup_iters="}),
    ):
        ask = ASK.format(words=words.replace("=", "'='"), place=len(words.split()) - 1)
        done = subprocess.run(["bash"], input=script + ask, capture_output=True, text=True)
        assert {*done.stdout.split()} == found, (words, done)


def test_another_shell_and_a_missing_package_are_one_line(capsys, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "shtab", None)
    assert cli.main(["--completion"]) == 2
    assert "requires the package shtab, which is not installed" in capsys.readouterr().err

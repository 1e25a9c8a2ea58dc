# SPDX-License-Identifier: Apache-2.0
"""The check of Megatron's validation and optim.overrides before a start, in a process without a device."""

import subprocess

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.run import megatron_check
from zaya_plugin.run.rank_plan import make_plan

WRONG = (
    ("optim.overrides=['*.nothing.* optimizer=adamw']", "optim.overrides: no parameter matches"),
    ("megatron_unchecked.no_such_thing=1", "megatron_unchecked.no_such_thing=1: Megatron has no such argument"),
)


def check(*overrides):
    recipe = compose(["experiment=cpu_demo", *overrides])
    megatron_check.check(recipe, make_plan(recipe, {}))


@pytest.mark.slow
def test_one_process_answers_for_all_recipes_and_what_it_accepts_is_kept(monkeypatch, tmp_path):
    started = []

    class Counted(subprocess.Popen):
        def __init__(self, *words, **named):
            started.append(words)
            super().__init__(*words, **named)

    monkeypatch.setattr(subprocess, "Popen", Counted)
    monkeypatch.delenv("ZAYA_CHECK")
    monkeypatch.setenv("ZAYA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tokenizer.txt").touch()
    files = (
        (f"data.tokenizer={tmp_path}", f"data.tokenizer={tmp_path}: cannot be opened"),
        (f"handover.from_hf={tmp_path}", f"handover.from_hf={tmp_path}: holds no"),
    )
    for override, problem in (*WRONG, *files):
        with pytest.raises(ValueError, match=f"^{problem.replace('.', '[.]')}"):
            check(override)
    for ranks in (2, 4, 2):
        check(f"nproc={ranks}")
    megatron_check.close()
    assert len(started) == 1 and len(list((tmp_path / "cache").iterdir())) == 2
    check("nproc=2", "name=again", "run_dir=elsewhere")
    assert len(started) == 1, "a restart does not pay again"

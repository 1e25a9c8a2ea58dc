# SPDX-License-Identifier: Apache-2.0
"""`--config-dir` in all its forms, with folders whose names mean something to Hydra."""

import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.config.config_dir import with_search_path


@pytest.mark.parametrize(
    "form, name",
    [
        (["--config-dir", "{}"], "mine"),
        (["--config-dir={}"], "my=dir"),
        (["-cd", "{}"], "it's [1], a"),
        (["-cd={}"], "my=dir"),
    ],
)
def test_all_forms_find_the_recipes(tmp_path, monkeypatch, form, name):
    folder = tmp_path / name / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - cpu_demo\n  - _self_\nname: own\n")
    for place in (str(tmp_path / name), name):
        monkeypatch.chdir(tmp_path)
        words = with_search_path(["nproc=1", *(word.format(place) for word in form), "experiment=mine", "--cfg"])
        assert (words[0], *words[2:]) == ("nproc=1", "experiment=mine", "--cfg")
        assert compose(words[:-1]).name == "own"


@pytest.mark.parametrize("words", [["--config-dir"], ["--config-dir="], ["-cd", "nowhere"]])
def test_an_absent_folder_is_named(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    folder = "nowhere" if words[1:] else ""
    with pytest.raises(ValueError, match=rf"^--config-dir={folder}: no such directory\. Allowed: a folder .*Fix: --co"):
        with_search_path(words)

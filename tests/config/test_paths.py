# SPDX-License-Identifier: Apache-2.0
"""`~` in paths of users: recipes' keys, lists of datasets, files of recipes, and the words of commands."""

import pytest

from zaya_plugin import cli
from zaya_plugin.config.compose import compose, load_recipe, save_recipe
from zaya_plugin.config.paths import PATHS, expanded_words
from zaya_plugin.config.schema import get


@pytest.fixture(autouse=True)
def home(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")


@pytest.mark.parametrize("value", ["~/a b", "'~/a b'"])
def test_every_path_of_a_recipe_expands(tmp_path, value):
    recipe = compose(["experiment=cpu_demo", *(f"{key}={value}" for key in PATHS if key != "handover.from_hf")])
    assert {get(recipe, key) for key in PATHS} == {"/home/me/a b", None}
    save_recipe(recipe, tmp_path / "recipe.yaml")
    (tmp_path / "recipe.yaml").write_text((tmp_path / "recipe.yaml").read_text().replace("/home/me", "~"))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_the_datasets_of_a_blend_expand():
    recipe = compose(
        ["experiment=cpu_demo", "data.blend=['0.5 ~/web','0.5 data/code']", "data.valid_blend=['1 ~/web']"]
    )
    assert recipe.data.blend == ["0.5 /home/me/web", "0.5 data/code"] and recipe.data.valid_blend == ["1 /home/me/web"]


def test_words_of_commands_expand():
    words = ["prepare", "--output=~/o", "~/in", "--prompt", "~/x", "--prompt=~/x", "~optim.lr", "a~/b", "run_dir=~/r"]
    expanded = ["prepare", "--output=/home/me/o", "/home/me/in", *words[3:]]
    assert expanded_words([*words, "--", "srun", "~/x"]) == [*expanded, "--", "srun", "~/x"]


@pytest.mark.parametrize(
    "words", ["data check --data=~nobody_here/x", "train experiment=cpu_demo run_dir=~nobody_here/x"]
)
def test_a_user_without_a_home_is_refused(capsys, words):
    assert cli.main(words.split()) == 2
    assert "=~nobody_here/x: no such user, so `~` cannot be expanded. Allowed: ~/... " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("data check ~/none", "/home/me/none: there is no dataset at this path"),
        ("checkpoint list ~/none", "RUN=/home/me/none: no such checkpoint"),
        ("aegis status ~/none", "RUN_DIR=/home/me/none: does not exist"),
        ("train experiment=cpu_demo --config-dir=~/none", "/home/me/none"),
        ("export slurm --config-dir=~/none experiment=cpu_demo", "--config-dir=/home/me/none: no such directory"),
        ("data prepare --input stdlib --output=~/none/x --train-bpe 300 --max-bytes 1k", "--output=/home/me/none"),
    ],
)
def test_commands_name_the_expanded_path(capsys, monkeypatch, words, told):
    if "prepare" in words:
        monkeypatch.setenv("HOME", "/proc/none")
        told = told.replace("/home/me/none", "/proc/none/none: cannot be written")
    assert cli.main(words.split()) == 2
    assert told in capsys.readouterr().err

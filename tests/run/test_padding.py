# SPDX-License-Identifier: Apache-2.0
"""A run keeps the rows of its embedding when the default of model.make_vocab_size_divisible_by changes."""

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.data.sources import padded
from zaya_plugin.run.start_recipe import with_padding

WORDS = ["experiment=zaya1_base", "data.path=data/corpus"]


def test_the_released_tables_rows():
    divisor = compose([*WORDS, "run_dir=/nowhere"]).model.make_vocab_size_divisible_by
    assert divisor == 128
    assert {padded(entries, divisor) for entries in (262_145, 262_147, 262_208, 262_272)} == {262_272}
    assert padded(262_147, 64) == 262_208


def test_runs_padded_to_64_resume_and_hand_over_as_they_are(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    save_recipe(compose([*WORDS, f"run_dir={old}", "model.make_vocab_size_divisible_by=64"]), old / "recipe.yaml")
    again = compose([*WORDS, f"run_dir={old}", "resume=auto"])
    assert with_padding(again).model.make_vocab_size_divisible_by == 128  # it has not saved: it begins from the start
    pretend_checkpoint(old, 500)
    assert with_padding(again).model.make_vocab_size_divisible_by == 64
    following = compose([*WORDS, f"run_dir={new}", f"handover.from_run={old}"])
    assert with_padding(following).model.make_vocab_size_divisible_by == 64
    text = (old / "recipe.yaml").read_text()
    (old / "recipe.yaml").write_text(text + "\nof_an_earlier_version: 1\n")
    assert with_padding(again).model.make_vocab_size_divisible_by == 64

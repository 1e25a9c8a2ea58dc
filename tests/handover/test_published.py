# SPDX-License-Identifier: Apache-2.0
"""`handover.from_hf` gives the recipe's model: what it fills, what it refuses, and when it leaves the recipe alone."""

from dataclasses import replace

import pytest

from tests.checkpoint.convert.published import TINY, publish
from tests.prepared_corpus import corpus, prepared, run, texts  # noqa: F401  (fixtures)
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.handover.published import compose_published, with_published

MODEL = replace(TINY, num_layers=3, norm_epsilon=1e-6, max_position_embeddings=512)


@pytest.mark.parametrize("layout", ["native", "legacy"])
def test_sizes_and_base_come_from_the_weights(tmp_path, capsys, layout):
    words = [
        "experiment=finetune_chat",
        "data.path=nowhere",
        f"handover.from_hf={publish(tmp_path / 'm', layout, MODEL)}",
    ]
    recipe = compose_published([*words, "stage.rotary_base=1000000", "model.num_layers=3"])
    described = Description.of_recipe(recipe, MODEL.vocab_size)
    assert described.differing(MODEL) == [] and recipe.stage.rotary_base == MODEL.rotary_base == 1_000_000
    assert recipe.stage.seq_length == 4096, "that of the stage stays"
    printed = capsys.readouterr().err
    assert " model.hidden_size=16 " in printed and "num_layers" not in printed, "what the recipe has is not printed"
    for word, message in (
        (
            "model.num_experts=16",
            "model.num_experts=16: handover.from_hf=.* has 12. Allowed: 12. Fix: leave out model.num",
        ),
        ("stage.rotary_base=5e6", "stage.rotary_base=5000000: handover.from_hf=.* has 1000000. "),
        ("model=zaya_tiny", "model.num_layers=4: .* has 3. Allowed: 3. Fix: leave out model=,"),
    ):
        with pytest.raises(ValueError, match=message):
            compose_published([*words, word])


def test_what_cannot_be_read_and_a_run_that_has_begun_keep_the_recipe(tmp_path):
    folder = publish(tmp_path / "m", model=MODEL)
    words = ["experiment=finetune_chat", "data.path=nowhere", f"run_dir={tmp_path / 'run'}"]
    for source in ("nowhere/at-all", tmp_path):
        named = [*words, f"handover.from_hf={source}"]
        assert compose_published(named) == compose(named)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no header")
    assert compose_published([*words, f"handover.from_hf={tmp_path / 'broken'}"]).model.num_layers == 40
    begun = compose_published([*words, f"handover.from_hf={folder}"])
    assert begun.model.num_layers == 3
    iteration = tmp_path / "run" / "checkpoints" / "iter_0000001"
    iteration.mkdir(parents=True)
    (iteration / "manifest.json").write_text("{}")
    save_recipe(begun, tmp_path / "run" / "recipe.yaml")
    gone = compose([*words, "handover.from_hf=gone/away"])
    assert with_published(gone, words, download=True).model == begun.model
    assert compose_published(words[:2]).model.num_layers == 40


def test_bare_data_gets_the_tokenizer_of_the_weights(tmp_path, prepared):  # noqa: F811
    folder = publish(tmp_path / "m", model=MODEL)
    (folder / "tokenizer.json").write_text("{}")
    for suffix in ("bin", "idx"):
        (tmp_path / f"bare.{suffix}").write_bytes((prepared / f"train.{suffix}").read_bytes())
    words = ["experiment=finetune_chat", f"handover.from_hf={folder}"]
    assert compose_published([*words, f"data.path={tmp_path / 'bare'}"]).data.tokenizer == str(folder)
    assert compose_published([*words, f"data.path={prepared}"]).data.tokenizer is None

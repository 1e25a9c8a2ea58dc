# SPDX-License-Identifier: Apache-2.0
"""The position at which a stage with data.order=continuing continues in its sources; the same with real ranks is in
tests/faults/test_curriculum.py.
"""

import copy
import re
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin.config.compose import save_recipe
from zaya_plugin.data.indexed_dataset import write_index
from zaya_plugin.data.stream_dataset import StreamDataset
from zaya_plugin.handover.data_places import consumed_after, source_uses, with_consumed
from zaya_plugin.run.curriculum_run import tokens_by_source
from zaya_plugin.run.stages import compose_curriculum
from zaya_plugin.run.start_recipe import take_over

LENGTHS = {"web": 9000, "code": 4000, "math": 2500}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    for name, tokens in LENGTHS.items():
        np.arange(tokens, dtype=np.uint16).tofile(folder / f"{name}.bin")
        write_index(str(folder / f"{name}.idx"), np.dtype("uint16"), np.full(tokens // 100, 100, np.int32))
    return folder


def blend(sources, **weights) -> list[str]:
    return [f"{weight} {sources / name}" for name, weight in weights.items()]


@pytest.fixture(scope="module")
def composed(sources):
    """Three stages of 40, 30 and 5 steps of 8 sequences; code pauses in the second, math begins there, the third is
    longer.
    """
    first, second, third = (
        blend(sources, web=0.7, code=0.3),
        blend(sources, web=0.5, math=0.5),
        blend(sources, code=0.6, math=0.2, web=0.2),
    )
    stages = compose_curriculum(
        [
            "experiment=cpu_demo",
            "data.order=continuing",
            f"data.path={sources / 'web'}",
            "run_dir=x",
            "stage.global_batch_size=8",
            "stage.micro_batch_size=4",
            "stage.seq_length=16",
            "demo_1:stage.train_iters=40",
            "demo_2:stage.train_iters=30",
            "demo_3:stage.train_iters=5",
            "demo_3:stage.seq_length=64",
            "demo_2:handover.continuous_lr=false",
            f"demo_1:data.blend={first}",
            f"demo_2:data.blend={second}",
            f"demo_3:data.blend={third}",
        ]
    ).stages
    assert {stage.recipe.handover.first_sample for stage in stages} == {0}, (
        "the ledger says where a stage begins, not the order"
    )
    return [stage.recipe for stage in stages]


@pytest.fixture
def recipes(composed, tmp_path):
    """The same stages in a directory of this test."""
    own = copy.deepcopy(composed)
    for recipe in own:
        recipe.run_dir = str(tmp_path / recipe.stage.name)
        if recipe.handover.from_run:
            recipe.handover.from_run = str(tmp_path / Path(recipe.handover.from_run).name)
    return own


def launched(recipe, step):
    """Write the files of a stage that reached `step` that these tests read."""
    recipe = with_consumed(recipe)
    pretend_checkpoint(recipe.run_dir, step)
    save_recipe(recipe, Path(recipe.run_dir) / "recipe.yaml")
    return recipe


def read(recipe, cache):
    """Positions in the stream of each source that the stage's data set reads, in order of its samples."""
    uses = source_uses(recipe)
    data = StreamDataset(uses, recipe.stage.seq_length, recipe.seed, 0, str(cache))
    places = [data.place(number) for number in range(len(data))]
    return {use.prefix: [position for source, position in places if source == at] for at, use in enumerate(uses)}


def test_a_change_of_blend_neither_repeats_nor_leaves_out(recipes, sources, tmp_path):
    ended = {str(sources / name): 0 for name in LENGTHS}
    for recipe, steps in zip(recipes, (40, 30, 5), strict=True):
        recipe = launched(recipe, steps)
        length, positions = recipe.stage.seq_length, read(recipe, tmp_path / "cache")
        assert sum(map(len, positions.values())) == steps * 8
        for prefix, found in positions.items():
            assert sorted(found) == list(range(ended[prefix], ended[prefix] + length * len(found), length)), prefix
            assert found != sorted(found), "shuffled within the stage"
            ended[prefix] += length * len(found)
    assert consumed_after(recipe) == [
        f"{ended[str(sources / name)]} {sources / name}" for name in ("web", "code", "math")
    ]
    assert sum(ended.values()) == 8 * (40 * 16 + 30 * 16 + 5 * 64)


def test_a_stage_that_is_launched_again_keeps_its_place(recipes, sources, tmp_path):
    launched(recipes[0], 40)
    begun = launched(recipes[1], 10)
    assert begun.data.consumed and with_consumed(recipes[1]) == begun
    (tmp_path / "demo_1" / "recipe.yaml").unlink()
    assert take_over(recipes[1]) == begun, "the stage before is not needed any more"
    recipes[1].data.blend, recipes[1].stage.train_iters = blend(sources, web=1), 31
    message = "what decides it has changed: data.blend was .* the stage had 240 samples and has 248"
    with pytest.raises(ValueError, match=message):
        take_over(recipes[1])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("data.consumed", "16 {web}", "data.consumed=['16 {web}']: the stage before in {run}/demo_1 ended with ["),
        ("seed", 5, "seed=5: the stage before in {run}/demo_1 read its sources in the order of seed 1234"),
        (
            "handover.first_sample",
            8,
            "handover.first_sample=8: with data.order=continuing data.consumed says where the stage begins. Allowed: 0",
        ),
    ],
)
def test_another_place_is_refused(recipes, sources, tmp_path, path, value, message):
    launched(recipes[0], 40)
    group, _, key = path.rpartition(".")
    wrong = [value.format(web=sources / "web")] if path == "data.consumed" else value
    setattr(getattr(recipes[1], group) if group else recipes[1], key, wrong)
    with pytest.raises(ValueError, match=re.escape(message.format(run=tmp_path, web=sources / "web"))):
        take_over(recipes[1])


def test_megatron_order_before_or_now_hands_no_place_over(recipes):
    recipes[0].data.order = "megatron"
    launched(recipes[0], 40)
    assert with_consumed(recipes[1]) is recipes[1]
    recipes[1].data.order = "megatron"
    assert with_consumed(recipes[1]) is recipes[1]


def test_tokens_of_each_source_over_the_stages(recipes, sources):
    begun = [launched(recipe, steps) for recipe, steps in zip(recipes, (40, 30, 5), strict=True)]
    rows = {line.split()[0]: line.split()[1:] for line in tokens_by_source(begun).splitlines()[1:]}
    web, code, math = (rows[str(sources / name)[-40:]] for name in LENGTHS)
    assert code[1] == "0" and math[0] == "0"
    total = [sum(int(row[column].replace(",", "")) for row in (web, code, math)) for column in range(4)]
    assert total == [40 * 8 * 16, 30 * 8 * 16, 5 * 8 * 64, 8 * (40 * 16 + 30 * 16 + 5 * 64)]
    assert float(web[4]) == pytest.approx(int(web[3].replace(",", "")) / 9000, abs=5e-4)

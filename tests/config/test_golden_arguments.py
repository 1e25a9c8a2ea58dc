# SPDX-License-Identifier: Apache-2.0
"""Megatron's arguments of every stage equal the golden files; ZAYA_UPDATE_GOLDEN=1 writes these."""

import os
from pathlib import Path

import pytest

from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.compose import compose
from zaya_plugin.run.dry_run import argument_lines
from zaya_plugin.run.stages import compose_curriculum

GOLDEN = Path(__file__).parent / "golden"
DATA = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "data/corpus/tokenizer"}
BASE = ["experiment=zaya1_base", "cluster=mi300x_128x8", "data.path=data/corpus", "run_dir=/nowhere"]
STAGES = {
    **{f"zaya1_base-{stage.name}": stage.recipe for stage in compose_curriculum(BASE).stages},
    **{
        f"cpu_demo-{stage.name}": stage.recipe
        for stage in compose_curriculum(["experiment=cpu_demo", "run_dir=/nowhere"]).stages
    },
    "zaya1_base_131k": compose(["experiment=zaya1_base_131k", *BASE[1:], "handover.from_run=/nowhere/midtrain_32k"]),
}


@pytest.mark.parametrize("name", STAGES)
def test_arguments_are_those_of_the_golden_file(name):
    lines = "\n".join(argument_lines(megatron_arguments(STAGES[name], DATA))) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("ZAYA_UPDATE_GOLDEN"):
        path.write_text(lines)
    assert lines == path.read_text(), (
        "if the change is intended, run ZAYA_UPDATE_GOLDEN=1 python -m pytest tests/config/test_golden_arguments.py"
    )


def test_there_is_no_golden_file_without_a_stage():
    assert {path.stem for path in GOLDEN.iterdir()} == set(STAGES)


def test_stages_hand_over_and_differ_where_they_should():
    first, second, third = (STAGES[f"zaya1_base-{name}"] for name in ("pretrain_4k", "pretrain_4k_2", "midtrain_32k"))
    values = [megatron_arguments(recipe, DATA) for recipe in (first, second, third)]
    assert "load" not in values[0]
    assert [v["load"] for v in values[1:]] == ["/nowhere/pretrain_4k/checkpoints", "/nowhere/pretrain_4k_2/checkpoints"]
    assert [v["seq_length"] for v in values] == [4096, 4096, 32768]
    assert [v["context_parallel_size"] for v in values] == [1, 1, 2]
    changed = {name for name in values[0] if values[0][name] != values[1].get(name)}
    assert changed == {"train_iters", "lr", "min_lr", "lr_warmup_iters", "save"}

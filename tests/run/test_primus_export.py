# SPDX-License-Identifier: Apache-2.0
"""Experiments for Primus of every stage, against files that change only on purpose: ZAYA_UPDATE_GOLDEN=1 writes
them.
"""

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from zaya_plugin.config.arguments import DECIDED_AT_START, arguments_with_event_files
from zaya_plugin.config.compose import compose
from zaya_plugin.hosts.primus import traps
from zaya_plugin.run import primus_export
from zaya_plugin.run.stages import compose_curriculum

GOLDEN = Path(__file__).parent / "golden"
DATA = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "data/corpus/tokenizer"}
BASE = [
    "experiment=zaya1_base",
    "cluster=mi300x_128x8",
    "optim=muon",
    "data.path=data/corpus",
    "run_dir=/runs/team/zaya1",
]
STAGES = {
    **{f"zaya1_base-{stage.name}": stage.recipe for stage in compose_curriculum(BASE).stages},
    "zaya1_base_131k": compose(
        [
            "experiment=zaya1_base_131k",
            *BASE[1:-1],
            "run_dir=/runs/team/zaya1/sft",
            "handover.from_run=/runs/team/zaya1/midtrain_32k",
        ]
    ),
    "cpu_demo": compose(["experiment=cpu_demo", "run_dir=/runs/team/demo"]),
}


def document(name: str) -> dict:
    recipe = STAGES[name]
    return primus_export.experiment(recipe, DATA, recipe.nproc or recipe.cluster.gpus_per_node)


@pytest.mark.parametrize("name", STAGES)
def test_the_experiment_is_that_of_the_golden_file(name):
    text = primus_export.text(STAGES[name], document(name))
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("ZAYA_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text(), (
        "meant? then: ZAYA_UPDATE_GOLDEN=1 python -m pytest tests/run/test_primus_export.py"
    )
    assert yaml.safe_load(text) == document(name), "YAML gives back what was written, numbers as numbers"


def test_registered_buffers_go_with_the_variable_that_has_them_copied():
    recipe = STAGES["zaya1_base_131k"]
    assert "NCCL_CTA_POLICY" not in document("zaya1_base_131k")["env"]
    registered = dataclasses.replace(recipe, parallel=dataclasses.replace(recipe.parallel, nccl_ub=True))
    assert primus_export.experiment(registered, DATA, 8)["env"]["NCCL_CTA_POLICY"] == "2"


def test_there_is_no_golden_file_without_a_stage():
    assert {path.stem for path in GOLDEN.iterdir()} == set(STAGES)


@pytest.mark.parametrize("name", STAGES)
def test_every_argument_of_zaya_train_is_there_and_the_run_is_where_primus_saves(name):
    made, recipe = document(name), STAGES[name]
    overrides = made["modules"]["pre_trainer"]["overrides"]
    for key, value in arguments_with_event_files(recipe, DATA).items():
        if key not in DECIDED_AT_START:
            assert overrides[key] == (list(value) if isinstance(value, tuple) else value), key
    parts = [made[key] for key in ("workspace", "work_group", "user_name", "exp_name")]
    assert os.path.join(*parts, "checkpoints") == overrides["save"]
    assert made["env"].items() >= recipe.cluster.environment.items()
    assert "load" not in overrides, "the plugin finds out at the start what there is to go on from"
    for key, (allowed, _) in traps.FIXED_KEYS.items():
        assert overrides.get(key, allowed) == allowed


def test_the_spec_route_names_an_object_and_no_stage():
    recipe = STAGES["cpu_demo"]
    made = primus_export.experiment(recipe, {**DATA, "train_data_path": ["a"]}, 1, spec=True)
    overrides = made["modules"]["pre_trainer"]["overrides"]
    assert overrides["spec"] == ["zaya_plugin.spec", "zaya_block"]
    assert overrides["train_data_path"] == ["a"] and not {"stage", "zaya_recipe", "router_hidden_size"} & set(overrides)


@pytest.mark.parametrize(
    "override, message",
    [
        ("stage.batch_size_ramp='0:8 4K:16'", "batch_size_ramp=.* Allowed: null"),
        ("run_dir=/zaya1", "run_dir=/zaya1: .* Allowed: a path of at least 3 folders"),
        ("+cluster.environment.NCCL_X='$\\{Y\\}'", "cluster.environment.NCCL_X=.* Allowed: plain text"),
    ],
)
def test_what_primus_cannot_take_is_refused(override, message):
    recipe = compose(["experiment=cpu_demo", "run_dir=/runs/team/demo"])
    if "environment" in override:
        recipe.cluster.environment["NCCL_X"] = "${Y}"
    else:
        recipe = compose(["experiment=cpu_demo", "run_dir=/runs/team/demo", override])
    with pytest.raises(ValueError, match=message):
        primus_export.experiment(recipe, DATA, 1)


def test_the_launcher_is_alone_in_its_folder_and_sets_the_environment_before_torch(tmp_path):
    import subprocess
    import sys

    script = primus_export.launcher()
    assert sorted(path.name for path in script.parent.glob("*.py")) == ["__init__.py", "zaya_primus.py"]
    (tmp_path / "e.yaml").write_text(
        primus_export.text(STAGES["zaya1_base-pretrain_4k"], document("zaya1_base-pretrain_4k"))
    )
    program = (
        "import runpy, sys, os, builtins\n"
        "real = builtins.__import__\n"
        "def watch(name, *rest, **named):\n"
        "    if name == 'torch' and 'torch' not in sys.modules: print(os.environ['HSA_NO_SCRATCH_RECLAIM'])\n"
        "    return real(name, *rest, **named)\n"
        "builtins.__import__ = watch\n"
        f"sys.argv = ['x', 'train', 'pretrain', '--config', {str(tmp_path / 'e.yaml')!r}]\n"
        f"runpy.run_path({str(script)!r}, run_name='not_main')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "HSA_NO_SCRATCH_RECLAIM": "0"},
    )
    assert done.returncode == 0 and done.stdout.split() == ["1"], done.stderr

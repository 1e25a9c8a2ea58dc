# SPDX-License-Identifier: Apache-2.0
"""Composing a recipe, the messages about mistakes, and writing and reading a recipe file."""

import pytest

from zaya_plugin.config.compose import compose, load_recipe, save_recipe, to_yaml
from zaya_plugin.config.schema import Recipe, get
from zaya_plugin.config.words import say_repeated

DEMO = "experiment=cpu_demo"

# Override -> parts of its message: the key's full path and value, what is allowed, what to type instead.
REFUSED = [
    ("optim.lrr=1", ["optim.lrr=1: no such key", "keys of optim: name, lr, min_lr", "Fix: optim.lr=1."]),
    ("+optim.lrr=1", ["optim.lrr=1: no such key", "Fix: optim.lr=1."]),
    ("++optim.lrr=1", ["optim.lrr=1: no such key", "Fix: optim.lr=1."]),
    ("lr=1", ["lr=1: no such key", "Fix: optim.lr=1."]),
    ("learning_rate=1", ["learning_rate=1: no such key", "Fix: optim.lr=1."]),
    ("optim.learning_rate=1e-3", ["optim.learning_rate=1e-3: no such key", "Fix: optim.lr=1e-3."]),
    ("optimizer=adamw", ["optimizer=adamw: no such key", "Fix: optim=adamw."]),
    ("steps=10", ["steps=10: no such key", "Fix: stage.train_iters=10."]),
    ("model.lr=1", ["model.lr=1: no such key", "keys of model: name, num_layers", "Fix: optim.lr=1."]),
    ("stage.seq_len=8", ["stage.seq_len=8: no such key", "Fix: stage.seq_length=8."]),
    ("resum=auto", ["resum=auto: no such key", "Fix: resume=auto."]),
    ("foo=1", ["foo=1: no such key", "groups and keys: name, model", "Fix: megatron.<name>=<value>"]),
    ("foo.bar=1", ["foo.bar=1: no such key"]),
    ("+foo.bar=1", ["foo={...}: no such key"]),
    ("hydra.foo=1", ["hydra.foo=1: no such key"]),
    ("optim.lr=abc", ["optim.lr=abc: ", "Allowed: a number above 0, at most 100.0 (", "). Fix: optim.lr=0.01."]),
    ("++optim.lr=abc", ["optim.lr=abc: ", "Allowed: a number above 0, at most 100.0 ("]),
    ("optim.lr=true", ["optim.lr=true: ", "Allowed: a number above 0, at most 100.0 ("]),
    ("optim.lr=null", ["optim.lr=null: ", "Allowed: a number above 0, at most 100.0 ("]),
    ("~optim.lr", ["optim.lr", "Allowed: a number above 0, at most 100.0 ("]),
    ("optim.lr=${nope}", ["optim.lr", "nope"]),
    ("optim.lr=[1", ["[1", "key=value"]),
    ("optim.lr", ["optim.lr", "key=value"]),
    ("optim.lr=1,2", ["optim.lr=1,2", "add -m"]),
    ("optim.lr=-1", ["optim.lr=-1.0: ", "Allowed: a number above 0, at most 100.0 ("]),
    (
        "stage.train_iters=1.5",
        [
            "stage.train_iters=1.5: ",
            "Allowed: a whole number above 0, at most 9999999 (",
            "). Fix: stage.train_iters=60",
        ],
    ),
    ("stage.train_iters=many", ["stage.train_iters=many: ", "Allowed: a whole number above 0, at most 9999999 ("]),
    (
        "optim.lr_decay_iters=never",
        ["optim.lr_decay_iters=never: ", "Allowed: a whole number above 0, at most 9999999 (", "), or null."],
    ),
    ("logger.wandb=maybe", ["logger.wandb=maybe: ", "Allowed: true or false. Fix: logger.wandb=true."]),
    ("parallel.recompute_modules=moe", ["parallel.recompute_modules=moe: ", "a list such as [a,b]"]),
    (
        "profile.ranks=[a]",
        ["profile.ranks[0]=a: ", "a list such as [0,1] of numbers from 0", "Fix: profile.ranks=[0]."],
    ),
    ("cluster.environment=[1]", ["cluster.environment", "a mapping of names to text"]),
    ("checkpoint=3", ["checkpoint=3: ", "Fix: checkpoint.<key>=<value>."]),
    ("model=null", ["model=null: ", "Allowed: zaya1_74b, zaya1_base, zaya_tiny."]),
    ("model=nope", ["model=nope: no such recipe", "zaya1_base, zaya_tiny"]),
    ("cluster.kernels=torch", ["cluster.kernels=torch: ", "Allowed: auto, hip, triton, compiled, reference."]),
    ("cluster.device=tpu", ["cluster.device=tpu: ", "Allowed: cuda, cpu. Fix: cluster.device=cpu."]),
    ("resume=maybe", ["resume=maybe: ", "Allowed: never, auto, must. Fix: resume=never."]),
    ("resume=true", ["resume=true: ", "Allowed: never, auto, must. Fix: resume=auto."]),
    ("model.skip_output=half", ["model.skip_output=half: ", "Allowed: zero, identity."]),
    (
        "parallel.recompute_granularity=some",
        ["parallel.recompute_granularity=some: ", "Allowed: null, full, selective"],
    ),
    ("parallel.recompute=auto", ["Fix: parallel.recompute_granularity=auto."]),
    ("parallel.recompute=2", ["Fix: parallel.recompute_num_layers=2."]),
    ("parallel.recompute=true", ["Fix: parallel.recompute_method=<value>."]),
    ("model.depth=8", ["Fix: model.<one of these keys>=<value>, or megatron."]),
    ("batch_size=8", ["Fix: stage.micro_batch_size=8."]),
    ("run_dri=5", ["Fix: run_dir=5."]),
    ("OPTIM.LR=1", ["Fix: optim.lr=1."]),
    ("optim.lr=200", ["Fix: optim.lr=0.01."]),
    ("nproc=", ["Fix: nproc=2."]),
    ("cluster=1", ["cluster=1: ", "Allowed: cpu, gpu, ", "Fix: cluster=cpu."]),
    ("cluster=null", ["cluster=null: ", "Fix: cluster=cpu."]),
    ("optim=", ["optim=: ", "Allowed: adamw, muon. Fix: optim=adamw."]),
    ("experiment=[a]", ["experiment=[a]: ", "Allowed: continue_32k, "]),
    ("cluster=cpu,gpu", ["several values. Fix: add -m to run every value."]),
    ("=3", ["=3: has no key before the =. Allowed: key=value. Fix: <key>=3."]),
    ("name=???", ["name: has no value", "name=<value>"]),
    ("stage.train_iters=???", ["stage.train_iters: has no value (optimizer steps)", "Fix: stage.train_iters=<value>."]),
]


@pytest.mark.parametrize(("override", "parts"), REFUSED, ids=[override for override, _ in REFUSED])
def test_refused_overrides_are_named(override, parts):
    with pytest.raises(ValueError) as caught:
        compose([DEMO, override])
    for part in parts:
        assert part in str(caught.value)
    assert "object_type" not in str(caught.value)


def test_an_unknown_experiment_lists_the_known_ones():
    known = (
        "continue_32k, continue_4k, cpu_demo, cpu_demo_stage1, cpu_demo_stage2, cpu_demo_stage3, finetune_chat, "
        "finetune_demo, finetune_lora, zaya1_74b, zaya1_base, zaya1_base_131k, zaya1_base_32k, zaya1_base_stage2"
    )
    with pytest.raises(ValueError, match=f"^experiment=nope: no such recipe. Allowed: {known}.$"):
        compose(["experiment=nope"])


def test_missing_values_are_reported_together_with_their_help():
    with pytest.raises(ValueError) as caught:
        compose(["stage.train_iters=???"])
    assert "data.path: has no value (directory written by `zaya data prepare`" in str(caught.value)
    assert "stage.train_iters: has no value" in str(caught.value)


def test_all_bad_choices_are_reported_together():
    with pytest.raises(ValueError) as caught:
        compose([DEMO, "cluster.device=tpu", "resume=maybe"])
    assert len(str(caught.value).splitlines()) == 2


def test_the_demo_is_a_small_zaya_on_the_cpu():
    recipe = compose([DEMO])
    assert isinstance(recipe, Recipe) and type(recipe.model).__name__ == "ModelConfig"
    assert (recipe.name, recipe.run_dir, recipe.nproc) == ("cpu_demo", "runs/cpu_demo", 2)
    assert (recipe.model.hidden_size, recipe.cluster.device, recipe.cluster.dtype) == (256, "cpu", "fp32")
    assert recipe.stage.global_batch_size * recipe.stage.seq_length == 4096


def test_an_experiment_wins_over_the_groups_and_the_command_line_over_both():
    assert compose([DEMO]).optim.lr == 1e-2
    assert compose([DEMO, "optim.lr=1e-4"]).optim.lr == 1e-4
    assert compose([DEMO, "cluster=gpu"]).cluster.device == "cuda"


def test_open_mappings_take_keys_with_and_without_a_plus():
    recipe = compose(
        [
            DEMO,
            "megatron.log_params_norm=true",
            "+megatron.rampup=[1,2]",
            "cluster.environment.A=false",
            "+cluster.environment.B=1e3",
            "cluster.kernel_overrides.router_mlp=reference",
        ]
    )
    assert recipe.megatron == {"log_params_norm": True, "rampup": [1, 2]}
    assert recipe.cluster.environment == {"A": "false", "B": "1e3"}
    assert recipe.cluster.kernel_overrides == {"router_mlp": "reference"}
    assert type(recipe.megatron) is dict and type(recipe.megatron["rampup"]) is list


def test_kernels_on_the_command_line_drop_the_overrides_of_the_recipe():
    """cluster.kernels selects the version of all operators except those named on the command line."""
    recipe, router = compose(["cluster=gpu", DEMO]), "cluster.kernel_overrides.router_mlp=compiled"
    assert recipe.cluster.kernels == "compiled" and len(recipe.cluster.kernel_overrides) == 4
    assert compose([DEMO, "cluster=gpu", router]).cluster.kernel_overrides == {
        **recipe.cluster.kernel_overrides,
        "router_mlp": "compiled",
    }
    assert compose([DEMO, "cluster=gpu", "cluster.kernel_overrides={}"]).cluster.kernel_overrides == {}
    for overrides in (["cluster.kernels=triton", router], [router, "++cluster.kernels=triton"]):
        cluster = compose([DEMO, "cluster=gpu", *overrides]).cluster
        assert (cluster.kernels, cluster.kernel_overrides) == ("triton", {"router_mlp": "compiled"})
    assert compose([DEMO, "cluster=mi300x_8", "cluster.kernels=auto"]).cluster.kernel_overrides == {}


def test_composing_leaves_hydra_as_it_was():
    from hydra.core.global_hydra import GlobalHydra

    compose([DEMO, "seed=4711"])  # words that no other test composes
    assert not GlobalHydra.instance().is_initialized()
    with pytest.raises(ValueError):
        compose(["experiment=nope"])
    assert not GlobalHydra.instance().is_initialized()


def test_a_saved_recipe_reads_back_the_same(tmp_path):
    recipe = compose(
        [DEMO, "megatron.a=[1,{b:null}]", "cluster.environment.X=1e3", "profile.ranks=[0,1]", "optim.lr=1e-5"]
    )
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    assert "${" not in to_yaml(recipe)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("optim:\n  lrr: 1\n  betas: 2\n", ["optim.lrr=1", "Fix: optim.lr=1.", "optim.betas=2: no such key"]),
        ("nonsense: 1\n", ["nonsense=1: no such key"]),
        ("optim:\n  lr: fast\n", ["optim.lr=fast", "a number"]),
        ("resume: maybe\n", ["resume=maybe", "never, auto, must"]),
        ("- 1\n", ["a recipe is a mapping"]),
        ("name: [\n", ["YAML"]),
        ("name: x\n", ["data.path: has no value", "model.name: has no value"]),
    ],
)
def test_load_recipe_checks_the_file_against_the_schema(tmp_path, text, parts):
    path = tmp_path / "recipe.yaml"
    full = to_yaml(compose([DEMO]))
    key = text.split(":")[0]
    if parts[0].startswith(("optim", "nonsense", "resume")):  # the other keys of the file are valid
        text = "".join(_without(full, key)) + text
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_load_recipe_names_a_missing_file(tmp_path):
    with pytest.raises(ValueError, match="absent.yaml: cannot be read .No such file"):
        load_recipe(tmp_path / "absent.yaml")


def _without(text: str, key: str) -> list[str]:
    """Return the lines of a YAML text without the top-level entry `key`."""
    kept, skipping = [], False
    for line in text.splitlines(keepends=True):
        if not line.startswith((" ", "-")):
            skipping = line.startswith(f"{key}:")
        if not skipping:
            kept.append(line)
    return kept


@pytest.mark.parametrize(
    "override, key, value",
    [
        ("stage.train_iters=1e3", "stage.train_iters", 1000),
        ("logger.wandb=1", "logger.wandb", True),
        ("logger.wandb=off", "logger.wandb", False),
        ("name=1e3", "name", "1e3"),
        ("data.path=true", "data.path", "true"),
        ("megatron={manual_gc: true}", "megatron", {"manual_gc": True}),
    ],
)
def test_a_value_arrives_as_it_was_typed(override, key, value):
    found = get(compose([DEMO, override]), key)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "override, start",
    [
        ("logger.wandb=2", "logger.wandb=2: "),
        ("seed=5e-1", "seed=5e-1: "),
        ("stage.train_iters=0x10", "stage.train_iters=0x10: "),
        ("model={hidden_size: 64}", "model={hidden_size: 64}: a group cannot be given as a mapping"),
        ("++optim={lr: 1}", "optim={lr: 1}: a group cannot"),
    ],
)
def test_a_refusal_shows_what_was_typed(override, start):
    with pytest.raises(ValueError) as error:
        compose([DEMO, override])
    assert str(error.value).startswith(start)


def test_a_repeated_key_is_reported_with_both_values(capsys):
    say_repeated([DEMO, "optim.lr=1", "++optim.lr=2", "optim.min_lr=1", "optim.min_lr=1"])
    said = capsys.readouterr().err
    assert said == "zaya: optim.lr=2: was given before as 1; the last value counts\n"
    assert compose([DEMO, "optim.lr=1", "optim.lr=2"]).optim.lr == 2

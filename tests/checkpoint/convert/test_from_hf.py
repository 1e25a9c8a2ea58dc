# SPDX-License-Identifier: Apache-2.0
"""Runs that start from published weights with `handover.from_hf`, in several layouts of ranks, and their export."""

from argparse import Namespace
from dataclasses import replace

import pytest

from tests.checkpoint.convert.hub import serving
from tests.checkpoint.convert.published import adapter_run, publish
from tests.running import MICRO, train
from zaya_plugin.checkpoint.convert import exporting, verification
from zaya_plugin.checkpoint.convert.adapters import Lora
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.reading import folder_of
from zaya_plugin.cli import main

MICRO_MODEL = Description(4, 64, 8, 2, 8, 16, 48, 16, 512, max_position_embeddings=32)
# One step that changes no weight: what the run saves is what it has read.
STILL = (
    "stage.train_iters=1",
    "optim.lr=1e-25",
    "optim.min_lr=0",
    "optim.weight_decay=0",
    "optim.lr_warmup_iters=0",
    "model.balancing_lr=0",
    "stage.eval_iters=0",
)
LAYOUTS = {
    "tensor": ("parallel.tensor_model_parallel_size=2",),
    "data": (),
    "expert": ("parallel.expert_model_parallel_size=2",),
    "pipeline": ("parallel.pipeline_model_parallel_size=2",),
    "muon_bf16": ("optim=muon", "cluster.dtype=bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_zero_steps_from_published_weights_are_bit_equal(tmp_path, corpus, layout):
    folder = publish(tmp_path / "published", "legacy" if layout == "tensor" else "native", MICRO_MODEL)
    run = train(tmp_path / "run", corpus, *STILL, *LAYOUTS[layout], f"handover.from_hf={folder}")
    assert f"from the published weights {folder}" in run.output
    trained = exporting.open_checkpoint(folder_of(tmp_path / "run"))
    planned = exporting.plan(trained, dtype="bf16")
    again = open_source(exporting.export_model(planned, tmp_path / "export"))
    different = verification.differences(open_source(folder), again)
    # The run holds the biases in fp32, with the same values, and its export keeps them so.
    assert [line for line in different if "balancing_biases: torch.bfloat16" not in line] == []
    card = (tmp_path / "export" / "README.md").read_text()
    assert f"stage before: published {folder}" in card and "recipe cpu_demo" in card


@pytest.mark.slow
def test_weights_of_another_model_are_refused_before_the_run(tmp_path, corpus):
    folder = publish(tmp_path / "published", model=MICRO_MODEL)
    run = train(tmp_path / "run", corpus, *STILL, f"handover.from_hf={folder}", "model.kv_channels=16", check=False)
    assert run.code == 2 and f"model.kv_channels=16: handover.from_hf={folder} has 8. Allowed: 8." in run.output
    run = train(tmp_path / "run", corpus, *STILL, "handover.from_hf=no/such/place", check=False)
    assert run.code == 2 and "handover.from_hf=no/such/place: must be a folder or a name on the Hub" in run.output
    run = train(tmp_path / "run", corpus, f"handover.from_hf={folder}", "handover.from_run=other", check=False)
    assert run.code == 2 and "handover.from_run=other" in run.output
    assert "Traceback" not in run.output


def test_the_commands(tmp_path, capsys):
    folder = publish(tmp_path / "published", model=MICRO_MODEL)
    recipe = tmp_path / "recipes" / "model" / "published.yaml"
    checkpoint, output = tmp_path / "checkpoint", tmp_path / "export"
    assert main(["checkpoint", "import", str(folder), "--output", str(checkpoint), "--write-recipe", str(recipe)]) == 0
    assert "native model of " in capsys.readouterr().out
    assert "num_layers: 4" in recipe.read_text() and "stage.rotary_base=10000" in recipe.read_text()
    assert (
        main(["checkpoint", "export", str(checkpoint), "--output", str(output), "--tokenizer", "none", "--verify"]) == 0
    )
    assert "equal those of the checkpoint bit by bit" in capsys.readouterr().out
    assert "equal those of transformers" in (output / "README.md").read_text()
    assert main(["checkpoint", "roundtrip", str(output), "--layout", "legacy"]) == 0
    assert "native -> checkpoint -> legacy: " in capsys.readouterr().out
    rest = ["--output", str(tmp_path / "x")]
    for words, message in (
        (["export", str(tmp_path / "nothing"), *rest], "no such checkpoint"),
        (["export", str(checkpoint), *rest], "the checkpoint names no tokenizer"),
        (["import", str(folder), *rest, "--vocab-size", "0"], "--vocab-size: '0' is not a whole number from 1 to "),
    ):
        assert main(["checkpoint", *words]) == 2 and message in capsys.readouterr().err


def test_exports_are_pushed_and_the_token_is_not_shown(tmp_path, capsys, monkeypatch):
    """To a stand-in of the Hub's API on this machine, by huggingface_hub; the stand-in has no Xet."""
    folder, token = publish(tmp_path / "published", model=MICRO_MODEL), "hf_notthetokenofanyone"
    assert main(["checkpoint", "import", str(folder), "--output", str(tmp_path / "run")]) == 0

    adapter_run(tmp_path / "lora", folder, Lora(2, 4.0, ["attention"]), table=640)

    def export(name: str, *more: str, run: str = "run") -> int:
        words = [str(tmp_path / run), "--output", str(tmp_path / name), "--tokenizer", "none", "--push", "team/zaya"]
        return main(["checkpoint", "export", *words, *more])

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with serving(token) as (hub, address):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert export("none") == 2 and "no token of the Hub is known" in capsys.readouterr().err
        assert not (tmp_path / "none").exists()
        monkeypatch.setenv("HF_TOKEN", token)
        assert export("export") == 0
        assert hub.repositories == {"team/zaya": "private"}, "a new repository is private"
        local = {path.name: path.read_bytes() for path in (tmp_path / "export").iterdir()}
        assert hub.files == local and "model.safetensors" in local
        shown = capsys.readouterr()
        assert f"pushed: {address}/team/zaya/commit/1" in shown.out
        hub.files.clear()
        assert export("adapter", "--adapter", run="lora") == 0 and "pushed: " in capsys.readouterr().out
        assert hub.files.keys() == {path.name for path in (tmp_path / "adapter").iterdir()}
        assert hub.files.keys() == {"adapter_config.json", "adapter_model.safetensors"}
        monkeypatch.setenv("HF_TOKEN", "hf_another")
        assert export("refused") == 2
        refused = capsys.readouterr().err
        assert "--push=team/zaya: the upload of " in refused and "hf upload team/zaya" in refused
        assert not any(word in shown.out + shown.err + refused for word in (token, "hf_another"))
    assert main(["checkpoint", "export", str(tmp_path / "run"), "--output", str(tmp_path / "x"), "--push", "name"]) == 2
    assert "--push=name: is not a repository's name" in capsys.readouterr().err
    folder.rename(tmp_path / "moved")
    assert main(["generate", str(tmp_path / "lora"), "--prompt", "x"]) == 2
    fix = "Fix: `zaya checkpoint export RUN --base SOURCE --output DIR`, where SOURCE is the base now; `zaya generate` and"
    assert fix in capsys.readouterr().err


def test_a_recipe_file_is_one_of_the_group_model_and_keeps_what_is_there(tmp_path, capsys):
    given = ["import", str(publish(tmp_path / "published")), "--output", str(tmp_path / "checkpoint"), "--write-recipe"]
    assert main(["checkpoint", *given, str(tmp_path / "mine.yaml")]) == 2
    assert "must be a file of the group model. Allowed: DIRECTORY/model/NAME.yaml" in capsys.readouterr().err
    (tmp_path / "model").mkdir()
    mine = tmp_path / "model" / "mine.yaml"
    mine.write_text("name: mine\n")
    assert main(["checkpoint", *given, str(mine)]) == 2
    assert "exists with other content" in capsys.readouterr().err
    assert mine.read_text() == "name: mine\n" and not (tmp_path / "checkpoint").exists()


def test_another_base_is_refused(tmp_path):
    from zaya_plugin.hosts.stage_handover import check_published

    folder = publish(tmp_path / "published", model=MICRO_MODEL)
    arguments = Namespace(**replace(MICRO_MODEL, rotary_base=1_000_000).arguments())
    with pytest.raises(
        ValueError, match=r"^stage\.rotary_base=1000000: .* Allowed: 10000\. Fix: stage\.rotary_base=10000"
    ):
        check_published(str(folder), arguments)
    check_published(str(folder), Namespace(**MICRO_MODEL.arguments()))


def test_a_recipe_is_compared(tmp_path, capsys):
    from zaya_plugin.config.compose import compose, save_recipe

    folder = publish(tmp_path / "published", model=MICRO_MODEL)
    words = [word for word in MICRO if word.startswith(("experiment", "model"))]
    words += ["data.path=nowhere", "run_dir=nowhere"]
    for changes, fits in (((), True), (("model.num_experts=8",), False)):
        save_recipe(compose([*words, *changes]), tmp_path / "recipe.yaml")
        given = [
            "import",
            str(folder),
            "--output",
            str(tmp_path / "checkpoint"),
            "--recipe",
            str(tmp_path / "recipe.yaml"),
        ]
        if fits:
            assert main(["checkpoint", *given]) == 0
            continue
        assert main(["checkpoint", *given]) == 2
        assert "num_experts 8 and 16. Fix: model.num_experts=16" in capsys.readouterr().err

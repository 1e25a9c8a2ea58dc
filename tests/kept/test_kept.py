# SPDX-License-Identifier: Apache-2.0
"""What commit 04c135c wrote resumes, loads and composes, to the bit. README.md says how it was made."""

import json
import shlex
import subprocess
import sys
import tarfile
import zlib
from pathlib import Path

import pytest
import torch
import yaml

from tests.checkpoint.test_reshape import loaded
from tests.hosts.test_spec import move_in  # noqa: F401  (a fixture)
from tests.kept.arithmetic import PINNED
from tests.megatron_rank import single_rank  # noqa: F401  (a fixture of every test of this file)
from tests.prepared_corpus import read_tokens  # noqa: F401  (a fixture)
from tests.running import train
from zaya_plugin import cli

ARCHIVE = Path(__file__).with_name("04c135c.tar.xz")
ROOT = Path(__file__).parents[2]
WORDS = (
    "experiment=cpu_demo optim=muon nproc=1 model.num_layers=2 model.hidden_size=16 model.kv_channels=4 "
    "model.num_attention_heads=4 model.num_query_groups=2 model.num_experts=4 model.moe_ffn_hidden_size=16 "
    "model.router_hidden_size=8 stage.seq_length=32 stage.micro_batch_size=2 stage.global_batch_size=4 "
    "stage.train_iters=6 stage.eval_interval=3 stage.eval_iters=1 optim.lr=1e-2 optim.lr_warmup_iters=2 "
    "checkpoint.save_interval=3 checkpoint.keep_last=0 checkpoint.save=sync logger.wandb=false "
    "logger.tensorboard=false logger.expert_load_interval=1"
).split()


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """The unpacked archive; it is the working directory, as at 04c135c."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    for file in (tmp_path / "guest").iterdir():
        file.write_text(file.read_text().replace("/kept/", f"{tmp_path}/"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def flat(values: dict, prefix: str = "") -> dict[str, object]:
    """Return the values of nested mappings by dotted key."""
    return {
        key: value
        for name, inner in values.items()
        for key, value in (
            flat(inner, f"{prefix}{name}.") if isinstance(inner, dict) else {prefix + name: inner}
        ).items()
    }


def words_of(path: str) -> list[str]:
    """Return the words that compose a recipe.yaml: WORDS, and what the demo's recipe has changed since."""
    from zaya_plugin.config.compose import compose, to_yaml

    today = flat(yaml.safe_load(to_yaml(compose([*WORDS, "data.path=absent"]))))
    then = flat(yaml.safe_load(Path(path).read_text()))
    return [*WORDS, *(f"{key}={json.dumps(value)}" for key, value in then.items() if today[key] != value)]


@pytest.mark.parametrize("path", ["run/recipe.yaml", "guest/recipe.yaml"])
def test_the_recipe_composes(kept, path):
    from zaya_plugin.config.compose import compose, load_recipe, to_yaml

    recipe = load_recipe(path)
    assert flat(yaml.safe_load(Path(path).read_text())).items() <= flat(yaml.safe_load(to_yaml(recipe))).items()
    assert compose(words_of(path)) == recipe


def test_the_corpus_is_read(kept, read_tokens, capsys):  # noqa: F811
    from tokenizers import Tokenizer

    from zaya_plugin.config.compose import load_recipe
    from zaya_plugin.data.sources import find_sources

    texts = [json.loads(line)["text"] for line in Path("texts.jsonl").read_text().splitlines()]
    documents = [tokens for split in ("train", "valid") for tokens in read_tokens(f"corpus/{split}")]
    tokenizer = Tokenizer.from_file("corpus/tokenizer/tokenizer.json")
    assert {tokens.pop() for tokens in documents} == {0}
    assert sorted(map(tokenizer.decode, documents)) == sorted(texts)
    assert cli.main(["data", "check", "corpus"]) == 0 and "all checksums fit" in capsys.readouterr().out
    saved = json.loads(Path("run/checkpoints/iter_0000003/manifest.json").read_text())
    facts = find_sources(load_recipe("run/recipe.yaml")).facts()
    assert {key: facts[key] for key in saved["data"]} == saved["data"]


def test_the_checkpoint_is_exported_with_the_same_bytes(kept):
    assert cli.main(["checkpoint", "export", "run", "--output", "again"]) == 0
    for file in Path("export").iterdir():
        assert Path("again", file.name).read_bytes() == file.read_bytes(), file.name


def test_the_exported_command_is_accepted(kept, move_in):  # noqa: F811
    words = shlex.split(Path("guest/megatron.args").read_text())
    args, spec = move_in(words, padded_vocab_size=320)
    assert spec.guest.differences == {} and spec.guest.resumed_at == 0
    assert (args.num_layers, args.hidden_size, args.save) == (2, 16, str(kept / "guest" / "checkpoints"))
    assert Path(args.train_data_path[0] + ".idx").is_file() and Path(args.tokenizer_model).is_dir()


def steps(path: str) -> dict[int, tuple[float, float]]:
    """Return loss and gradient norm by step."""
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in rows if "loss" in row}


@pytest.mark.slow
def test_the_run_resumes_with_the_same_losses_and_saves_the_same_bits(kept, monkeypatch):
    for name, value in PINNED.items():
        monkeypatch.setenv(name, value)
    expected, before = json.loads(Path("expected.json").read_text()), steps("run/metrics.jsonl")
    resumed = train(Path("run"), Path("corpus"), "resume=must", recipe=words_of("run/recipe.yaml"))
    assert "continuing after step 3" in resumed.output and "resume: " not in resumed.output
    after = steps("run/metrics.jsonl")
    command = [sys.executable, "-m", "tests.kept.arithmetic"]
    digest = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    if digest != expected["arithmetic"]:
        for step, figures in before.items():
            assert after[step] == pytest.approx(figures, abs=5e-3)
        return
    assert after == before and list(after) == [1, 2, 3, 4, 5, 6]
    tensors = {
        key: zlib.crc32(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for key, value in loaded(Path("run/checkpoints/iter_0000006")).items()
        if torch.is_tensor(value)
    }
    assert len(tensors) == 282 and tensors == expected["tensors_of_step_6"]

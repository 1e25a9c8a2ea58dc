# SPDX-License-Identifier: Apache-2.0
"""The console script: its texts, exit codes, no files left behind, no torch import."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_plugin import __version__, cli
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.train_help import DEMO_DATA, GROUPS, MOST_USED, options, train_help

EXPERIMENTS = (
    "continue_32k, continue_4k, cpu_demo, cpu_demo_stage1, cpu_demo_stage2, cpu_demo_stage3, finetune_chat, "
    "finetune_demo, finetune_lora, zaya1_74b, zaya1_base, zaya1_base_131k, zaya1_base_32k, zaya1_base_stage2"
)


def test_help_and_version(zaya):
    helped = zaya("--help")
    assert helped.returncode == 0 and "zaya train experiment=cpu_demo" in helped.stdout
    assert zaya("--version").stdout == f"zaya_plugin {__version__}\n"
    assert zaya().returncode == 2


def test_train_help_names_every_group_option_and_the_most_used_keys(zaya):
    done = zaya("train", "--help")
    assert (done.returncode, done.stdout, done.stderr) == (0, train_help(), "")
    for group in GROUPS:
        for option in options(group):
            assert option in done.stdout
    for path in MOST_USED:
        assert f"\n  {path} " in done.stdout
    assert (
        "stage.micro_batch_size          1 " in done.stdout and "optim.lr                        0.0006" in done.stdout
    )


def test_cfg_job_prints_a_recipe_that_loads(zaya, tmp_path):
    done = zaya("train", "--cfg", "job", "experiment=cpu_demo", "optim.lr=1e-4")
    assert done.returncode == 0, done.stderr
    (tmp_path / "recipe.yaml").write_text(done.stdout)
    recipe = load_recipe(tmp_path / "recipe.yaml")
    assert (recipe.optim.lr, recipe.run_dir) == (1e-4, "runs/cpu_demo")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "experiment=nope"], 2, f"zaya: experiment=nope: no such recipe. Allowed: {EXPERIMENTS}.\n"),
        (["train"], 2, f"experiment: was not given. Fix: experiment=<name>, of {EXPERIMENTS}.\n"),
        (["train", "experiment=cpu_demo", "optim.lrr=1"], 2, "Fix: optim.lr=1."),
        (["train", "experiment=cpu_demo", "stage.global_batch_size=10"], 2, "Allowed: 8 or 16."),
        (["train", "experiment=cpu_demo"], 2, "data/stdlib"),
        (
            ["train", "experiment=cpu_demo", "cluster.num_nodes=2"],
            2,
            "cluster.num_nodes=2: `zaya train` starts ranks on one machine only.",
        ),
        (["train", "--nonsense"], 2, "--nonsense: no such option. Allowed: key=value, "),
    ],
)
def test_mistakes_end_with_one_message_and_code_2(tmp_path, monkeypatch, capfd, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == code
    told = capfd.readouterr()
    assert message in told.err and "Traceback" not in told.err and "Error executing" not in told.err
    assert told.out == "" and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        ("trian", "zaya train"),
        ("prepare", "zaya data prepare"),
        ("import", "zaya checkpoint import"),
        ("experiment=cpu_demo", "zaya train experiment=cpu_demo"),
        ("nonsense", "zaya --help"),
        ("data prepaer", "zaya data prepare"),
        ("data doctor", "zaya doctor"),
        ("aegis statu", "zaya aegis status"),
        ("bench stp", "zaya bench step"),
        ("checkpoint lst", "zaya checkpoint list"),
        ("checkpoint exprt", "zaya checkpoint export"),
        ("export megatorn", "zaya export megatron"),
        ("export hf", "zaya checkpoint export CKPT --output DIR, for transformers, vLLM or SGLang"),
        ("export runs/first", "zaya checkpoint export CKPT --output DIR, for transformers, vLLM or SGLang"),
        ("train cpu_demo", "experiment=cpu_demo"),
        ("train cpu_deno", "experiment=cpu_demo"),
        ("train experiment=cpu_demo muon", "optim=muon"),
        ("train experiment=cpu_deno", "experiment=cpu_demo"),
        ("train --experiment cpu_demo", "experiment=cpu_demo"),
        ("checkpoint export runs/first", "zaya checkpoint export --help"),
        ("checkpoint export runs/first --outpt x --output y", "--output"),
        ("eval perplexity runs/first", "zaya eval --help"),
        ("train --steps 10 experiment=cpu_demo", "stage.train_iters=10"),
        ("train experiment=cpu_demo --resume", "resume=auto"),
        ("train experiment=cpu_demo --optim.lr=1e-3", "optim.lr=1e-3"),
        ("curriculum --run-dir runs/x", "run_dir=runs/x"),
        ("train --lr 1e-3", "optim.lr=1e-3"),
        ("train --dryrun", "--dry-run"),
        ("cpu_demo", "zaya train experiment=cpu_demo"),
        ("data --foo", "zaya data --help"),
        ("bench --steps 3", "zaya bench step"),
        ("export slurm cpu_demo", "experiment=cpu_demo"),
        ("bench step cpu_demo", "experiment=cpu_demo"),
        ("export megatron cpu_demo", "experiment=cpu_demo"),
        ("curriculum experiment=cpu_demo --only demo3", "--only demo_3"),
    ],
)
def test_a_command_or_word_that_does_not_exist_suggests_the_one_that_was_meant(capsys, words, fix):
    assert cli.main(words.split()) == 2
    assert capsys.readouterr().err.endswith(f" Fix: {fix}.\n")


def test_the_data_of_the_demo_is_made_by_one_command(tmp_path, monkeypatch, capfd):
    """A dataset made otherwise has another vocabulary, and the demo other losses than README's."""
    root = Path(__file__).resolve().parents[2]
    written = re.compile(r"data prepare --input stdlib --output data/stdlib[^\n]*")
    files = [
        root / "Makefile",
        root / "README.md",
        *(root / "docs").glob("*.md"),
        *(root / "zaya_plugin").rglob("*.py"),
    ]
    for file in files:
        for command in written.findall(file.read_text()) if file.name != "log.md" else ():
            assert DEMO_DATA.endswith(command.rstrip()), file
    assert "data prepare" in (root / "Makefile").read_text() and f"  {DEMO_DATA}\n" in train_help()
    monkeypatch.chdir(tmp_path)
    for words in (["train", "experiment=cpu_demo"], ["curriculum", "experiment=cpu_demo", "--dry-run"]):
        cli.main(words)
        assert f" Fix: {DEMO_DATA} (the same command" in capfd.readouterr().err
    cli.main(["train", "experiment=cpu_demo", "data.path=/none/stdlib"])
    assert f" Fix: {DEMO_DATA.replace('data/stdlib', '/none/stdlib')} (" in capfd.readouterr().err


@pytest.mark.parametrize(
    "variable, override", [("ZAYA_TRACEBACK", "optim.lrr=1"), ("HYDRA_FULL_ERROR", "stage.global_batch_size=10")]
)
def test_a_traceback_on_request(zaya, variable, override):
    done = zaya("train", "experiment=cpu_demo", override, **{variable: "1"})
    assert "Traceback" in done.stderr and "ValueError" in done.stderr and done.returncode != 0


def test_dry_run_says_what_would_run_and_creates_nothing(zaya):
    words = ("train", "experiment=cpu_demo", "nproc=4", "cluster.environment.NCCL_DEBUG=INFO")
    short = zaya(*words, "--dry-run").stdout.splitlines()
    assert short[0].startswith("verdict      does not start: data.path=data/stdlib: there is no dataset at this path")
    assert len(short) <= 20 and not any("NCCL_DEBUG" in line or "--seed" in line for line in short)
    done = zaya(*words, "dry_run=true", "--verbose")
    assert done.stdout.splitlines()[0] == short[0] and "  --seed 1234\n" in done.stdout
    assert done.returncode == 2, done.stderr
    assert f"run_dir      {zaya.place}/runs/cpu_demo\n" in done.stdout
    assert "world size   4 ranks, 4 on this machine, started by zaya train\n" in done.stdout
    assert "1 micro-batches of 4 a data-parallel rank" in done.stdout
    assert "torch.distributed.run --nnodes 1 --nproc-per-node 4 " in done.stdout
    assert done.stdout.count("-m zaya_plugin.hosts.worker runs/cpu_demo/recipe.yaml\n") == 1
    for line in (
        "CUDA_VISIBLE_DEVICES=\n",
        "OMP_NUM_THREADS=",
        "TORCHDYNAMO_DISABLE=1\n",
        "NCCL_DEBUG=INFO\n",
        "PYTHONUNBUFFERED=1\n",
    ):
        assert line in done.stdout
    started = zaya("train", "experiment=cpu_demo", "nproc=4", "cluster.environment.NCCL_DEBUG=INFO")
    assert done.stderr == started.stderr and started.returncode == 2, "the run stops with the same words"
    assert done.stderr.startswith("zaya: data.path=data/stdlib: there is no dataset at this path")
    assert done.stdout.endswith("dry_run=true: nothing was created or started\n")
    assert list(zaya.place.iterdir()) == []


def test_multirun_gives_every_job_its_own_directory_and_leaves_no_litter(zaya):
    done = zaya("train", "-m", "experiment=cpu_demo", "optim.lr=1e-3,2e-3", "dry_run=true")
    assert done.returncode == 2 and "data/stdlib: there is no dataset" in done.stderr
    assert "job 0: experiment=cpu_demo optim.lr=0.001 dry_run=True -> runs/cpu_demo/0" in done.stdout
    assert "job 1: experiment=cpu_demo optim.lr=0.002 dry_run=True -> runs/cpu_demo/1" in done.stdout
    assert f"run_dir      {zaya.place}/runs/cpu_demo/1\n" in done.stdout
    assert list(zaya.place.iterdir()) == []


def test_multirun_reports_the_jobs_that_cannot_run(zaya):
    done = zaya("train", "experiment=cpu_demo", "stage.global_batch_size=10,16", "dry_run=true", "--multirun")
    assert done.returncode == 2
    assert "stage.global_batch_size=10" in done.stderr and "job 1" in done.stdout and "world size" in done.stdout


def test_own_recipes_from_a_directory(zaya):
    folder = zaya.place.parent / "my=dir" / "experiment"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - cpu_demo\n  - _self_\nname: mine\n")
    done = zaya("train", "--config-dir", str(folder.parent), "experiment=mine", "--cfg", "job")
    assert done.returncode == 0, done.stderr
    assert "name: mine\n" in done.stdout and "name: zaya_tiny" in done.stdout


def test_composing_and_launching_import_no_torch(tmp_path, environment):
    program = (
        "import sys; from zaya_plugin.cli import main; code = main(sys.argv[1:]);slow = {'torch', 'megatron.core', "
        "'transformers', 'wandb'} & set(sys.modules); assert not slow, slow; sys.exit(code)"
    )
    for arguments, code in (
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "experiment=cpu_demo", "dry_run=true"], 2),  # without its data
        (["train", "--cfg", "job"], 0),
    ):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_a_command_that_runs_out_of_memory_says_so(monkeypatch, capsys):
    """torch raises a RuntimeError for it."""

    def command(options):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 2^40 bytes"
        )

    monkeypatch.setattr("zaya_plugin.commands.generate.find_model", command)
    assert cli.main(["generate", "model", "--prompt", "x"]) == 2
    assert capsys.readouterr().err.startswith("zaya: memory: this command has run out of it: [enforce fail] Default")


@pytest.mark.parametrize(
    "words", [("seed=range(1,100000000)",), ("seed=range(0,2000)", "optim.lr=1e-3,2e-3,3e-3,4e-3,5e-3,6e-3")]
)
def test_a_multirun_of_too_many_jobs_is_refused_before_they_are_listed(capsys, words):
    assert cli.main(["train", "-m", "experiment=cpu_demo", *words]) == 2
    told = capsys.readouterr().err
    assert f"zaya: {words[-1]}: makes " in told and "Allowed: at most 10,000 jobs" in told

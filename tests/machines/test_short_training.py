# SPDX-License-Identifier: Apache-2.0
"""Test the checks `demo_losses` and `zaya1_base`; the real runs are slow tests."""

import math
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from zaya_plugin import compat
from zaya_plugin.bench.measurement import recipe_of
from zaya_plugin.commands.bench import settings_of, step
from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.compose import compose
from zaya_plugin.config.validate import validate
from zaya_plugin.machines import short_training
from zaya_plugin.machines.check_process import examine
from zaya_plugin.machines.checks import CHECKS, Setting
from zaya_plugin.machines.loss_rank import SkewedTokens
from zaya_plugin.plan.known_machine import machine_of

ROOT = Path(__file__).resolve().parents[2]
CPU_SETTING = Setting("cpu", 0, "CPU x86_64", Path("unused"))
STORED = list(short_training.DEMO_LOSSES)
OTHER = STORED[4] * (1 + 2e-5)


@pytest.mark.parametrize(
    ("losses", "state", "reason"),
    [
        (STORED, "pass", f"{STORED[0]:.4f} to {STORED[9]:.4f}, at most 0.0e+00"),
        ([*STORED[:9], STORED[9] * (1 + 9e-6)], "pass", "at most 9.0e-06"),
        ([*STORED[:4], OTHER, *STORED[5:]], "wrong", f"step 5: loss {OTHER:.7g}, stored {STORED[4]:.7g}"),
        ([*STORED[:6], math.nan, *STORED[7:]], "wrong", "step 7: loss nan"),
        (STORED[:3], "wrong", "3 of 10 steps, exit code 0: zaya: rank 0 failed"),
    ],
)
def test_losses_are_compared_with_the_stored_ones(monkeypatch, losses, state, reason):
    monkeypatch.setattr(short_training, "losses_of", lambda *unused: (0, losses, "a traceback\nzaya: rank 0 failed\n"))
    outcome = short_training.losses(CPU_SETTING)
    assert outcome.state == state and reason in outcome.reason, outcome.reason


def test_a_changed_stored_loss_is_wrong(monkeypatch):
    monkeypatch.setattr(short_training, "losses_of", lambda *given: (0, STORED, ""))
    monkeypatch.setattr(short_training, "DEMO_LOSSES", (*STORED[:8], STORED[8] + 1e-3, STORED[9]))
    assert short_training.losses(CPU_SETTING).reason.startswith("step 9: ")


def test_a_crash_after_the_last_step_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setattr(short_training, "RANK", "tests.machines.faulty_loss_rank")
    outcome = short_training.losses(Setting("cpu", 0, "CPU x86_64", tmp_path))
    assert (outcome.state, outcome.reason) == ("wrong", "10 of 10 steps, exit code 139: killed by SIGSEGV")
    assert outcome.figures["losses"] == STORED and "complete log" in outcome.traceback


def test_the_guide_has_the_stored_losses_and_the_predictions():
    docs = Path(__file__).parents[2] / "docs"
    guide = " ".join(f"{(docs / 'mi300x.md').read_text()}{(docs / 'cluster.md').read_text()}".split())
    assert f"{STORED[0]:.4f} to {STORED[9]:.4f}, at most" in guide
    machine = machine_of("AMD Instinct MI300X")
    rates = f"{machine.gemm_tflops:g} TFLOP/s and {machine.copy_tb_per_s:g} TB/s (PREDICTION)"
    assert rates in (docs / "checks.md").read_text()
    rows = [line.split("|") for line in (docs / "predictions.md").read_text().splitlines() if line.startswith("| ")]
    for start in ("8 MI300X", "1,024 MI300X"):
        row = [cell.strip() for cell in next(row for row in rows if row[1].strip().startswith(start))]
        assert f"{row[3].split()[0]} ms, {row[4]} tokens/s a device, {row[6]} GiB" in guide, row


def test_the_tokens_are_the_same_everywhere_and_there_is_something_to_learn():
    samples, _, _ = SkewedTokens(2048).build([4], 256, 1234, None)
    sample = samples[3]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
    assert sample["tokens"][:6].tolist() == [323, 240, 470, 1059, 482, 1094]
    assert (sample["tokens"] < 512).float().mean() > 0.5, "a quarter of the vocabulary has more than half of the tokens"


@pytest.mark.parametrize("name", ["demo_losses", "zaya1_base"])
def test_without_megatron_s_loop_a_check_is_skipped(monkeypatch, name):
    monkeypatch.setattr(compat, "zaya_train_fits", lambda: False)
    outcome = examine(CHECKS[name], CPU_SETTING)
    assert outcome.state == "skipped" and outcome.reason.endswith("without the loop that `zaya train` calls")


def test_on_a_gpu_the_same_weights_in_fp32(tmp_path):
    recipe = compose([*short_training.DEMO_RECIPE, *short_training.DEMO_ON_GPU, f"run_dir={tmp_path}"])
    validate(recipe, 1)
    values = megatron_arguments(recipe, {})
    assert values["use_cpu_initialization"] and not values["bf16"]
    assert recipe.cluster.environment["NVIDIA_TF32_OVERRIDE"] == "0" and recipe.cluster.kernels == "auto"
    assert not recipe.cluster.kernel_overrides, "cluster=gpu's choices would hide the kernels that train"


def record(share: float = 0.2) -> dict:
    step = {"share_of_gemm": share, "tokens_per_s_per_device": 50_000.0}
    model = {"vocab_size": 262_272, "num_layers": 12, "hidden_size": 2048}
    recipe = {"model": {"init_method_std": 0.02}}
    return {"step": step, "model": model, "parts": [], "rates": {}, "recipe": recipe}


@pytest.mark.parametrize(
    ("losses", "share", "state"),
    [
        ([12.8887, 12.5], 0.2, "pass"),
        ([12.8887, 12.5], 0.05, "slow"),
        ([12.8887, math.nan], 0.2, "wrong"),
        ([12.8887, 25.0], 0.2, "wrong"),
        ([12.8887 - math.log(2), 12.5], 0.2, "wrong"),  # half of the classes are left out
        ([], 0.2, "wrong"),
    ],
)
def test_a_step_is_judged_by_its_losses_and_its_rate(losses, share, state):
    outcome = short_training.judged(record(share), losses, Setting("cuda", 1, "AMD Instinct MI300X", Path("unused")))
    assert outcome.state == state and outcome.expected["loss"] == pytest.approx(12.477, abs=1e-3)
    assert state == "wrong" or "PREDICTION" in outcome.expected["kind"]


def test_a_step_that_fails_is_wrong(monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "a traceback\nRuntimeError: out of memory\n")
    monkeypatch.setattr(short_training.subprocess, "run", lambda command, **streams: failed)
    outcome = short_training.step(Setting("cpu", 0, "CPU x86_64", tmp_path))
    assert (outcome.state, outcome.reason) == (
        "wrong",
        "RuntimeError: out of memory",
    ) and "traceback" in outcome.traceback


@pytest.mark.first_cases(5)
@pytest.mark.parametrize(
    ("name", "devices", "gib", "layers"),
    [
        ("NVIDIA H100 80GB HBM3", 1, 79, range(2, 20)),
        ("AMD Instinct MI300X", 1, 191, range(25, 41)),
        ("AMD Instinct MI300X", 8, 191, range(40, 41)),
        ("AMD Instinct MI355X", 1, 287, range(40, 41)),
        ("Some GPU", 1, 24, range(1, 3)),
        ("NVIDIA H200", 1, 139, range(15, 40)),
        ("NVIDIA H200", 8, 139, range(40, 41)),
    ],
)
def test_as_many_layers_as_fit(monkeypatch, name, devices, gib, layers):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (gib * 2**30, gib * 2**30))
    words = short_training.words_on_gpu(Setting("cuda", devices, name, Path("unused")))
    options = step().read(words)
    recipe = recipe_of(settings_of(options), options.output, options.overrides)
    validate(recipe, devices)
    assert recipe.cluster.name == short_training.recipe_of(name).cluster.name
    assert recipe.model.num_layers in layers and recipe.stage.global_batch_size == 4 * devices
    assert recipe.cluster.graphs == "none" and recipe.nproc == devices


@pytest.mark.slow
def test_the_demo_s_losses_on_this_machine(tmp_path, monkeypatch):
    setting = Setting("cpu", 0, "CPU x86_64", tmp_path)
    outcome = short_training.losses(setting)
    assert outcome.state == "pass", outcome
    assert (
        max(outcome.figures["differences"]) < 1e-6
        and outcome.figures["losses"][-1] < outcome.figures["losses"][0] - 0.5
    )


@pytest.mark.slow
def test_a_small_change_of_the_model_is_detected(tmp_path, monkeypatch):
    """A model with another epsilon of its norms runs and learns; no shape shows the fault."""
    changed = (*short_training.DEMO_RECIPE, "model.norm_epsilon=1e-3", "exit_interval=3")
    monkeypatch.setattr(short_training, "DEMO_RECIPE", changed)
    monkeypatch.setattr(short_training, "DEMO_LOSSES", short_training.DEMO_LOSSES[:3])
    outcome = short_training.losses(Setting("cpu", 0, "CPU x86_64", tmp_path))
    assert outcome.state == "wrong" and 1e-5 < max(outcome.figures["differences"]) < 1e-2, outcome


@pytest.mark.slow
def test_a_small_step_on_this_machine(tmp_path):
    outcome = short_training.step(Setting("cpu", 0, "CPU x86_64", tmp_path))
    assert outcome.state == "pass" and outcome.figures["parts"]["experts"] > 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lr", "reason"), [("100", "optim.non_finite_grad"), ("1", "from random tokens")], ids=["overflow", "divergence"]
)
def test_a_learning_rate_that_diverges_is_detected(tmp_path, monkeypatch, lr, reason):
    monkeypatch.setattr(
        short_training, "STEP_ON_CPU", (*short_training.STEP_ON_CPU, f"optim.lr={lr}", "optim.lr_warmup_iters=0")
    )
    outcome = short_training.step(Setting("cpu", 0, "CPU x86_64", tmp_path))
    assert outcome.state == "wrong" and reason in outcome.reason, outcome


@pytest.mark.slow
def test_a_wrong_operator_is_detected(tmp_path, monkeypatch):
    """The ranks import a hip_ops whose loss leaves out a quarter of the classes: it runs, and no shape shows the
    fault.
    """
    copied = shutil.copytree(ROOT / "hip_ops", tmp_path / "hip_ops", ignore=shutil.ignore_patterns("shipped"))
    file = copied / "ops" / "linear_cross_entropy" / "reference.py"
    text, count = re.subn(
        r"(statistics\[part, 1, rows\] = .*)\.sum\(-1\)",
        r"\1[..., :-(values.shape[-1] // 4)].sum(-1)",
        file.read_text(),
    )
    assert count == 2, "one pass and two passes over the logits"
    file.write_text(text)
    monkeypatch.chdir(tmp_path)  # the first place of `python -m`
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    outcome = short_training.step(Setting("cpu", 0, "CPU x86_64", tmp_path))
    assert outcome.state == "wrong" and "from random tokens" in outcome.reason, outcome
    assert all(loss == pytest.approx(math.log(512 * 3 / 4), rel=0.04) for loss in outcome.figures["losses"]), outcome

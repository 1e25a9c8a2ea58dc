# SPDX-License-Identifier: Apache-2.0
"""The checks `demo_losses` and `zaya1_base`: a short training, through the launcher and Megatron's loop. No torch
import: the ranks are processes of their own.

DEMO_LOSSES are of 10 steps of the demo in fp32 on synthetic tokens, made on a CPU, with RECORDED_WITH: they are
`figures.losses` of the record of `zaya verify --only demo_losses --device cpu`. Initial weights and tokens come from
the CPU's generators, seeded just before (loss_rank.py), so they are the same on every device. Rounding differs between
devices: on one H200 the ten losses differed by at most 1.3e-7 (2026-11-23).
"""

import contextlib
import io
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin.config.compose import compose
from zaya_plugin.ground import metrics_file
from zaya_plugin.machines.checks import Outcome, Setting, end_of, last_line
from zaya_plugin.machines.expected import RUN_ON, described
from zaya_plugin.plan.known_machine import machine_of, recipe_of

RANK = "zaya_plugin.machines.loss_rank"
# Shares of the matrix-product rate in a step of 16,384 tokens a device with Muon: half of what one H200 reached with 12
# layers (benchmarks/results/step12-h200.json), whose head and optimizer weigh more than those of all 40.
SHARE_OF_GEMM = 0.14
FIRST_WITHIN = 0.1  # ten times the deviation of a first loss of 256 tokens; without a tenth of the classes it is wrong
SPARE = 0.85  # of a device's free memory that the plan may fill
DEMO_STEPS = 10
DEMO_VOCABULARY = 2048
DEMO_TOLERANCE = 1e-5  # relative
RECORDED_WITH = "torch 2.13.0, megatron-core 0.19.2, one rank"
DEMO_LOSSES = (
    *(8.0144796, 8.0048695, 7.9231834, 7.7914352, 7.6592951),
    *(7.4915419, 7.4224911, 7.3697824, 7.3522863, 7.3342419),
)
# Everything that affects the numbers and is not the demo's; without dropout no step draws random numbers.
DEMO_RECIPE = (
    "experiment=cpu_demo",
    "data.path=none",
    "nproc=1",
    "optim=adamw",
    "optim.lr=2.0e-3",
    f"stage.train_iters={DEMO_STEPS}",
    "stage.global_batch_size=8",
    "stage.eval_iters=0",
    "optim.lr_warmup_iters=2",
    "optim.lr_decay_style=constant",
    "checkpoint.save_interval=null",
    "logger=none",
)
DEMO_ON_CPU = ("cluster=cpu",)
# The kernels that training uses, where they take fp32; TF32 would round the factors of products.
DEMO_ON_GPU = (
    "cluster=gpu",
    "cluster.kernels=auto",
    "cluster.dtype=fp32",
    "cluster.use_cpu_initialization=true",
    "cluster.environment.NVIDIA_TF32_OVERRIDE=0",
)
STEP_ON_CPU = (
    "experiment=cpu_demo",
    "--random-tokens=512",
    "nproc=1",
    "model.hidden_size=64",
    "model.kv_channels=8",
    "model.moe_ffn_hidden_size=48",
    "model.router_hidden_size=16",
    "stage.seq_length=64",
    "stage.micro_batch_size=2",
    "stage.global_batch_size=4",
    "optim=muon",
)


def losses_of(setting: Setting, run_dir: Path) -> tuple[int, list[float], str]:
    """Train DEMO_RECIPE; return the exit code, the loss of each step, and the output of the launcher."""
    from zaya_plugin.config.run_directory import keep_recipe, make_writable
    from zaya_plugin.run import launch, rank_plan, surroundings

    device = DEMO_ON_CPU if setting.on_cpu else DEMO_ON_GPU
    recipe = compose([*DEMO_RECIPE, *device, f"run_dir={run_dir}"])
    plan = rank_plan.make_plan(recipe, os.environ, (RANK,))
    surroundings.check_machine(recipe, plan)
    make_writable(recipe.run_dir)
    keep_recipe(recipe, recipe.run_dir)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = launch.run_ranks(plan, run_dir / "logs").code
    return code, read_losses(run_dir), errors.getvalue()


def read_losses(run_dir: Path) -> list[float]:
    """Return the losses in a run's metrics.jsonl, an empty list without one."""
    with contextlib.suppress(FileNotFoundError):
        return [row["loss"] for row in metrics_file.rows(run_dir / metrics_file.NAME) if "loss" in row]
    return []


def losses(setting: Setting) -> Outcome:
    """Compare the losses of 10 steps in fp32 with the stored ones."""
    code, measured, errors = losses_of(setting, setting.folder / "demo_losses")
    stored = list(DEMO_LOSSES)
    expected = {"losses": stored, "tolerance": DEMO_TOLERANCE, "made_with": RECORDED_WITH}
    if code or len(measured) != len(stored):
        text = f"{len(measured)} of {len(stored)} steps, exit code {code}: {last_line(errors)}"
        return Outcome("wrong", text, {"losses": measured}, expected, traceback=errors)
    differences = [abs(mine - theirs) / theirs for mine, theirs in zip(measured, stored, strict=True)]
    worst = max(
        range(len(measured)), key=lambda step: differences[step] if measured[step] == measured[step] else math.inf
    )
    right = differences[worst] <= DEMO_TOLERANCE
    text = f"{measured[0]:.4f} to {measured[-1]:.4f}, at most {differences[worst]:.1e} from the stored losses"
    if not right:
        text = f"step {worst + 1}: loss {measured[worst]:.7g}, stored {stored[worst]:.7g}"
    return Outcome("pass" if right else "wrong", text, {"losses": measured, "differences": differences}, expected)


def step(setting: Setting) -> Outcome:
    """Measure a short step of ZAYA1-base by `zaya bench step`, of a small ZAYA on a CPU."""
    output = setting.folder / "step"
    words = STEP_ON_CPU if setting.on_cpu else words_on_gpu(setting)
    setting.say(" ".join(word for word in words if "layers" in word or "nproc" in word))
    command = [sys.executable, "-m", "zaya_plugin.cli", "bench", "step", *words]
    command += ["--steps=2", "--warmup=2", "--no-trace", f"--output={output}"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode or not (output / "step.json").is_file():
        return Outcome("wrong", last_line(done.stdout), {"words": words}, traceback=end_of(done.stdout))
    record = json.loads((output / "step.json").read_text())
    return judged(record, read_losses(output), setting)


def words_on_gpu(setting: Setting) -> tuple[str, ...]:
    """Return the words of `zaya bench step`: all devices, 16,384 tokens on each, as many layers as fit."""
    import torch

    from zaya_plugin.bench.options import VOCABULARY
    from zaya_plugin.plan.recipe_plan import plan_of

    cluster = recipe_of(setting.name).cluster.name
    keys = (
        "experiment=zaya1_base",
        f"cluster={cluster}",
        f"nproc={setting.devices}",
        "stage.micro_batch_size=4",
        f"stage.global_batch_size={4 * setting.devices}",
        "parallel.recompute_granularity=null",
        "cluster.graphs=none",
        "logger=none",
    )
    torch.cuda.empty_cache()
    free = SPARE * min(torch.cuda.mem_get_info(index)[0] for index in range(setting.devices))
    recipe = compose([*keys, "data.path=none"])
    layers = recipe.model.num_layers
    while layers > 1 and plan_of(recipe, setting.devices, VOCABULARY).total > free:
        layers -= 1
        recipe = replace(recipe, model=replace(recipe.model, num_layers=layers))
    return (*keys, f"model.num_layers={layers}", "--random-tokens")


def judged(record: dict[str, Any], losses: list[float], setting: Setting) -> Outcome:
    """Judge a step.json: losses near those of random guesses, and a share of the matrix-product rate.

    Random tokens have nothing to learn. At the first step the final norm's rows have length sqrt(h) and the head's
    weights are normal, so the logits are normal with variance v = h * init_method_std^2, and the mean loss of random
    labels is ln(V) + v / 2: 12.887 for ZAYA1-base, where one H200 had 12.8887 (benchmarks/results/verify-h200.json).
    """
    measured, model = record["step"], record["model"]
    guess = math.log(model["vocab_size"])
    first = guess + 0.5 * model["hidden_size"] * record["recipe"]["model"]["init_method_std"] ** 2
    figures = {
        "step": measured,
        "parts": {row["part"]: row["ms"] for row in record["parts"]},
        "rates": record["rates"],
        "model": model,
        "losses": losses,
        "recipe": record["recipe"],
    }
    share = measured["share_of_gemm"]
    expected = {"first_loss": first, "first_within": FIRST_WITHIN, "loss": guess, "within": 0.1 * guess}
    if not losses or not all(abs(loss - guess) < 0.1 * guess for loss in losses):
        return Outcome("wrong", f"losses {losses}, expected {guess:.2f} from random tokens", figures, expected)
    if abs(losses[0] - first) > FIRST_WITHIN:
        text = f"first loss {losses[0]:.4f}, expected {first:.4f} from random tokens and untrained weights"
        return Outcome("wrong", text, figures, expected)
    text = f"{model['num_layers']} layers, {measured['tokens_per_s_per_device']:,.0f} tokens/s a device, "
    text += f"loss {losses[-1]:.3f}"
    if setting.on_cpu:
        return Outcome("pass", text, figures, expected)
    text += f", {share:.1%} of the matrix-product rate"
    machine = machine_of(setting.name)
    expected |= described(machine, share_of_gemm=SHARE_OF_GEMM)
    if machine is None or machine.name not in RUN_ON:
        expected["kind"] = "PREDICTION, from one H200"
    slow = share < SHARE_OF_GEMM
    text += f"; expected {SHARE_OF_GEMM:.0%} or more" if slow else ""
    return Outcome("slow" if slow else "pass", text, figures, expected)

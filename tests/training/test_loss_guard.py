# SPDX-License-Identifier: Apache-2.0
"""Loss spikes: what is one, what is none, and a run that rolls back over one."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest

from tests.cpu_speed import allowed
from tests.running import MICRO, train
from zaya_plugin.aegis.collectors.rank_files import Guards, read_beats
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.exit_codes import ROLL_BACK
from zaya_plugin.training.loss_guard import LossGuard, make_guard, robust_z


def guarded(losses, norms=None, **named):
    guard = LossGuard(**{"window": 64, "threshold": 8.0, "patience": 3, **named})
    norms = [1.0] * len(losses) if norms is None else norms
    return guard, [guard.add(step, *each) for step, each in enumerate(zip(losses, norms, strict=True), 1)]


def noisy(count, seed=1, start=3.0, end=3.0, noise=0.05):
    draw = random.Random(seed)
    return [start + (end - start) * i / count + draw.gauss(0, noise) for i in range(count)]


def test_the_z_score_is_that_of_median_and_mad():
    values = [1.0, 2.0, 3.0, 4.0, 100.0]  # median 3, distances 2 1 0 1 97, MAD 1
    assert robust_z(6.0, values) == pytest.approx(3 / 1.4826) and robust_z(0.0, values) == pytest.approx(-3 / 1.4826)
    assert robust_z(2.0, [2.0] * 9) == 0.0 and robust_z(2.02, [2.0] * 9) == pytest.approx(10.0)
    assert robust_z(5.0, []) == 0.0


def test_noise_falling_losses_and_single_outliers_are_no_reason_to_act():
    for seed in range(6):
        _, found = guarded(noisy(600, seed) + noisy(600, seed + 50, 3.0, 1.0), noisy(1200, seed + 99, 1.0, 1.0, 0.2))
        assert not any(found)
    losses = noisy(400)
    losses[100] = losses[200] = losses[201] = 9.0
    found = [spike for spike in guarded(losses)[1] if spike]
    assert [(spike.step, spike.first_step, spike.in_a_row, spike.acts) for spike in found] == [
        (101, 101, 1, False),
        (201, 201, 1, False),
        (202, 201, 2, False),
    ]


def test_a_spike_that_lasts_acts_once_and_names_its_first_step():
    losses = noisy(100) + [4.5] * 10 + noisy(50)
    found = [spike for spike in guarded(losses)[1] if spike]
    assert [spike.step for spike in found] == list(range(101, 111))
    assert [spike.step for spike in found if spike.acts] == [103]
    acted = found[2]
    assert acted.first_step == 101 and acted.usual == pytest.approx(median(losses[36:100])) and acted.loss_z > 8
    assert acted.text.startswith("step 103: the loss 4.5000 is ") and acted.text.endswith("since step 101: 3 in a row")


def test_the_norm_of_the_gradients_halves_what_the_loss_needs_and_does_nothing_alone():
    losses, norms = noisy(100), noisy(100, 7, 1.0, 1.0, 0.1)
    middle = median(losses[36:])
    mad = median(abs(each - middle) for each in losses[36:])
    six = middle + 6 * 1.4826 * mad
    assert guarded([*losses, six], [*norms, 1.0])[1][-1] is None
    assert guarded([*losses, middle], [*norms, 50.0])[1][-1] is None
    spike = guarded([*losses, six], [*norms, 50.0])[1][-1]
    assert spike.loss_z == pytest.approx(6, abs=0.01) and spike.norm_z > 100
    assert guarded([*losses, six], [*norms, None])[1][-1] is None


def test_values_that_are_not_finite_are_not_the_guards():
    guard, found = guarded([*noisy(100), float("nan"), float("inf")], [1.0] * 100 + [float("nan")] * 2)
    assert not any(found) and len(guard._usual) == 64


def test_a_loss_that_stays_high_becomes_the_usual_one():
    losses = noisy(100) + noisy(200, 2, 5.0, 5.0)
    found = guarded(losses, window=32)[1]
    assert all(found[100:132]) and not any(found[132:]) and sum(spike.acts for spike in found if spike) == 1


def test_a_resumed_run_is_guarded_from_its_first_step(tmp_path):
    rows = [{"step": step, "loss": loss, "grad_norm": 1.0} for step, loss in enumerate(noisy(150), 1)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 140, "valid_loss": 9.0}])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    recipe = compose([*MICRO, "data.path=x", f"run_dir={tmp_path}"])
    assert make_guard(recipe, 140).add(141, 9.0, 1.0).in_a_row == 1
    assert make_guard(recipe, 100).add(101, 9.0, 1.0) is None  # 100 steps, and the window is 128
    assert make_guard(recipe, 0).add(1, 9.0, 1.0) is None
    recipe.guard.loss_spike = "off"
    assert make_guard(recipe, 140) is None


def test_a_step_costs_less_than_a_millisecond():
    guard = LossGuard(128, 8.0, 3)
    start = time.process_time()
    for step, loss in enumerate(noisy(500), 1):
        guard.add(step, loss, 1.0)
    assert time.process_time() - start < allowed(0.5)


@pytest.mark.parametrize("entry", ["0", "20", "18-20", "9-8", "a", "-3", "3-", "1.5", "3,4"])
def test_steps_to_skip_that_are_none(entry):
    recipe = compose([*MICRO, "data.path=x", f"data.skip_steps=['{entry}']"])
    with pytest.raises(ValueError, match=r"data.skip_steps=.*not a step or range of steps.*from 1 to 19"):
        validate(recipe, 1)


RUN = (*MICRO, "nproc=2", "stage.eval_iters=0", "stage.train_iters=30", "checkpoint.save_interval=10")
RUN += ("guard.window=16", "guard.threshold=12", "guard.patience=2", "guard.loss_spike=roll_back", "resume=auto")


def ranks(folder, port, *words, first=99, last=99, data):
    """Two ranks as an agent starts them; returns their exit codes and what they wrote to stderr."""
    recipe = compose([*RUN, f"run_dir={folder / 'run'}", f"data.path={data}", *words])
    (folder / "aegis").mkdir(exist_ok=True)
    path = folder / "recipe.yaml"
    save_recipe(recipe, path)
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"ZAYA_AEGIS_DIR": str(folder / "aegis"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.training.spiking_rank", str(path), str(first), str(last)]
    started = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=300)[1] for process in started]
    return [process.returncode for process in started], told


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row for row in rows if "loss" in row}


@pytest.mark.slow  # three runs of two ranks
def test_a_run_rolls_back_over_a_spike_and_leaves_its_batches_out(corpus, tmp_path):
    spike = dict(first=19, last=25, data=corpus)
    codes, told = ranks(tmp_path, free_port(), "guard.skip_data=true", **spike)
    assert codes == [ROLL_BACK, ROLL_BACK], told
    rows = rows_of(tmp_path)
    assert max(rows) == 20 and [step for step, row in rows.items() if "loss_spike" in row] == [19, 20]
    assert rows[20]["loss_spike"] > 12
    assert "guard.loss_spike=roll_back: the loss has spiked since step 19; later checkpoints than of step 17" in told[0]
    assert "iter_0000010" in told[0] and "data.skip_steps=[18-20]" in told[0]
    (evidence,) = Path(tmp_path / "aegis").glob("rank*.guard.json")
    evidence = json.loads(evidence.read_text())
    assert (evidence["kind"], evidence["rank"], evidence["first_step"], evidence["step"]) == ("loss_spike", 1, 18, 20)
    assert evidence["skip"] == [18, 20] and evidence["first_spike"] == 19
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("iter_*"))
    assert saved == ["iter_0000010"]
    beats = read_beats(tmp_path / "aegis")
    assert [(beats[rank]["phase"], beats[rank]["step"]) for rank in (0, 1)] == [("end", 20)] * 2
    assert beats[1]["loss"] > 20 and all(0 < beat["busy_seconds"] < beat["step_seconds"] for beat in beats.values())

    codes, told = ranks(tmp_path, free_port(), "data.skip_steps=['19-25']", **spike)
    assert codes == [0, 0], told
    rows = rows_of(tmp_path)
    assert sorted(rows) == [*range(1, 19), *range(26, 31)]
    assert rows[26]["consumed_samples"] == 26 * 8


@pytest.mark.slow  # a run of two ranks
def test_checkpoints_from_the_first_spike_on_are_put_aside(corpus, tmp_path):
    words = ("guard.patience=3", "checkpoint.save_interval=2", "checkpoint.save=sync", "checkpoint.keep_last=3")
    codes, told = ranks(tmp_path, free_port(), *words, first=19, last=25, data=corpus)
    assert codes == [ROLL_BACK, ROLL_BACK], told
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").glob("iter_*"))
    assert saved == ["iter_0000016", "iter_0000018.failed", "iter_0000020.failed"]
    assert "iter_0000016" in told[0]


@pytest.mark.slow  # a run of two ranks
def test_gradients_that_are_not_finite_ask_for_the_same(corpus, tmp_path):
    runaway = ("optim.lr=100", "optim.min_lr=0", "optim.lr_warmup_iters=0", "checkpoint.save_interval=1")
    codes, told = ranks(tmp_path, free_port(), *runaway, data=corpus)
    assert codes == [ROLL_BACK, ROLL_BACK], told
    guards = Guards("n1", tmp_path / "aegis").poll(1.0)
    assert [(e.rule, e.rank, e.values["first_step"]) for e in guards] == [("non_finite", 0, 4), ("non_finite", 1, 4)]
    assert guards[0].text.startswith("step 4: optim.non_finite_gradients=stop: ") and "iter_0000003" in told[0]


@pytest.mark.slow  # two runs
def test_steps_that_are_skipped_change_no_other_batch_and_no_learning_rate(corpus, tmp_path):
    words = ("nproc=1", "stage.eval_iters=0", "optim.lr=1e-12", "optim.min_lr=1e-13", "model.balancing_lr=1e-12")
    whole = train(tmp_path / "whole", corpus, *words).steps()
    rest = train(tmp_path / "rest", corpus, *words, "data.skip_steps=['1','7-9']").steps()
    assert sorted(set(whole) - set(rest)) == [1, 7, 8, 9]
    for step, row in rest.items():
        assert row["loss"] == pytest.approx(whole[step]["loss"], abs=2e-6), step  # the weights hardly move
        assert (row["lr"], row["consumed_samples"]) == (whole[step]["lr"], whole[step]["consumed_samples"])

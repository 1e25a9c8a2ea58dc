# SPDX-License-Identifier: Apache-2.0
"""A run resumes with each change that docs/keys.md permits, and the change does what the table says.

Refused changes never start a rank (tests/config/test_resume.py). A changed learning rate without a whole run is in
tests/hosts/test_own_loop.py.
"""

import functools
import json
import shutil
from pathlib import Path

import pytest

from tests.faults.micro_curriculum import SMALL
from zaya_plugin.config.schema import leaves

pytestmark = pytest.mark.filterwarnings("ignore")
RULES = {path: field.metadata["resume"] for path, field in leaves()}
TRAIN = ("train", "experiment=cpu_demo", "optim=muon", *SMALL, "nproc=1", "resume=auto", "stage.train_iters=6")
TRAIN = (*TRAIN, "optim.overrides=['*.router.* lr_mult=0.5']", "stage.batch_size_ramp='0:2'")

# What is passed besides `key=value` to make the change possible or visible.
WSD = ("optim.lr_decay_style=WSD", "optim.lr_wsd_decay_iters=4")
WARNING = {
    "model.init_method_std": ("0.1",),
    "model.router_init_std": ("0.1",),
    "model.scaled_output_init": ("true",),
    "model.temperature_init": ("2",),
    "model.residual_in_fp32": ("false",),
    "model.balancing_lr": ("0.5",),
    "model.balancing_beta1": ("0.9",),
    "model.balancing_beta2": ("0.5",),
    "model.balancing_eps": ("1e-1",),
    "model.balancing_centering": ("true",),
    "stage.global_batch_size": ("4", "stage.batch_size_ramp=null"),
    "stage.batch_size_ramp": ("null",),
    "stage.train_iters": ("7",),
    "data.path": ("{copy}",),
    "data.valid_path": ("{copy}",),
    "data.valid_blend": ("['1 {copy}']",),
    "data.tokenizer": ("{copy}/tokenizer",),
    "data.skip_steps": ("['4']",),
    "optim.lr": ("5e-4",),
    "optim.min_lr": ("3e-4",),
    "optim.lr_decay_style": ("linear",),
    "optim.lr_warmup_iters": ("5",),
    "optim.lr_warmup_init": ("1e-4", "optim.lr_warmup_iters=5"),
    "optim.lr_decay_iters": ("5",),
    "optim.lr_wsd_decay_iters": ("4", "optim.lr_decay_style=WSD"),
    "optim.lr_wsd_decay_style": ("linear", *WSD),
    "optim.weight_decay": ("50",),
    "optim.adam_beta1": ("0.5",),
    "optim.adam_beta2": ("0.5",),
    "optim.adam_eps": ("1e-2",),
    "optim.clip_grad": ("0.01",),
    "optim.z_loss": ("1",),
    "optim.grad_reduce_in_fp32": ("false",),
    "optim.muon_momentum": ("0.5",),
    "optim.muon_nesterov": ("false",),
    "optim.muon_steps": ("1",),
    "optim.muon_coefficients": ("quintic",),
    "optim.muon_dtype": ("bf16",),
    "optim.muon_rms_scale": ("2",),
    "optim.muon_momentum_dtype": ("bf16",),
    "optim.muon_split_gate_up": ("true",),
    "handover.from_run": ("{run}",),
    "handover.from_hf": ("{copy}",),
    "handover.optimizer": ("reset",),
    "handover.planned_samples": ("20",),
    "megatron": ("{{manual_gc: true}}",),
    "megatron_unchecked": ("{{manual_gc: true}}",),
}
SAME_LOSSES = {path for path in WARNING if RULES[path].why.startswith(("it has no effect", "Megatron gets", "what it"))}
SAME_LOSSES |= {
    "stage.batch_size_ramp",  # null is the constant size of the entry '0:2'
    "model.balancing_centering",  # routing reads differences of biases
    "handover.planned_samples",  # no sample is repeated
    "optim.grad_reduce_in_fp32",  # an fp32 model
    "model.residual_in_fp32",
}
ADAMW = {"optim.lr", "optim.min_lr", "optim.adam_beta1", "optim.adam_beta2", "optim.adam_eps", "optim.weight_decay"}


def losses(run_dir: Path) -> dict[int, float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.fixture(scope="module")
def resume(tmp_path_factory, corpus, ranks):
    """Resume a run of the recipe `words` after its second step with `changes`; return the losses of its steps."""
    folder = tmp_path_factory.mktemp("runs")
    copy = shutil.copytree(corpus, folder / "copy")
    saved: dict[tuple, Path] = {}

    @functools.cache  # most tests compare with the same unchanged run
    def resumed(words: tuple, changes: tuple = ()) -> dict[int, float]:
        where = f"data.path={corpus}", f"checkpoint.path={folder / 'run/checkpoints'}"
        if words not in saved:
            saved[words] = folder / f"saved{len(saved)}"
            shutil.rmtree(folder / "run", ignore_errors=True)
            ranks.finish(*TRAIN, *words, f"run_dir={folder / 'run'}", *where, "exit_interval=2")
            (folder / "run").rename(saved[words])
        shutil.rmtree(folder / "run", ignore_errors=True)
        shutil.copytree(saved[words], folder / "run")
        written = len(ranks.log.read_text())
        changes = [change.format(copy=copy, run=folder / "run") for change in changes]
        ranks.finish(*TRAIN, *words, f"run_dir={folder / 'run'}", *where, *changes)
        assert "continuing after step 2" in ranks.log.read_text()[written:]
        assert not list((folder / "run" / "checkpoints").glob("*.failed"))
        return losses(folder / "run")

    return resumed


def test_the_table_is_whole():
    warns = {path for path, rule in RULES.items() if rule.rule == "warns"}
    assert WARNING.keys() == warns, "each key that warns needs a row of WARNING, with a value that changes the run"


@pytest.mark.slow
@pytest.mark.parametrize("path", WARNING)
def test_a_run_resumes_with_a_change_that_warns(resume, path):
    words = ("optim=adamw",) if path in ADAMW else ()
    plain, (value, *others) = resume(words), WARNING[path]
    changed = resume(words, (f"{path}={value}", *others))
    assert changed.keys() - {7} == plain.keys() - ({4} if path == "data.skip_steps" else set())
    assert (changed[6] == plain[6]) == (path in SAME_LOSSES), "the change has the effect that the table says"


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [(), ("optim=adamw",), ("parallel.use_distributed_optimizer=false",)], ids=["muon", "adamw", "no shards"]
)
@pytest.mark.parametrize(
    "overrides",
    [
        "[]",
        "['*.router.* lr_mult=0.25 weight_decay_mult=0']",
        "['*.router.* lr_mult=0.5','*.linear_q.weight lr_mult=2','*bias* weight_decay_mult=3']",
    ],
)
def test_multipliers_may_change_and_with_them_the_number_of_groups(resume, words, overrides):
    plain, changed = resume(words), resume(words, (f"optim.overrides={overrides}", "optim.lr=5e-4"))
    assert changed[3] == plain[3] and changed[6] != plain[6]


HARMLESS = {
    "steps": ("stage.micro_batch_size=2", "checkpoint.save_interval=1", "exit_interval=6", "logger.log_interval=2"),
    "validation": ("stage.eval_interval=2", "stage.eval_iters=1", "checkpoint.save=sync", "data.num_workers=1"),
    "memory": (
        "parallel.recompute_granularity=full",
        "parallel.recompute_method=block",
        "parallel.recompute_num_layers=1",
    ),
    "layout": ("parallel.ddp_bucket_size=3000", "parallel.overlap_grad_reduce=true", "cluster.deterministic=true"),
    "names": ("name=b", "model.name=b", "stage.name=b", "cluster.name=b", "logger.tensorboard=true"),
    "guard": (
        "guard.loss_spike=warn",
        "guard.window=16",
        "optim.non_finite_gradients=skip",
        "profile.enabled=true",
        "profile.step_start=5",
        "profile.step_end=6",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("group", HARMLESS)
def test_a_run_resumes_with_changes_that_need_no_word(resume, group):
    changes = HARMLESS[group]
    assert all(RULES[change.split("=")[0]].rule == "may change" for change in changes)
    plain, changed = resume(()), resume((), changes)
    assert changed.keys() == plain.keys() and changed[6] == pytest.approx(plain[6], abs=1e-4)


@pytest.mark.slow
def test_each_validation_reads_the_same_samples_and_is_in_the_metrics_once(tmp_path, corpus, ranks):
    words = (*TRAIN, f"run_dir={tmp_path}", f"data.path={corpus}", "stage.eval_interval=3", "stage.eval_iters=2")

    def validations():
        rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["valid_loss"], row["valid_tokens"]) for row in rows if "valid_loss" in row]

    ranks.finish(*words, "optim.lr=1e-12", "optim.min_lr=0", "model.balancing_lr=0")
    (first, loss, tokens), last = validations()
    assert (first, tokens) == (3, 2 * 2 * 16) and last[0] == 6 and last[2] == tokens
    assert last[1] == pytest.approx(loss, abs=1e-6), "the same weights, so the same loss"
    found = validations()
    ranks.finish(*words)
    assert validations() == found, "a finished run that is resumed adds no row"
    ranks.finish(*words, "stage.train_iters=7", "stage.eval_iters=1", "stage.eval_interval=1")
    assert [row[0] for row in validations()] == [3, 6, 7] and validations()[-1][2] == 2 * 16

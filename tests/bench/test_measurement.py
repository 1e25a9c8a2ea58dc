# SPDX-License-Identifier: Apache-2.0
"""Test the command line of `zaya bench step`, the recipe that it measures, and its messages."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest

from zaya_plugin import cli
from zaya_plugin.bench import measurement, step_report
from zaya_plugin.bench.attribution import Activity
from zaya_plugin.bench.options import Options
from zaya_plugin.bench.step_parts import PARTS
from zaya_plugin.bench.step_record import breakdown, host_microseconds
from zaya_plugin.bench.trace import parse
from zaya_plugin.checkpoint.run_lock import RunLock
from zaya_plugin.commands.bench import settings_of, step
from zaya_plugin.config.validate import validate
from zaya_plugin.plan.step_work import Work
from zaya_plugin.run import launch


def test_options_and_overrides_are_distinguished(tmp_path):
    read = step().read(
        [
            "experiment=cpu_demo",
            "--steps",
            "7",
            "--warmup=2",
            "--no-trace",
            "--output=there",
            "--random-tokens=512",
            "optim.lr=1e-3",
            "--forward-backward-only",
            "--commit=abc",
            "--config-dir",
            str(tmp_path),
        ]
    )
    options, output, rest = settings_of(read), read.output, read.overrides
    assert (options.steps, options.warmup, options.trace, options.optimizer) == (7, 2, False, False)
    assert (options.random_tokens, options.commit, output) == (512, "abc", "there")
    assert rest == ["experiment=cpu_demo", "optim.lr=1e-3", f"hydra.searchpath=['file://{tmp_path}']"]
    assert options.command.startswith("zaya bench step experiment=cpu_demo --steps 7 --warmup=2 ")
    assert Options(**json.loads(json.dumps(asdict(options)))) == options
    assert step().read(["--random-tokens"]).random_tokens == 262_272


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--steps", "0"], "--steps: '0' is not a whole number from 1 to 9999999. Fix: zaya bench step --help"),
        (["--warmup=some"], "--warmup: 'some' is not a whole number from 1 to 9999999"),
        (["--random-tokens=1"], "--random-tokens: '1' is not a whole number from 2 to 2147483647"),
        (["--steps"], "--steps: expected one argument"),
    ],
)
def test_mistakes_are_named(words, complaint):
    with pytest.raises(ValueError, match=complaint):
        step().read(words)


def test_mistakes_of_the_command_line():
    with pytest.raises(ValueError, match="--nonsense: no such option. Allowed: key=value, "):
        step().read(["experiment=cpu_demo", "--nonsense"])


@pytest.mark.parametrize("experiment", ["cpu_demo", "zaya1_base", "zaya1_base_32k"])
def test_the_recipe_keeps_the_step_and_drops_what_surrounds_it(experiment):
    overrides = [
        f"experiment={experiment}",
        "data.path=none",
        "cluster=cpu",
        "optim.lr=1e-3",
        "stage.global_batch_size=16",
        "cluster.dtype=fp32",
    ]
    recipe = measurement.recipe_of(Options(steps=4, warmup=2), None, overrides)
    plain = measurement.recipe_of(Options(steps=4, warmup=2), "/elsewhere", overrides)
    assert recipe.run_dir == f"runs/{recipe.name}/bench" and plain.run_dir == "/elsewhere"
    assert (
        recipe.stage.train_iters == 4 + 2 + 3
        and recipe.stage.eval_iters == 0
        and recipe.checkpoint.save_interval is None
    )
    assert recipe.optim.lr == 1e-3 and recipe.optim.lr_warmup_iters == 0 and recipe.handover.from_run is None
    assert recipe.logger.wandb and recipe.logger.wandb_mode == "offline"
    validate(recipe, recipe.parallel.context_parallel_size)


def test_without_an_optimizer_the_memory_plan_which_counts_it_is_not_checked():
    overrides = ["experiment=zaya1_base", "data.path=none"]
    recipes = (measurement.recipe_of(Options(optimizer=whole), None, overrides) for whole in (True, False))
    assert [recipe.cluster.memory_gib for recipe in recipes] == [192, None]


def test_help_needs_no_torch():
    program = (
        "import sys; from zaya_plugin.cli import main; code = main(['bench', 'step', '--help']); assert 'torch' not in "
        "sys.modules; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for option in ("--steps", "--warmup", "--no-trace", "--output", "--forward-backward-only", "--random-tokens"):
        assert option in done.stdout


@pytest.mark.parametrize("dry", [(), ("dry_run=true",)], ids=["run", "dry run"])
def test_what_stops_a_measurement_stops_its_dry_run_before_a_rank_starts(tmp_path, monkeypatch, capsys, dry):
    def started(*_):
        raise AssertionError("a rank was started")

    monkeypatch.setattr(launch, "run_ranks", started)
    words = ("bench", "step", "experiment=cpu_demo", f"run_dir={tmp_path / 'run'}", *dry)
    file = tmp_path / "file"
    file.write_text("")
    lock = RunLock.take({"run_dir": tmp_path / "taken"})
    try:
        for more, told in (
            ((f"data.path={tmp_path / 'nowhere'}",), f"{tmp_path / 'nowhere'}: there is no dataset at this path"),
            (("--random-tokens=2147483647",), "weights, gradients and optimizer state need"),
            (("--random-tokens=512", f"--output={file}"), f"run_dir={file}: cannot be written"),
            (("--random-tokens=512", f"--output={tmp_path / 'taken'}"), "a run is writing there"),
        ):
            assert cli.main([*words, *more]) == 2
            assert told in capsys.readouterr().err
    finally:
        lock.release()
    assert not (tmp_path / "run").exists()


@pytest.fixture
def record():
    activities = [
        Activity("gemm", 0.0, 60_000.0, "experts", False, False),
        Activity("norm", 60_000.0, 80_000.0, "norms", True, False),
        Activity("nccl", 70_000.0, 90_000.0, "other", False, True),
    ]
    work = {"experts": Work(30e12, 60e9), "norms": Work(0.0, 30e9)}
    step = {
        "optimizer": True,
        "steps": 5,
        "ms": 95.0,
        "ms_median": 95.0,
        "ms_all": [95.0] * 5,
        "tokens": 16_384,
        "micro_batches": 1,
        "tokens_per_s": 344_926.0,
        "tokens_per_s_per_device": 43_116.0,
        "tflops_per_device": 377.0,
        "share_of_gemm": 0.49,
        "allocated_gib": 80.0,
        "reserved_gib": 85.0,
        "resident_gib": 3.0,
        "not_computing_share": 15 / 95,
    }
    return {
        "device": "NVIDIA H200",
        "world_size": 8,
        "commit": "abc",
        "step": step,
        "rates": {"gemm_tflops": 770.0, "copy_tb_per_s": 3.0},
        "traced": {
            "source": "kernels",
            "ms": 100.0,
            "host_ms": 40.0,
            "launches": 9,
            "activities": 3,
            "from_graph": False,
            "trace": None,
        },
        **breakdown(activities, 0.0, 100_000.0, work, 770e12, 3e12),
    }


def test_the_table_says_what_the_record_holds(record):
    rows = {row["part"]: row for row in record["parts"]}
    assert rows["experts"]["ms"] == 60 and rows["experts"]["share"] == 0.6
    assert rows["experts"]["gemm_share"] == pytest.approx(30 / 0.06 / 770) and rows["experts"][
        "copy_share"
    ] == pytest.approx(1 / 3)
    assert (
        rows["norms"]["copy_share"] == rows["norms"]["roofline"] == pytest.approx(0.5)
        and rows["norms"]["backward_ms"] == 20
    )
    assert (rows["communication"]["ms"], rows["idle"]["ms"]) == (10, 10) and record["hidden_communication_ms"] == 10
    assert rows["idle"]["roofline"] is None and rows["communication"]["longest"] == [
        {"name": "nccl", "count": 1, "ms": 20.0}
    ]
    assert {part: row["activities"] for part, row in rows.items() if row["activities"]} == dict.fromkeys(
        ("experts", "norms", "communication"), 1
    )
    lines = step_report.text(record).splitlines()
    (experts,) = (line.split() for line in lines if line.startswith("experts"))
    assert experts[1:] == ["60.00", "60.0%", "60.00", "0.00", "30", "60", "65%", "33%", "65%"]
    assert any(line.split()[-2:] == ["100.00", "100.0%"] for line in lines) and any(
        "80.0 GiB allocated, 85.0 reserved" in line for line in lines
    )


def test_the_picture_has_the_parts_one_after_the_other(record):
    page = step_report.picture(record)
    (panel,) = page.panels
    assert len(panel.layers) == len(panel.rows) == len(PARTS)
    ends = [0.0, *(bar.end[0] for bar in panel.layers)]
    assert [bar.begin[0] for bar in panel.layers] == ends[:-1] and ends[-1] == pytest.approx(100)
    assert panel.rows[6] == "experts 60.0 ms, 60.0%" and len({bar.colours[0] for bar in panel.layers}) == len(PARTS)
    assert "ms a step" in page.title and step_report.COLOURS.keys() == PARTS.keys()


def test_the_host_works_where_it_does_not_wait():
    def call(name, start, end, correlation):
        return dict(
            ph="X", cat="cuda_runtime", name=name, tid=1, ts=start, dur=end - start, args={"correlation": correlation}
        )

    calls = [
        call("cudaLaunchKernel", 0, 5, 1),
        call("cudaStreamSynchronize", 10, 30, 2),
        call("cudaMemcpyAsync", 35, 40, 3),
        call("cudaDeviceSynchronize", 25, 50, 4),
        call("hipMemcpy", 90, 120, 5),
    ]
    assert host_microseconds(parse(calls), 0, 100) == 100 - 40 - 10

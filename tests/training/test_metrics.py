# SPDX-License-Identifier: Apache-2.0
import io
import json
from pathlib import Path

import pytest
import torch

from zaya_plugin.config.compose import compose
from zaya_plugin.optim.balancing import RouterStatistics
from zaya_plugin.training.metrics import Reporter, Step, sparkline, step_line
from zaya_plugin.training.sinks import Guarded, JsonLines


def _step(number, **changes):
    counts = torch.tensor([[4, 4, 4, 4, 0], [16, 0, 0, 0, 0]])
    values = dict(
        step=number,
        loss=2.5,
        lr=1e-3,
        grad_norm=0.5,
        seconds=2.0,
        tokens=8192,
        flops=4e12,
        skipped=False,
        consumed_samples=8 * number,
        last_step=10,
        memory_gib=1.5,
        statistics=RouterStatistics(counts, torch.tensor([1.0, 2.0])),
    )
    return Step(**(values | changes))


@pytest.fixture
def reporter(tmp_path):
    def make(*overrides, rank=1, world_size=2):
        recipe = compose(["experiment=cpu_demo", f"run_dir={tmp_path}", "logger.wandb=false", *overrides])
        return Reporter(recipe, rank, world_size, io.StringIO())

    return make


def test_a_row_holds_what_happened(reporter, tmp_path):
    report = reporter("cluster.peak_tflops=989", "cluster.reachable_tflops=700", "logger.expert_load_interval=2")
    report.start(None, "id", 0)
    report.step(_step(1))
    report.step(_step(2))
    report.validation(2, 2.25)
    report.close()
    first, second, validation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["tokens_per_s"] == 4096 and first["tflops_per_device"] == pytest.approx(1.0)
    assert first["mfu"] == pytest.approx(1 / 989) and first["share_of_reachable"] == pytest.approx(1 / 700)
    assert first["expert_imbalance"] == pytest.approx((1 + 4) / 2) and first["expert_imbalance_worst_layer"] == 4
    assert first["load_entropy"] == pytest.approx(0.5) and first["router_entropy"] == 1.5
    assert first["eta_s"] == pytest.approx(18.0) and "expert_load" not in first
    assert second["expert_load"] == [[0.25] * 4, [1, 0, 0, 0]]
    assert validation == {"step": 2, "valid_loss": 2.25}
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    assert [key for key in second | validation if f"`{key}`" not in page] == [], "the page explains every key"
    assert "2 steps in 0:04  loss 2.500 ▁▁ 2.500  validation 2.250" in report.out.getvalue()
    assert report.out.getvalue().endswith(f"\neverything is in {tmp_path}: metrics.jsonl\n"), "no sink has written more"
    assert "mfu 0.1%" in report.out.getvalue() and "validation loss 2.2500" in report.out.getvalue()


def test_domains_of_a_validation_are_shown_and_kept(reporter, tmp_path):
    report = reporter()
    report.start(None, "id", 0)
    report.validation(3, 2.5, {"web": 2.25, "code": 3.25})
    report.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"step": 3, "valid_loss": 2.5, "validation/web/loss": 2.25, "validation/code/loss": 3.25}
    assert "step 3: validation loss 2.5000 (web 2.2500, code 3.2500)" in report.out.getvalue()


def test_only_the_last_rank_reports(reporter, tmp_path):
    report = reporter(rank=0)
    report.start(None, "id", 0)
    report.step(_step(1))
    report.close()
    assert not (tmp_path / "metrics.jsonl").exists() and not report.out.getvalue()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_the_line_fits_its_terminal(width):
    row = dict(
        step=123456,
        last_step=1000000,
        loss=12.3456,
        lr=6e-4,
        grad_norm=123.45,
        tokens_per_s=6.7e6,
        mfu=0.4321,
        tflops_per_device=432.1,
        expert_imbalance=1.85,
        router_entropy=2.61,
        memory_gib=141.2,
        eta_s=9e5,
        skipped=1,
    )
    line = step_line(row, width)
    assert "loss 12.3456" in line and "SKIPPED" in line
    assert len(line) < max(width, 75)
    if width >= 200:
        for part in (
            "lr 6.00e-04",
            "grad 123.45",
            "6.7M tok/s",
            "mfu 43.2%",
            "load 1.85x",
            "H 2.61",
            "141.2 GiB",
            "eta 250:00:00",
        ):
            assert part in line


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    sink = JsonLines(path, resumed_at=2)
    sink.log({"step": 3, "loss": 1.0})
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_failing_sink_is_told_once_and_does_not_stop_training(capsys):
    class Full:
        def log(self, row):
            raise OSError(28, "No space left on device")

        close = log

    sink = Guarded("metrics.jsonl", Full())
    sink.log({})
    sink.log({})
    assert capsys.readouterr().err.count("No space left on device") == 1


def test_sparkline():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert len(sparkline(list(range(1000)))) == 40 and sparkline([3.0]) == "▁"


def test_sparkline_of_losses_that_are_no_numbers():
    nan, inf = float("nan"), float("inf")
    assert sparkline([2.0, nan, 1.0, inf]) == "█x▁x" and sparkline([nan, nan]) == "xx"

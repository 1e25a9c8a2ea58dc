# SPDX-License-Identifier: Apache-2.0
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from zaya_plugin.config.compose import compose
from zaya_plugin.optim.balancing import RouterStatistics
from zaya_plugin.training.metrics import Reporter, Step, sparkline, step_line
from zaya_plugin.training.sinks import Background, Guarded, JsonLines


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
    report.start("id", 0)
    report.step(_step(1))
    report.step(_step(2))
    report.validation(2, 2.25, 4096)
    report.close()
    first, second, validation = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert first["tokens_per_s"] == 4096 and first["tflops_per_device"] == pytest.approx(1.0)
    assert first["mfu"] == pytest.approx(1 / 989) and first["share_of_reachable"] == pytest.approx(1 / 700)
    assert first["expert_imbalance"] == pytest.approx((1 + 4) / 2) and first["expert_imbalance_worst_layer"] == 4
    assert first["load_entropy"] == pytest.approx(0.5) and first["router_entropy"] == 1.5
    assert first["eta_s"] == pytest.approx(18.0) and "expert_load" not in first
    assert second["expert_load"] == [[0.25] * 4, [1, 0, 0, 0]]
    assert validation == {"step": 2, "valid_loss": 2.25, "valid_tokens": 4096}
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    assert [key for key in second | validation if f"`{key}`" not in page] == [], "the page explains every key"
    assert "2 steps in 0:04  loss 2.500 ▁▁ 2.500  validation 2.250 of 4,096 tokens\n" in report.out.getvalue()
    assert report.out.getvalue().endswith(f"\neverything is in {tmp_path}: metrics.jsonl, tensorboard/\n")
    assert "mfu 0.1%" in report.out.getvalue() and "validation loss 2.2500 of 4,096 tokens\n" in report.out.getvalue()


def test_the_first_steps_of_a_start_are_left_out_of_the_eta(reporter, tmp_path):
    report = reporter()
    report.start("id", 0)
    for number, seconds in ((1001, 60.0), (1002, 1.0), (1003, 1.0)):
        report.step(_step(number, seconds=seconds, is_warm=number > 1001, last_step=2003))
    report.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["eta_s"] for row in rows] == [None, 1001, 1000]
    assert "eta" not in report.out.getvalue().splitlines()[1]


def test_domains_of_a_validation_are_shown_and_kept(reporter, tmp_path):
    report = reporter()
    report.start("id", 0)
    report.validation(3, 2.5, 64, {"web": 2.25, "code": 3.25})
    report.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {
        "step": 3,
        "valid_loss": 2.5,
        "valid_tokens": 64,
        "validation/web/loss": 2.25,
        "validation/code/loss": 3.25,
    }
    assert "step 3: validation loss 2.5000 of 64 tokens (web 2.2500, code 3.2500)" in report.out.getvalue()


def test_only_the_last_rank_reports(reporter, tmp_path):
    report = reporter(rank=0)
    report.start("id", 0)
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


def test_tensorboard_forgets_the_steps_that_a_resume_repeats(reporter, tmp_path):
    """lanpa/tensorboardX#185: steps 3 to 5 were lost, and are repeated after a resume at 2, and again after one at 3."""
    for resumed_at, last in ((0, 5), (2, 6), (3, 4)):
        report = reporter("logger.tensorboard=true")
        report.start("id", resumed_at)
        for step in range(resumed_at + 1, last + 1):
            report.step(_step(step, loss=10.0 * resumed_at + step))
        report.samples(last, ["once"], [f" upon {last}"])
        report.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts = [event.tensor_proto.string_val[0].decode() for event in events.Tensors("samples/text_summary")]
    assert texts[-1] == "    'once' -> ' upon 4'"
    found = [(event.step, event.value) for event in events.Scalars("loss")]
    assert found == [(1, 1), (2, 2), (3, 23), (4, 34)]
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == found
    assert rows[-1] == {"step": 4, "samples": [{"prompt": "once", "text": " upon 4"}]}


def test_a_folder_that_takes_no_event_files_does_not_end_a_run(reporter, tmp_path):
    """Megatron's own writer would raise at the start, and before the last save."""
    (tmp_path / "tensorboard").write_text("")
    report = reporter("logger.tensorboard=true")
    report.start("id", 0)
    report.step(_step(1))
    report.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1
    assert report.out.getvalue().count("metrics: TensorBoard failed and is incomplete from this step on: ") == 1


def test_a_failing_sink_is_reported_once_and_does_not_stop_training():
    class Full:
        def log(self, row):
            raise OSError(28, "No space left on device")

        close = log

    told = []
    for open_sink in (Full, lambda: Full().log({})):
        sink = Guarded("metrics.jsonl", open_sink, told.append)
        sink.log({})
        sink.log({})
        sink.close()
    assert len(told) == 2 and all("metrics.jsonl failed" in line and "No space left" in line for line in told)


def test_a_console_that_takes_nothing_does_not_end_a_run(tmp_path):
    """pytorch/pytorch#5109: the characters of the summary, between the last step and its save."""
    recipe = compose(["experiment=cpu_demo", f"run_dir={tmp_path}", "logger.wandb=false"])
    closed = io.StringIO()
    closed.close()
    for console in (io.TextIOWrapper(io.BytesIO(), "ascii"), open("/dev/full", "w"), closed):
        report = Reporter(recipe, 0, 1, console)
        report.start("id", 0)
        report.step(_step(1))
        report.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


class Silent:
    """A tracker that does not answer; `waiting` where it hangs."""

    def __init__(self, waiting, answer):
        self.rows, self.answer = [], answer
        if waiting == "open":
            answer.wait()
        self.log = (lambda row: answer.wait()) if waiting == "log" else self.rows.append
        self.close = answer.wait if waiting == "close" else lambda: None


@pytest.mark.parametrize("waiting", ["open", "log", "close", None])
def test_a_tracker_that_does_not_answer_stops_no_start_no_step_and_no_end(waiting, monkeypatch):
    """wandb/wandb#9865"""
    monkeypatch.setattr(Background, "END_SECONDS", 60 if waiting is None else 0.05)
    monkeypatch.setattr(Background, "HELD_ROWS", 5)
    answer, told, opened = threading.Event(), [], []
    tracker = Background("W&B", lambda: opened.append(Silent(waiting, answer)) or opened[0], told.append)
    sink = Guarded("W&B", lambda: tracker, told.append)
    assert tracker.opened.wait(0.01 if waiting == "open" else 60) == (waiting != "open")
    for number in range(4):
        sink.log({"step": number})
    sink.close()
    answer.set()
    assert len(told) == (waiting is not None) and all("no answer within 0.05 s" in line for line in told)
    if waiting is None:
        assert [row["step"] for row in opened[0].rows] == [0, 1, 2, 3]


TRACKER = """
import sys
from zaya_plugin.training.sinks import WandbRun

WandbRun.INIT_SECONDS = WandbRun.FINISH_SECONDS = 1
settings = dict(project="p", entity=None, name="n", run_id="ab12cd34", directory=sys.argv[1], config={})
run = WandbRun(mode="auto", say=print, **settings)
run.log({"step": 1, "loss": 2.0})
print(run.where)
run.close()
"""


@pytest.mark.slow  # W&B's process is given three seconds
def test_a_stored_login_is_used_and_a_server_that_does_not_answer_leaves_the_run_offline(tmp_path):
    """wandb/wandb#8003: the real wandb, with a server that takes the connection and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
        clean |= {"HOME": str(tmp_path), "WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}"}

        def run(*words, **variables):
            command = [sys.executable, *words]
            done = subprocess.run(command, env={**clean, **variables}, text=True, capture_output=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        run("-c", "import wandb; wandb.login(key='0' * 40, verify=False)")
        online = run("-c", TRACKER, str(tmp_path / "login"))
        assert "W&B is not available" in online and "offline, upload with `wandb sync" in online
        assert len(list((tmp_path / "login" / "wandb").glob("offline-run-*-ab12cd34/*.wandb"))) == 1
        asked = run("-c", TRACKER, str(tmp_path / "asked"), WANDB_MODE="offline")
        assert "not available" not in asked and "offline, upload with `wandb sync" in asked


class StandIn:
    """trackio's calls: a run of a name goes on after its last step, as in trackio.Run."""

    Table = staticmethod(lambda columns, data: [columns, *data])

    def __init__(self, first_step):
        self._next_step, self.rows, self.ended = first_step, [], False

    def init(self, **named):
        self.named = named
        return self

    def log(self, values, step):
        self.rows.append((step, values))

    def finish(self):
        self.ended = True


def test_trackio_gets_what_wandb_gets_and_no_step_twice(reporter, tmp_path, monkeypatch):
    for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
        monkeypatch.delenv(name, raising=False)
    package = StandIn(first_step=2)
    monkeypatch.setitem(sys.modules, "trackio", package)
    report = reporter("logger.trackio=true", "logger.expert_load_interval=2", "logger.wandb_group=stages")
    report.start("ab12cd34", 1)
    report.step(_step(1))
    report.step(_step(2))
    report.validation(2, 2.25, 4096)
    report.samples(2, ["def f("], ["x):\n\x1b[31m"])
    report.close()
    named = {key: package.named[key] for key in ("project", "name", "group", "resume")}
    assert named == {"project": "zaya", "name": "cpu_demo-ab12cd34", "group": "stages", "resume": "allow"}
    assert package.named["config"]["stage"]["name"] == "demo" and "space_id" not in package.named
    (step, values), validation, samples = package.rows
    assert step == 2 and values["loss"] == 2.5 and values["tokens_per_s"] == 4096
    assert values["expert_load"][:2] == [["step", "layer", "expert", "load"], [2, 1, 0, 0.25]]
    assert validation == (2, {"valid_loss": 2.25, "valid_tokens": 4096}) and package.ended
    table = [["step", "prompt", "text"], [2, "def f(", "x):\n\x1b[31m"]]
    assert samples == (2, {"samples": table})
    assert "step 2: 'def f(' -> 'x):\\n\\x1b[31m'\n" in report.out.getvalue(), "no control character is printed"
    assert "trackio: local, `trackio show --project zaya` shows it" in report.out.getvalue()


def test_without_trackio_the_run_goes_on(reporter, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    report = reporter("logger.trackio=true")
    report.start("id", 0)
    report.step(_step(1))
    report.close()
    assert "logger.trackio=true: the package trackio is not installed" in report.out.getvalue()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["step"] == 1


TRACKIO = """
import socket

addresses = []
def refuse(*address, **_):
    addresses.append(address)
    raise OSError("no network")
socket.getaddrinfo = socket.socket.connect = refuse

from zaya_plugin.training.sinks import TrackioRun
import trackio
from trackio.sqlite_storage import SQLiteStorage

for first in (1, 3):
    run = TrackioRun(project="p", name="n", run_id="ab12cd34", config={"stage": {"name": "s"}})
    for step in range(first, first + 3):
        run.log({"step": step, "loss": first / step, "expert_load": [[0.5, 0.5]]})
    run.close()
logs = SQLiteStorage.get_logs("p", "n-ab12cd34")
print([run.name for run in trackio.Api().runs("p")], [(row["step"], row["loss"]) for row in logs], addresses)
"""


@pytest.mark.slow
def test_the_real_trackio_continues_one_local_run_without_a_network(tmp_path):
    """With a login, for which trackio would ask the Hub."""
    if importlib.util.find_spec("trackio") is None:
        pytest.skip("trackio is not installed: pip install 'zaya_plugin[trackers]'")
    variables = {"HF_TOKEN": "hf_" + "a" * 34, "TRACKIO_DIR": str(tmp_path), "HF_HOME": str(tmp_path)}
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO_", "HF_"))}
    command = [sys.executable, "-c", TRACKIO]
    done = subprocess.run(command, env=clean | variables, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    steps = [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 3 / 4), (5, 3 / 5)]
    assert f"['n-ab12cd34'] {steps} []\n" in done.stdout


def test_sparkline():
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert len(sparkline(list(range(1000)))) == 40 and sparkline([3.0]) == "▁"


def test_sparkline_of_losses_that_are_no_numbers():
    nan, inf = float("nan"), float("inf")
    assert sparkline([2.0, nan, 1.0, inf]) == "█x▁x" and sparkline([nan, nan]) == "xx"

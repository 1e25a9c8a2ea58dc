# SPDX-License-Identifier: Apache-2.0
"""Test `zaya verify`: the page, the record, the exit codes and the help."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
import torch

from tests.running import zaya
from zaya_plugin.cli import main
from zaya_plugin.verify import command
from zaya_plugin.verify.line import Outcome
from zaya_plugin.verify.lines import LINES

OUTCOMES = {
    "rates": Outcome("slow", "copy 2 TB/s, expected 4.3", {"cuda:0": {"copy_tb_per_s": 2.0}}),
    "rms_norm": Outcome(
        "slow", "triton is 1.2 times faster", overrides={"cluster.kernel_overrides.rms_norm": "triton"}
    ),
    "demo_losses": Outcome("wrong", "step 3: loss 7.9", traceback="in /home/someone/x.py"),
    "all_reduce": Outcome("skipped", "one device"),
}


@pytest.fixture
def outcomes(monkeypatch):
    """What the lines find, without a process; the test may change it."""
    chosen = dict(OUTCOMES)

    class Worker:
        machine = {"device": "cuda", "devices": 8, "name": "AMD Instinct MI300X"}

        def __init__(self, device, folder, tick):
            assert folder.is_dir() and device == "auto"

        def run(self, line):
            return chosen.get(line.name, Outcome("pass", "as expected"))

        def close(self):
            pass

    monkeypatch.setattr(command, "Worker", Worker)
    return chosen


def test_the_page_and_the_record(outcomes, tmp_path, capsys):
    out = tmp_path / "verify.json"
    assert main(["verify", "--out", str(out)]) == 1
    page = capsys.readouterr().out
    for line in LINES:
        assert f" {line} " in page
    assert "wrong   demo_losses" in page and "slow    rates" in page and "step 3: loss 7.9" in page
    assert f"{len(LINES) - 4} pass, 2 slow, 1 wrong, 1 skipped" in page and "8 x AMD Instinct MI300X" in page
    assert "zaya train ... cluster.kernel_overrides.rms_norm=triton" in page
    record = json.loads(out.read_text())
    assert record["schema"] == command.SCHEMA and record["complete"] and record["machine"]["devices"] == 8
    assert [line["line"] for line in record["lines"]] == list(LINES)
    wrong = next(line for line in record["lines"] if line["line"] == "demo_losses")
    assert wrong["traceback"] == "in /home/<user>/x.py" and wrong["seconds"] >= 0
    assert record["command"].startswith("zaya verify --out") and record["zaya_plugin"]


def test_slow_alone_is_no_failure(outcomes, tmp_path, capsys):
    del outcomes["demo_losses"]
    assert main(["verify", "--out", str(tmp_path / "v.json"), "--only", "rates,environment"]) == 0
    record = json.loads((tmp_path / "v.json").read_text())
    assert [line["line"] for line in record["lines"]] == ["environment", "rates"], "in the page's order"


def test_an_interrupted_command_leaves_its_record(outcomes, tmp_path, monkeypatch):
    def stop(self, line):
        if line.name == "rates":
            raise KeyboardInterrupt
        return Outcome("pass", "")

    monkeypatch.setattr(command.Worker, "run", stop)
    assert main(["verify", "--out", str(tmp_path / "v.json")]) == 130
    record = json.loads((tmp_path / "v.json").read_text())
    assert not record["complete"] and [line["line"] for line in record["lines"]] == ["environment", "known_problems"]


def test_a_folder_that_cannot_be_removed_leaves_a_complete_record(outcomes, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fill(self):
        folder = next(tmp_path.glob("zaya-verify-*"))
        folder.rmdir()
        folder.write_text("")  # rmtree of a file is an error

    monkeypatch.setattr(command.Worker, "close", fill)
    assert main(["verify", "--out", str(tmp_path / "v.json"), "--only", "environment"]) == 0
    assert json.loads((tmp_path / "v.json").read_text())["complete"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "rates,speed"], "--only=speed: no such line. Allowed: environment, "),
        (["--out", "no/such/folder/v.json"], "--out=no/such/folder/v.json: its folder does not exist"),
        (["--out", "."], "--out=.: is a folder. Allowed: a file, "),
        (["--bundle", "runs/mine", "--out", "no/such/v.json"], "--out=no/such/v.json: its folder does not exist"),
        (["--fast"], "unrecognized arguments: --fast. Fix: zaya verify --help"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_device_is_not_replaced(tmp_path, capsys):
    """As `--out /dev/null` of root, for whom a rename replaces it on the whole machine."""
    os.mkfifo(tmp_path / "null")
    assert main(["verify", "--out", str(tmp_path / "null")]) == 2 and (tmp_path / "null").is_fifo()
    assert "is no regular file, and would be replaced by one" in capsys.readouterr().err


def test_records_of_several_nodes_in_one_folder(tmp_path):
    """Records whose names differ behind the last dot do not share a temporary file."""
    (tmp_path / "verify.new").mkdir()
    for node in ("node1", "node2"):
        command.write(tmp_path / f"verify.{node}", {"node": node})
    assert {path.name for path in tmp_path.iterdir()} == {"verify.new", "verify.node1", "verify.node2"}


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit) as left:
        main(["verify", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and all(word in text for word in ("pass", "slow", "wrong", "skipped", "Exit codes"))
    assert "docs/mi300x.md" in text and "--bundle" in text


def test_the_list_needs_no_torch():
    code = "import sys; from zaya_plugin.cli import main; main(['verify', '--list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False\n") and all(f"\n{name} " in f"\n{done.stdout}" for name in LINES)


@pytest.mark.slow  # test_environment_lines.py judges missing devices
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is found")
@pytest.mark.skipif(not (torch.version.hip or torch.version.cuda), reason="torch is built for CPUs")
def test_a_node_without_its_gpus_does_not_pass(tmp_path):
    done = zaya("verify", "--only", "environment", "--out", str(tmp_path / "v.json"))
    assert done.returncode == 1 and "finds no device" in done.stdout, done.stdout


def test_two_lines_on_this_machine(tmp_path):
    done = zaya("verify", "--device", "cpu", "--only", "rates,rms_norm", "--out", str(tmp_path / "v.json"))
    assert done.returncode == 0 and "2 pass, 0 slow, 0 wrong, 0 skipped" in done.stdout, done.stdout
    record = json.loads((tmp_path / "v.json").read_text())
    assert (
        record["lines"][1]["figures"]["scaled_residual_rms_norm"]["versions"]["reference"]["ulps"]["result[0]"]["ulps"]
        <= 0.5
    )

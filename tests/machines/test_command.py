# SPDX-License-Identifier: Apache-2.0
"""Test `zaya verify` and `zaya doctor`: the page, the record, the exit codes and the help."""

import json
import os
import subprocess
import sys
import tempfile

import pytest
import torch

from tests.running import zaya
from zaya_plugin.bench.results import write
from zaya_plugin.cli import main
from zaya_plugin.machines import examination
from zaya_plugin.machines.checks import CHECKS, DOCTOR, DOCTOR_ALL, STATES, VERIFY, Outcome, checks_of

CHECKS_OF_VERIFY = [check.name for check in checks_of(VERIFY)]

OUTCOMES = {
    "rates": Outcome("slow", "copy 2 TB/s, expected 4.3", {"cuda:0": {"copy_tb_per_s": 2.0}}),
    "rms_norm": Outcome(
        "slow", "triton is 1.2 times faster", overrides={"cluster.kernel_overrides.rms_norm": "triton"}
    ),
    "demo_losses": Outcome("wrong", "step 3: loss 7.9", traceback="in /home/someone/x.py"),
    "all_reduce": Outcome("skipped", "one device"),
    "graph_capture": Outcome("unsupported", "rank 0 was killed"),
}


@pytest.fixture
def outcomes(monkeypatch):
    """The outcomes of checks, without a process; the test may change them."""
    chosen = dict(OUTCOMES)

    class Process:
        machine = {"device": "cuda", "devices": 8, "name": "AMD Instinct MI300X"}

        def __init__(self, device, folder, storage, tick):
            assert folder.is_dir() and device == "auto"

        def run(self, check):
            return chosen.get(check.name, Outcome("pass", "as expected"))

        def close(self):
            pass

    monkeypatch.setattr(examination, "CheckProcess", Process)
    return chosen


def names(record: dict) -> list[str]:
    return [entry["check"] for entry in record["checks"]]


def test_the_page_and_the_record(outcomes, tmp_path, capsys):
    out = tmp_path / "verify.json"
    assert main(["verify", "--output", str(out)]) == 1
    page = capsys.readouterr().out
    for name in CHECKS_OF_VERIFY:
        assert f" {name} " in page
    assert "wrong       demo_losses" in page and "slow        rates" in page and "step 3: loss 7.9" in page
    assert (
        f"{len(CHECKS_OF_VERIFY) - 5} pass, 2 slow, 1 wrong, 1 unsupported, 1 skipped" in page
        and "8 x AMD Instinct MI300X" in page
    )
    assert "zaya train ... cluster.kernel_overrides.rms_norm=triton" in page
    record = json.loads(out.read_text())
    assert record["schema"] == examination.SCHEMA and not record["running"] and record["machine"]["devices"] == 8
    assert names(record) == CHECKS_OF_VERIFY
    wrong = next(entry for entry in record["checks"] if entry["check"] == "demo_losses")
    assert wrong["traceback"] == "in /home/<user>/x.py" and wrong["seconds"] >= 0
    assert record["command"].startswith("zaya verify --output") and record["zaya_plugin"]


def test_slow_and_unsupported_are_no_failure(outcomes, tmp_path, capsys):
    del outcomes["demo_losses"]
    assert main(["verify", "--output", str(tmp_path / "v.json"), "--only", "rates,environment"]) == 0
    record = json.loads((tmp_path / "v.json").read_text())
    assert names(record) == ["environment", "rates"], "in the table's order"
    capsys.readouterr()
    assert main(["verify", "--output", str(tmp_path / "v.json")]) == 0, "an unsupported check, two slow ones"
    assert "\nunsupported graph_capture " in capsys.readouterr().out
    outcomes["graph_capture"] = Outcome("wrong", "rank 0 was killed")
    assert main(["verify", "--output", str(tmp_path / "v.json")]) == 1


def test_an_interrupted_command_leaves_its_record(outcomes, tmp_path, monkeypatch):
    def stop(self, check):
        if check.name == "rates":
            raise KeyboardInterrupt
        return Outcome("pass", "")

    monkeypatch.setattr(examination.CheckProcess, "run", stop)
    assert main(["verify", "--output", str(tmp_path / "v.json")]) == 130
    record = json.loads((tmp_path / "v.json").read_text())
    assert record["running"] == "rates" and names(record) == ["known_problems", "environment"]


def test_a_folder_that_cannot_be_removed_leaves_a_complete_record(outcomes, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def fill(self):
        folder = next(tmp_path.glob("zaya-verify-*"))
        folder.rmdir()
        folder.write_text("")  # rmtree of a file is an error

    monkeypatch.setattr(examination.CheckProcess, "close", fill)
    assert main(["verify", "--output", str(tmp_path / "v.json"), "--only", "environment"]) == 0
    assert json.loads((tmp_path / "v.json").read_text())["running"] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--only", "rates,speed"], "--only=speed: no such check. Allowed: known_problems, "),
        (["--output", "/dev/null/v.json"], "--output=/dev/null: cannot be written"),
        (["--output", "."], "--output=.: is a folder. Allowed: a file, "),
        (["--bundle", "runs/mine", "--output", "/dev/null/v.json"], "--output=/dev/null: cannot be written"),
        (["--bundle", "runs/mine", "--output", "v.html"], "--output=v.html: --bundle draws no picture. Fix: "),
        (["--fast"], "--fast: no such option. Allowed: key=value, --bundle, "),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(["verify", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_device_is_not_replaced(tmp_path, capsys):
    """As `--output /dev/null` of root, for whom a rename replaces it on the whole machine."""
    os.mkfifo(tmp_path / "null")
    assert main(["verify", "--output", str(tmp_path / "null")]) == 2 and (tmp_path / "null").is_fifo()
    assert "not a regular file, and would be replaced by one" in capsys.readouterr().err


def test_records_of_several_nodes_in_one_folder(tmp_path):
    """Records whose names differ behind the last dot do not share a temporary file."""
    (tmp_path / "verify.new").mkdir()
    for node in ("node1", "node2"):
        write(tmp_path / f"verify.{node}", {"node": node})
    assert {path.name for path in tmp_path.iterdir()} == {"verify.new", "verify.node1", "verify.node2"}


PROBLEM = {"name": "dynamo-off", "severity": "warning", "evidence": "it is set", "why": "slow", "remedy": "unset it"}


def test_doctor_begins_with_its_verdict(outcomes, capsys):
    outcomes["devices"] = Outcome("pass", "torch is built for ROCm 6.4", details=["0: MI300X, 192 GiB, gfx942"])
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("training can start: no known problem\nzaya_plugin ")
    assert "torch is built for ROCm 6.4\n  0: MI300X, 192 GiB, gfx942\n" in page and " kernels " not in page
    outcomes["known_problems"] = Outcome("pass", "warning: dynamo-off", {"problems": [PROBLEM]})
    assert main(["doctor", "--all"]) == 0 and main(["doctor", "--strict"]) == 1
    page = capsys.readouterr().out
    assert page.startswith("training can start: 1 known problem, below\n") and " kernels " in page
    outcomes["devices"] = Outcome("wrong", "OSError: libamdhip64.so.6: cannot open shared object file")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("training cannot start: 1 known problem, below; wrong: devices\n")
    outcomes |= {"devices": Outcome("pass", ""), "known_problems": Outcome("wrong", "", {"problems": [PROBLEM]})}
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.startswith("training cannot start: 1 known problem, below\n")
    assert main(["doctor", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert names(record) == [check.name for check in checks_of(DOCTOR, DOCTOR_ALL)]


def test_the_help_teaches(capsys):
    with pytest.raises(SystemExit) as left:
        main(["verify", "--help"])
    text = capsys.readouterr().out
    assert left.value.code == 0 and all(word in text for word in (*STATES, "Exit codes"))
    assert "docs/mi300x.md" in text and "--bundle" in text


def test_the_list_needs_no_torch():
    code = "import sys; from zaya_plugin.cli import main; main(['verify', '--list']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.endswith("False\n") and all(f"\n{name} " in f"\n{done.stdout}" for name in CHECKS)


@pytest.mark.slow  # test_software.py judges missing devices
@pytest.mark.skipif(torch.cuda.is_available(), reason="a device is found")
@pytest.mark.skipif(not (torch.version.hip or torch.version.cuda), reason="torch is built for CPUs")
def test_a_node_without_its_gpus_does_not_pass(tmp_path):
    done = zaya("verify", "--only", "environment", "--output", str(tmp_path / "v.json"))
    assert done.returncode == 1 and "finds no device" in done.stdout, done.stdout


def test_two_checks_on_this_machine(tmp_path):
    done = zaya("verify", "--device", "cpu", "--only", "rates,rms_norm", "--output", str(tmp_path / "v.json"))
    assert done.returncode == 0 and "2 pass, 0 slow, 0 wrong, 0 unsupported, 0 skipped" in done.stdout, done.stdout
    record = json.loads((tmp_path / "v.json").read_text())
    assert (
        record["checks"][1]["figures"]["scaled_residual_rms_norm"]["versions"]["reference"]["ulps"]["result[0]"]["ulps"]
        <= 0.5
    )

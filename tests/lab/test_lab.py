# SPDX-License-Identifier: Apache-2.0
"""The parts of the lab that run anywhere, and (slow) three of its faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import __main__ as lab
from tests.lab import endurance, hooks, machine, results, stand
from tests.lab.supervised_run import PROJECT, Reference, rows
from zaya_plugin.aegis.diagnose.rules import Rules

SIGKILL = [
    {"time": 100.0, "kind": "attempt", "generation": 1, "nodes": ["n1", "n2"], "world_size": 2, "resume_step": None},
    {"time": 108.0, "kind": "first_step", "generation": 1, "step": 1},
    {"time": 110.2, "kind": "symptom", "generation": 1, "evidence": {"source": "exit", "node": "n2"}},
    {"time": 110.7, "kind": "diagnosis", "generation": 1, "cause": "sigkill", "node": "n2"},
    {"time": 110.8, "kind": "decision", "generation": 1, "action": "restart"},
    {"time": 111.0, "kind": "attempt", "generation": 2, "nodes": ["n1", "n2"], "world_size": 2, "resume_step": 8},
    {"time": 119.5, "kind": "first_step", "generation": 2, "step": 9},
    {"time": 125.0, "kind": "end", "generation": 2, "code": 0, "reason": "done"},
]


def judged(name="sigkill_rank", journal=SIGKILL, injected=110.0, code=0, difference=None, start=8.0):
    return results.judge(lab.FAULTS[name], journal, injected, code, difference, start)


def without(*kinds):
    return [row for row in SIGKILL if row["kind"] not in kinds]


def changed(kind, **values):
    return [{**row, **values} if row["kind"] == kind else row for row in SIGKILL]


def test_the_expected_result_is_ok():
    result = judged()
    assert result.ok and (result.detected, result.cause, result.node) == (0.2, "sigkill", "n2")
    assert (result.actions, result.back, result.attempts, result.losses) == (["restart"], 9.5, 2, "same")


@pytest.mark.parametrize(
    "options, difference",
    [
        ({"code": 1}, "exit code 1, not 0"),
        ({"code": None}, "the run did not end"),
        ({"difference": "step 9: loss"}, "losses: step 9: loss"),
        ({"injected": 108.5}, "detected after 1.7 s, not 1 s"),
        ({"journal": changed("diagnosis", cause="eio")}, "cause eio, not sigkill"),
        ({"journal": changed("decision", action="stop")}, "decided stop, not restart"),
        ({"journal": without("symptom", "diagnosis", "decision")}, "not detected"),
        ({"journal": SIGKILL + [{"time": 130.0, "kind": "attempt", "generation": 3}]}, "3 attempts, not 2"),
        ({"journal": SIGKILL[:6] + [{**SIGKILL[6], "time": 150.0}]}, "training again after 40 s"),
        ({"name": "near_misses"}, "a decision where none was needed: restart"),
    ],
)
def test_a_difference_from_the_expected_result_is_named(options, difference):
    result = judged(**options)
    assert not result.ok and difference in "; ".join(result.wrong)


def test_a_quiet_fault_needs_no_sign():
    quiet = [SIGKILL[0], SIGKILL[1], {**SIGKILL[7], "generation": 1}]
    assert judged("near_misses", quiet).ok
    watched = [*quiet, {"time": 112.0, "kind": "decision", "generation": 1, "action": "watch"}]
    assert judged("near_misses", watched).ok


def test_the_table_has_a_line_for_each_fault_also_for_those_left_out():
    text = results.table([judged(), results.Result("nft", "packet | loss", left_out="no nft")])
    lines = text.splitlines()
    assert "(`sigkill_rank`) | 0.2 s | sigkill | restart | 9.5 s | same | ok |" in lines[2]
    assert lines[3].endswith("left out: no nft |") and len(lines) == 4
    assert results.to_json([judged()])[0]["ok"] is True


def test_losses_are_compared_to_the_bit(tmp_path):
    steps = [
        {"step": step, "loss": 6.0 / step, "grad_norm": 1.0, "lr": 1e-3, "consumed_samples": step} for step in (1, 2)
    ]
    repeated = {**steps[1], "loss": steps[1]["loss"] + 2**-50}
    text = "".join(json.dumps(row) + "\n" for row in [*steps, repeated, {"step": 2, "valid_loss": 5.0}])
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 3, "lo')
    reference = Reference(tmp_path, {row["step"]: row for row in steps}, 8.0)
    assert reference.difference(reference.steps) is None
    assert reference.difference(rows(tmp_path)).startswith("step 2: loss is 3.0000")
    assert reference.difference({1: steps[0]}) == "step 2 is missing"
    assert rows(tmp_path / "none") == {}


def test_the_ratio_subtracts_the_start_of_each_restart_and_nothing_else():
    journal = [
        {"time": 92.0, "kind": "begin", "generation": 0, "command": ["zaya"], "nodes": 2, "spares": 1},
        *changed("symptom", evidence={"time": 110.0, "source": "exit", "node": "n2", "text": ""})[:3],
        {"time": 110.7, "kind": "progress", "generation": 1, "step": 8, "step_seconds": 0.25, "at": 110.0},
        *SIGKILL[3:7],
        {**SIGKILL[7], "time": 208.0},
    ]
    figures = endurance.ratios(journal, 8.0)
    assert (figures["wall_seconds"], figures["lost_seconds"], figures["restarts"]) == (100.0, 9.5, 1)
    assert figures["effective_raw"] == 0.905 and figures["effective"] == round(1 - 1.5 / 92, 4)


def test_every_expected_cause_is_a_rule_and_every_need_is_a_means():
    rules, faults = Rules.load(), lab.FAULTS.values()
    assert not [cause for fault in faults for cause in fault.causes if cause not in rules]
    assert {need for fault in faults for need in fault.needs} <= machine.MEANS.keys()


def test_the_table_of_the_docs_has_every_fault():
    text = Path(PROJECT, "docs/fault-lab.md").read_text()
    heads = [f"| {fault.text} (`{fault.name}`) |" for fault in lab.FAULTS.values()]
    assert len(heads) == 34 and [head for head in heads if text.count(head) != 1] == []


def test_options_of_the_command(capsys):
    assert lab.parser().parse_args([]).fault == [*lab.FAULTS]
    assert lab.parser().parse_args(["--fault", "link_flap", "slurm_requeue"]).fault == ["link_flap", "slurm_requeue"]
    for words in (
        ["--fault", "nothing"],
        ["--fault"],
        ["--hour", "-1"],
        ["--soak", "nan"],
        ["--soak", "1", "--hour", "1"],
    ):
        with pytest.raises(SystemExit, match="2"):
            lab.parser().parse_args(words)
    assert "invalid choice: 'nothing' (choose from" in capsys.readouterr().err


def test_an_absent_means_has_a_reason(monkeypatch, capsys):
    def absent(tried):
        raise machine.Absent("no such kernel")

    monkeypatch.setattr(machine, "MEANS", {name: (text, absent) for name, (text, _) in machine.MEANS.items()})
    assert lab.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "not on this machine: packet loss by nft (no such kernel)" in out
    assert "[left out: network: no such kernel; nft: no such kernel]" in out


def test_packages_are_downloaded_only_if_that_is_allowed(tmp_path):
    with pytest.raises(OSError, match="--no-download"):
        machine.unpack(tmp_path, ["nftables"], "nft", download=False)
    (tmp_path / "root/usr/sbin").mkdir(parents=True)
    (tmp_path / "root/usr/sbin/nft").touch()
    unpacked = machine.unpack(tmp_path, ["nftables"], "nft", download=False)
    assert unpacked.program("nft") == tmp_path / "root/usr/sbin/nft"


def test_a_fault_inside_a_rank_happens_once(tmp_path):
    fault = {"marker": str(tmp_path / "fault")}
    assert hooks.is_mine(fault) and hooks.first_time(fault) and not hooks.first_time(fault) and hooks.is_mine(fault)
    Path(fault["marker"]).write_text(json.dumps({"pid": 0, "time": 0.0}))
    assert not hooks.is_mine(fault)


def test_a_hook_changes_a_module_after_its_import(tmp_path):
    (tmp_path / "sample.py").write_text("value = 1\n")
    code = (
        "from tests.lab import hooks\n"
        "hooks.after_import('sample', lambda module: setattr(module, 'value', 2))\nimport sample\nprint(sample.value)"
    )
    paths = os.pathsep.join([str(tmp_path), PROJECT])
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}, capture_output=True)
    assert done.stdout == b"2\n", done.stderr


def test_everything_that_a_lab_started_is_ended(tmp_path):
    with stand.Stand(tmp_path, ("n1",), network=False) as nodes:
        environment = {**os.environ, **nodes.environment()}
        words = ["sh", "-c", "trap '' TERM; while :; do sleep 600; done"]
        process = subprocess.Popen(words, env=environment, start_new_session=True)
        while len(nodes.processes()) < 2:
            pass
    process.wait(60)  # the code is lost: the lab has reaped it
    assert not nodes.processes()


@pytest.mark.slow
def test_three_faults_are_recovered(tmp_path, monkeypatch):
    """The lab itself, with the times of a busy machine: the classes, actions and losses are compared, not the seconds."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names = ["sigkill_rank", "near_misses", "corrupt_checkpoint"]
    lab.main(["--fault", *names, "--output", str(tmp_path), "--no-download"])
    trials = json.loads((tmp_path / "results.json").read_text())["results"]
    wrong = {trial["name"]: [text for text in trial["wrong"] if " after " not in text] for trial in trials}
    assert wrong == dict.fromkeys(names, [])
    assert [trial["left_out"] for trial in trials] == ["", "", ""]
    assert (
        (tmp_path / "table.md").read_text().startswith("Made by `python -m tests.lab --fault sigkill_rank near_misses")
    )

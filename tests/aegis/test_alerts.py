# SPDX-License-Identifier: Apache-2.0
"""Alerts reach the user's hook and W&B, and no hook can hold up, fool or end the supervisor."""

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.aegis.toy_run import ToyRun
from zaya_plugin.aegis import alerts
from zaya_plugin.aegis.alerts import Alerts, online_run

HOOK = "import json,os,sys; json.dump([json.load(sys.stdin), dict(os.environ), sys.argv], open(sys.argv[1], 'w'))"


def hook(code, *words):
    return [sys.executable, "-S", "-c", code, *map(str, words)]


def all_of(sender, seconds=60.0):
    """Poll until every alert is done, as the decider does."""
    found, deadline = [], time.monotonic() + seconds
    while sender.alerts and time.monotonic() < deadline:
        found += sender.poll()
        time.sleep(0.01)
    return found


def test_the_hook_reads_json_and_no_shell_reads_the_text(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("ZAYA_AEGIS_SECRET_FILE", "/x")
    text = f"rank 3: $(touch {tmp_path}/owned) `id`; rm -rf / \x1b[31m password=hunter22"
    sender = Alerts(hook(HOOK, tmp_path / "got", text))
    sender.send(text, "error", node="n1", rank=3, action="restart", evidence=[{"text": "token=abc123456"}])
    assert all_of(sender) == [(alerts.printable(alerts.without_secrets(text)), {"hook": "ok"})]
    body, environ, argv = json.loads((tmp_path / "got").read_text())
    assert not (tmp_path / "owned").exists() and argv[2] == text
    assert body["text"] == f"rank 3: $(touch {tmp_path}/owned) `id`; rm -rf /  [31m password=<removed>"
    assert (body["level"], body["node"], body["rank"], body["action"]) == ("error", "n1", 3, "restart")
    assert body["evidence"] == [{"text": "token=<removed>"}] and abs(body["time"] - time.time()) < 60
    assert environ["PATH"] == os.environ["PATH"]
    assert not [name for name in environ if name.startswith(("WANDB", "ZAYA", "PYTHON"))]


def test_a_hook_that_writes_without_end_is_killed_and_holds_up_nothing():
    sender = Alerts(["sh", "-c", "yes >&2 & yes >&2 & yes >&2 & yes >&2"], hook_seconds=0.5)
    sender.send("alert")
    polls, deadline = 0, time.monotonic() + 60
    while sender.alerts and time.monotonic() < deadline:
        found, polls = sender.poll(), polls + 1
    assert found[0][1] == {"hook": "not done in time; it was killed"} and polls > 1  # none waited for its end


def test_a_hook_that_hangs_is_killed_with_its_children_and_holds_up_nothing(tmp_path, capsys):
    code = "import os,sys,time; open(sys.argv[1], 'w').write(str(os.fork() or os.getpid())); time.sleep(600)"
    sender = Alerts(hook(code, tmp_path / "pid"), hook_seconds=600)
    for number in range(2):
        sender.send(f"alert {number}")
    running, deadline = [each.running[0] for each in sender.alerts], time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and sender.poll() == []
        time.sleep(0.01)
    for program in running:
        program.deadline = time.monotonic()
    assert [answer["hook"] for _, answer in all_of(sender)] == ["not done in time; it was killed"] * 2
    child = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 60
    while (state := state_of(child)) not in (None, "Z") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert state in (None, "Z")
    assert capsys.readouterr().err.count("was not delivered by --hook") == 1  # reported once


def state_of(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (["/nonexistent/hook"], "cannot be started"),
        (["/dev/null"], "cannot be started"),
        (hook("import sys; sys.exit('no\\nroute \\x1b[2J')"), "exit code 1 route  [2J"),
        (hook("import os; os.kill(os.getpid(), 11)"), "exit code -11"),
    ],
)
def test_a_hook_that_fails_is_an_answer(command, answer):
    sender = Alerts(command)
    sender.send("text")
    ((_, delivered),) = all_of(sender)
    assert delivered["hook"].startswith(answer)


def test_a_hook_that_writes_without_end_keeps_little_and_ends(tmp_path):
    sender = Alerts(hook("import sys\nfor _ in range(4000): sys.stderr.write('x' * 999 + '\\n')\nsys.exit(3)"))
    sender.send("text")
    program = sender.alerts[0].running[0]
    ((_, delivered),) = all_of(sender)
    assert delivered["hook"].startswith("exit code 3 xxx") and len(delivered["hook"]) < 600
    assert len(program.errors) <= 4 * alerts.SHOWN_BYTES


def test_more_alerts_than_can_be_delivered_are_left_out(capsys):
    sender = Alerts(hook("import time; time.sleep(600)"))
    for number in range(100):
        sender.send(f"alert {number}")
    assert sum(len(each.running) for each in sender.alerts) == alerts.AT_ONCE
    assert len(sender.alerts) == alerts.WAITING and "left out" in capsys.readouterr().err
    assert len(sender.close(0.1)) == alerts.WAITING  # without waiting for them


def test_without_a_hook_and_without_wandb_an_alert_is_only_a_line(tmp_path):
    sender = Alerts((), tmp_path)
    sender.send("text")
    assert sender.poll() == [("text", {})]


def a_run(folder, name="run-20261124_120000-ab-c1"):
    (folder / "wandb" / name).mkdir(parents=True)
    (folder / "recipe.yaml").write_text("logger: {wandb_project: p, wandb_entity: e, wandb_group: null}\n")
    return folder


def test_an_online_run_is_recognised_and_an_offline_one_is_not(tmp_path):
    assert online_run(None) is None and online_run(tmp_path) is None
    assert online_run(a_run(tmp_path / "off", "offline-run-20261124_120000-abc")) is None
    expected = {"project": "p", "entity": "e", "group": None, "name": "on-aegis", "id": "ab-c1-aegis"}
    assert online_run(a_run(tmp_path / "on")) == expected
    assert online_run(a_run(tmp_path / "curriculum" / "stage1").parent)["name"] == "stage1-aegis"
    (tmp_path / "on" / "recipe.yaml").write_text("- broken: [")
    assert online_run(tmp_path / "on")["project"] == "zaya"


STAND_IN = """
import json, os
class Settings(dict):
    pass
class Run:
    def alert(self, **given): self.given = given
    def finish(self): json.dump([RUN, self.given], open(os.environ["WANDB_TEST_OUT"], "w"))
def init(mode, dir, resume, job_type, settings, project, entity, group, name, id):
    global RUN
    RUN = [mode, resume, job_type, project, entity, group, name, id, os.environ.get("WANDB_API_KEY"),
           os.environ.get("HF_TOKEN")]
    return Run()
"""


def test_wandb_gets_the_alert_in_a_program_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "stand_in").mkdir()
    (tmp_path / "stand_in" / "wandb.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'stand_in'}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("WANDB_TEST_OUT", str(tmp_path / "out"))
    monkeypatch.setenv("WANDB_API_KEY", "k")
    monkeypatch.setenv("HF_TOKEN", "t")
    sender = Alerts((), a_run(tmp_path / "mine"))
    sender.send("node n1 was exchanged", "warn", cause="ras_ue")
    assert all_of(sender) == [("node n1 was exchanged", {"wandb": "ok"})]
    run, given = json.loads((tmp_path / "out").read_text())
    assert run == ["online", "allow", "aegis", "p", "e", None, "mine-aegis", "ab-c1-aegis", "k", None]
    title = "zaya aegis: ras_ue"
    assert given == {"title": title, "text": "node n1 was exchanged", "level": "WARN", "wait_duration": 0}


@pytest.mark.slow
def test_the_real_wandb_takes_these_arguments(tmp_path):
    wandb = pytest.importorskip("wandb")
    run = wandb.init(
        mode="offline",
        dir=str(tmp_path),
        resume="allow",
        job_type="aegis",
        settings=wandb.Settings(silent=True, console="off", init_timeout=30),
        **online_run(a_run(tmp_path / "mine")),
    )
    run.alert(title="zaya aegis: x", text="text", level="WARN", wait_duration=0)
    run.finish()


SAVES = "import os,sys; open(f'{sys.argv[1]}/alert{os.getpid()}', 'w').write(sys.stdin.read())"
SECRET = "hunter22"


def test_the_hook_of_a_run_gets_the_facts_of_each_decision_and_no_secret(tmp_path):
    line = f"OSError: [Errno 28] No space left on device: https://ann:{SECRET}@store/x"
    plan = [[15, 1, 1, "print", line], [15, 1, 1, "exit", 1]]
    options = ("--hook", shlex.join(hook(SAVES, tmp_path)))
    with ToyRun(tmp_path, plan, options=options).start("n1") as run:
        assert run.end() == 0
        assert SECRET in (run.folder / "attempt_1" / "rank1.log").read_text()
        bodies = sorted((json.loads(path.read_text()) for path in tmp_path.glob("alert*")), key=lambda b: b["time"])
        told, end = bodies
        (said,), (decision,) = run.rows("diagnosis"), run.rows("decision")
        for row in (said, decision):
            shared = row.keys() & told.keys() - {"time", "evidence"}
            assert len(shared) >= 5 and {name: told[name] for name in shared} == {name: row[name] for name in shared}
        assert (told["cause"], told["node"], told["rank"], told["step"]) == ("enospc", "n1", 1, 15)
        assert (end["action"], end["code"], end["step"], end["level"]) == ("end", 0, 40, "info")
        assert [row["delivered"] for row in run.rows("alert")] == [{"hook": "ok"}] * 2
        for text in ((run.folder / "journal.jsonl").read_text(), json.dumps(bodies)):
            assert SECRET not in text and "No space left on device" in text


@pytest.mark.slow  # test_a_hook_that_hangs_is_killed_with_its_children_and_holds_up_nothing needs no run
def test_a_hook_that_hangs_delays_no_decision(tmp_path):
    options = ("--hook", shlex.join(hook("import time; time.sleep(600)")))
    with ToyRun(tmp_path, [[15, 1, 1, "kill", signal.SIGKILL]], options=options).start("n1") as run:
        assert run.end() == 0
        kinds = [row["kind"] for row in run.rows()]
        assert kinds.index("alert") > len(kinds) - 1 - kinds[::-1].index("attempt")  # the second one
        assert [row["delivered"]["hook"] for row in run.rows("alert")] == ["not done in time; it was killed"] * 2

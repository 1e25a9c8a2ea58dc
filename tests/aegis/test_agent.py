# SPDX-License-Identifier: Apache-2.0
"""Ranks, agents and the decider are killed, and the run ends with all its steps."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.aegis.toy_run import ToyRun, free_port, kill, secret
from zaya_plugin.aegis.agent import Agent, ClockOffset
from zaya_plugin.aegis.collectors.tail import Tail
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.protocol import Beat, Dumped, RankExit, Start
from zaya_plugin.aegis.ranks import Process
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.ground import processes


def causes(run):
    return [row["cause"] for row in run.rows("diagnosis")]


def actions(run):
    return [row["action"] for row in run.rows("decision")]


def test_a_killed_rank_is_seen_and_the_attempt_starts_again(tmp_path):
    with ToyRun(tmp_path, [[15, 1, 1, "kill", signal.SIGKILL]]).start("n1") as run:
        assert run.end() == 0
        assert (causes(run), actions(run)) == (["sigkill"], ["restart"])
        assert [row["generation"] for row in run.rows("attempt")] == [1, 2]
        assert run.rows("end")[0]["code"] == 0
        logs = [(run.folder / f"attempt_{n}" / "rank1.log").read_text() for n in (1, 2)]
        assert logs[0] == "" and "rank 1 leaves at step 40" in logs[1]
        assert not list(tmp_path.glob("zaya_aegis_*"))  # the node's folder is removed


@pytest.mark.slow
def test_the_ranks_train_on_while_the_decider_is_killed(tmp_path):
    with ToyRun(tmp_path, steps=None).start("n1") as run:
        run.wait_for(lambda: run.step_of("n1", 0) > 5)
        pid = run.beat("n1", 0)["pid"]
        kill(run.child("n1", "decider"))
        run.wait_for(lambda: len(run.rows("decider")) == 2)
        assert run.beat("n1", 0)["pid"] == pid
        run.release()
        assert run.end() == 0
        assert len(run.rows("attempt")) == 1 and run.rows("decider")[1]["reason"] == "started again from the journal"
        assert not run.rows("decision")


@pytest.mark.slow
def test_a_rank_that_fails_while_the_decider_is_gone_is_not_forgotten(tmp_path):
    with ToyRun(tmp_path, steps=None).start("n1") as run:
        run.wait_for(lambda: run.step_of("n1", 0) > 5)
        decider, rank = run.child("n1", "decider"), run.beat("n1", 0)["pid"]
        kill(decider, signal.SIGSTOP)
        kill(rank)
        run.wait_for(lambda: not os.path.exists(f"/proc/{rank}"))  # the agent has seen its end
        kill(decider)
        run.wait_for(lambda: len(run.rows("attempt")) == 2)
        run.release()
        assert run.end() == 0
        assert causes(run) == ["sigkill"] and len(run.rows("attempt")) == 2


@pytest.mark.slow
def test_a_killed_agent_comes_back_and_its_ranks_do_not_train_during_the_next_attempt(tmp_path):
    with ToyRun(tmp_path, steps=None).start("n1") as run:
        run.wait_for(lambda: run.step_of("n1", 1) > 5)
        pids = [run.wait_for(lambda rank=rank: run.beat("n1", rank))["pid"] for rank in (0, 1)]
        kill(run.child("n1", "agent"))
        run.wait_for(lambda: len(run.rows("attempt")) == 2)
        run.release()
        assert run.end() == 0
        assert (causes(run), actions(run)) == (["agent_lost"], ["restart"])
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert len(run.rows("attempt")) == 2


@pytest.mark.slow
def test_what_a_rank_has_started_in_a_session_of_its_own_ends_with_the_attempt(tmp_path):
    plan = [[5, 0, 1, "spawn", f"{tmp_path}/pid"], [20, 0, 1, "exit", 1]]
    with ToyRun(tmp_path, plan, options=("--grace", "1000")).start("n1") as run:
        assert run.end() == 0
        pid = int((tmp_path / "pid").read_text())
        assert not os.path.exists(f"/proc/{pid}")
        assert run.rows("stopped")[0]["survivors"] == [] and run.rows("stopped")[0]["seconds"] < 1000


@pytest.mark.slow
def test_a_signal_lets_the_ranks_save_and_the_run_ends_with_75(tmp_path):
    with ToyRun(tmp_path, steps=None).start("n1") as run:
        run.wait_for(lambda: run.step_of("n1", 1) > 5)
        kill(run.nodes["n1"].pid, signal.SIGTERM)
        assert run.end() == 75
        assert actions(run) == ["done"] and run.rows("end")[0]["code"] == 75
        assert "leaves at step" in (run.folder / "attempt_1" / "rank1.log").read_text()


@pytest.mark.slow
def test_a_stopped_rank_hangs_and_is_named(tmp_path):
    with ToyRun(tmp_path, [[25, 1, 1, "kill", signal.SIGSTOP]], steps=60).start("n1") as run:
        assert run.end() == 0
        said = run.rows("diagnosis")[0]
        assert (said["cause"], said["node"], said["rank"]) == ("hang", "n1", 1)
        assert actions(run) == ["restart"]


@pytest.mark.slow
@pytest.mark.parametrize("number, cause", [(signal.SIGKILL, "sigkill"), (signal.SIGSTOP, "hang")])
def test_ranks_that_another_launcher_starts_are_watched_by_their_heartbeats(tmp_path, number, cause):
    """The command is started once on the node, as primus-cli is."""
    with ToyRun(tmp_path, [[25, 1, 1, "kill", number]], steps=60, options=("--start", "node")).start("n1") as run:
        assert run.end() == 0
        said = run.rows("diagnosis")[0]
        assert (said["cause"], said["rank"]) == (cause, 1)
        assert actions(run) == ["restart"] and len(run.rows("attempt")) == 2
        assert [row["step"] > 0 for row in run.rows("first_step")] == [True, True]


def test_a_users_mistake_is_never_started_again(tmp_path):
    with ToyRun(tmp_path, [[1, 0, 0, "exit", 2]]).start("n1") as run:
        assert run.end() == 2
        assert actions(run) == ["stop"] and len(run.rows("attempt")) == 1


@pytest.mark.slow
def test_the_same_failure_three_times_without_a_new_step_stops_the_run(tmp_path):
    with ToyRun(tmp_path, [[15, 0, 0, "exit", 1]], ranks=1).start("n1") as run:
        assert run.end() == 1
        assert actions(run) == ["restart", "restart", "stop"]
        assert "3 times without a step after 15" in run.rows("end")[0]["reason"]


def test_stacks_are_asked_of_the_process_in_the_heartbeat_alone(tmp_path, monkeypatch):
    """A shell around a rank does not know the signal, and a number in a file may be another program's."""
    settings = Settings(("sh",), "rank", "n1", 1, 0, (1,), 2, tmp_path, "127.0.0.1", 1, kernel_log=tmp_path / "kernel")
    folder = tmp_path / "node"
    folder.mkdir()
    (tmp_path / "attempt_0").mkdir()
    agent = Agent(settings, secret(), folder)
    stranger = subprocess.Popen(["sleep", "60"])
    code = "import os, signal, time; signal.signal(39, lambda *unused: open('told', 'w')); open('new', 'w').write("
    code += "str(os.getpid())); os.replace('new', 'ready')\nwhile True: time.sleep(0.02)"
    shell = subprocess.Popen(  # the shell has a child that is the rank
        ["sh", "-c", '"$0" -S -c "$1" & wait $!', sys.executable, code],
        cwd=tmp_path,
        env={**os.environ, processes.AEGIS_FOLDER: str(folder)},
    )
    sent = []
    try:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        rank = int((tmp_path / "ready").read_text())
        for number, pid in enumerate((rank, stranger.pid)):
            (folder / f"rank{number}.json").write_text(json.dumps({"pid": pid, "phase": "train", "step": 1}))
            agent.ranks.processes.append(Process(number, shell, Tail(tmp_path / "log"), None))
        agent.collectors.flight_recorder.watch(folder)
        monkeypatch.setattr("zaya_plugin.aegis.ranks.DUMP_SECONDS", 0.1)
        monkeypatch.setattr(agent, "_send", sent.append)
        agent._dump()
        deadline = time.monotonic() + 60
        while not (tmp_path / "told").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (tmp_path / "told").exists() and stranger.poll() is None
        assert sent[-1] == Dumped(0)
    finally:
        agent.collectors.close()
        processes.kill_all(processes.ranks_mark(folder), 2.0)
        for each in (shell, stranger):
            each.kill()
            each.wait()


def test_a_log_that_cannot_be_read_holds_no_heartbeat(tmp_path, monkeypatch):
    """As of a file server that does not answer: in this test a pipe without a writer."""
    agent = quiet_agent(tmp_path, monkeypatch)
    pipe, writer = os.pipe()
    process = Process(0, subprocess.Popen(["false"]), Tail(tmp_path / "log", pipe), None)
    monkeypatch.setattr(processes, "OWN_CHILDREN", {process.popen.pid})
    agent.ranks.processes.append(process)
    agent.ranks.follow_logs()
    monkeypatch.setattr("zaya_plugin.aegis.ranks.LAST_LOG_SECONDS", 0.5)
    deadline = time.monotonic() + 60
    while process.code is None and time.monotonic() < deadline:
        assert not process.whole
        agent._poll()  # does not wait for the log
        time.sleep(0.01)
    agent.collectors.close()
    assert process.code == 1
    assert [type(message) for message in agent.sent if not isinstance(message, Beat)] == [RankExit]
    os.close(writer)  # lets the thread go


@pytest.mark.parametrize("renamed", [False, True])
def test_a_log_that_a_rotation_truncates_or_renames_keeps_its_evidence(tmp_path, monkeypatch, renamed):
    agent, told = quiet_agent(tmp_path, monkeypatch), []
    agent.ranks.report = told.append
    agent.ranks.follow_logs()
    code = f"print('x' * 20_000, flush=True); open({str(tmp_path / 'go')!r}).read(); raise KeyError(7)"
    os.mkfifo(tmp_path / "go")
    agent.ranks.start(Start(1, 1, 0, 3, "h", 1, [sys.executable, "-c", code], 0))
    (process,) = agent.ranks.processes
    log = process.log.path

    def poll_until(condition):
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline
            agent.ranks.poll()
            time.sleep(0.01)

    poll_until(lambda: log.stat().st_size == process.log.position == 20_001)
    if renamed:
        log.rename(log.with_name("rank3.log.1"))
        log.touch()
    else:
        os.truncate(log, 0)
    (tmp_path / "go").write_text("")
    poll_until(lambda: process.code is not None)
    agent.collectors.close()
    assert process.code == 1 and [(each.rule, each.rank, each.text) for each in told] == [
        ("traceback", 3, "KeyError: 7")
    ]


@pytest.mark.parametrize("what, code, rule", [("absent", 127, None), ("no rights", 126, None), ("full", 1, "enospc")])
def test_only_a_wrong_command_is_the_users_mistake(tmp_path, monkeypatch, what, code, rule):
    agent = quiet_agent(tmp_path, monkeypatch)
    told = []
    monkeypatch.setattr(agent, "report", told.append)
    command = {"absent": "/absent", "no rights": str(tmp_path / "plain"), "full": "true"}[what]
    (tmp_path / "plain").write_text("x")
    if what == "full":
        monkeypatch.setattr("builtins.open", full_disk)
    agent._start(Start(1, 1, 0, 0, "h", 1, [command], 0))
    agent.collectors.close()
    monkeypatch.undo()
    assert [(each.rule, each.values.get("exit_code")) for each in told][-1] == (None, code)
    assert [each.rule for each in told[:-1]] == ([rule] if rule else [])


def full_disk(path, *mode, real=open, **more):
    """`open` of a disk on which no file can be made."""
    if str(path).endswith(".log"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return real(path, *mode, **more)


def test_a_second_supervisor_of_the_run_is_refused_and_the_first_one_goes_on(tmp_path):
    """And no command line shows the hook, the command or the secret: other users of a node can read /proc/PID/cmdline."""
    with ToyRun(tmp_path, steps=None, options=("--hook", "true --token hunter22")).start("n1") as run:
        run.wait_for(lambda: run.step_of("n1", 0) > 5)
        key = (run.folder / "secret").read_text()
        for pid in (run.nodes["n1"].pid, run.child("n1", "agent"), run.child("n1", "decider")):
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert "zaya_plugin.aegis." in line
            assert not any(text in line for text in ("hunter22", "ZAYA_AEGIS_DIR", str(tmp_path), key))
        assert (run.folder / "secret").stat().st_mode & 0o777 == 0o600
        first, port = run.nodes["n1"], run.port
        for run.port in (port, free_port()):  # with its decider, and with one of its own
            run.start("n1")
            assert run.end("n1") == 2
        run.start("n9")  # another name, and another decider: of the same journal
        assert run.end("n9") == 2
        told = run.told()
        assert told.count("already, on this node (n1)") == 2 and told.count("supervises this run already") == 3
        assert "Traceback" not in told
        run.nodes["n1"] = first
        run.release()
        assert run.end("n1") == 0
        assert len(run.rows("attempt")) == 1 and not run.rows("symptom")


@pytest.mark.slow
def test_an_output_that_nobody_reads_any_more_ends_no_run(tmp_path):
    with ToyRun(tmp_path, [[25, 0, 1, "kill", signal.SIGKILL]], steps=60) as run:
        reader, writer = os.pipe()
        run.start("n1", out=writer)
        os.close(writer)
        run.wait_for(lambda: run.rows("first_step"))
        os.close(reader)
        assert run.end() == 0
        assert len(run.rows("attempt")) == 2 and len(run.rows("decider")) == 1


def quiet_agent(tmp_path, monkeypatch):
    """An agent without a decider; `sent` are the messages to it."""
    settings = Settings(("sh",), "rank", "n1", 1, 0, (1,), 1, tmp_path, "127.0.0.1", 1, kernel_log=tmp_path / "kernel")
    (tmp_path / "node").mkdir()
    agent = Agent(settings, secret(), tmp_path / "node")
    agent.sent = []
    monkeypatch.setattr(agent, "_send", agent.sent.append)
    return agent


def test_a_copy_of_a_signal_is_no_second_one(tmp_path, monkeypatch):
    """The keeper's copy comes seconds later on a busy node; SLURM sends SIGTERM some minutes after its warning."""
    agent = quiet_agent(tmp_path, monkeypatch)
    usr1, term = signal.SIGUSR1, signal.SIGTERM
    for at, number, noted in (
        (0, usr1, 1),
        (4, usr1, 1),
        (600, term, 1),
        (603, term, 1),
        (606, term, 2),
        (608, term, 2),
    ):
        monkeypatch.setattr("zaya_plugin.aegis.agent.time.monotonic", lambda at=at: 1000.0 + at)
        agent._on_signal(number)
        assert len(agent.signals) == noted, at
    agent._on_signal(usr1)
    assert agent.signals == [usr1, term, usr1]


def test_a_launchers_line_with_a_process_is_of_the_rank_with_that_heartbeat(tmp_path, monkeypatch):
    agent = quiet_agent(tmp_path, monkeypatch)
    for rank, pid in ((4, 1004), (5, 1005)):
        (agent.folder / f"rank{rank}.json").write_text(json.dumps({"pid": pid, "phase": "train", "step": 3}))
    for source, pid in (("exit", 1005), ("exit", 77), ("kernel", 1005)):
        agent.report(Evidence(1.0, "n1", source, "failed", None, "sigkill", {"pid": pid}))
    assert [each.rank for each in agent._evidence] == [5, None, None]


def test_the_times_of_evidence_and_exits_are_sent_by_the_deciders_clock(tmp_path, monkeypatch):
    agent = quiet_agent(tmp_path, monkeypatch)
    agent.link, agent.clock.offset = object(), 3600.0
    agent.report(Evidence(5.0, "n1", "rank", "x", 0, "traceback"))
    agent._send_exit(0, -9, 6.0)
    agent.collectors.close()
    evidence, rank_exit = agent.sent
    assert [row["time"] for row in evidence.rows] == [3605.0] and rank_exit == RankExit(0, 0, -9, 3606.0)


def test_evidence_beyond_the_limit_while_the_decider_is_gone_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("zaya_plugin.aegis.agent.MAX_EVIDENCE", 3)
    agent = quiet_agent(tmp_path, monkeypatch)
    agent.collectors.close()
    for rank in range(5):
        agent.report(Evidence(1.0, "n1", "rank", "x", rank, "traceback"))
    agent.link = object()
    agent._send_evidence()
    (batch,) = agent.sent
    assert [row.get("rank") for row in batch.rows] == [2, 3, 4, None]
    assert (batch.rows[-1]["rule"], batch.rows[-1]["values"]) == ("collector_late", {"dropped": 2})


def test_a_clock_that_is_set_is_noticed_at_the_next_answer():
    clock = ClockOffset()
    for now, trip in ((1000.0, 0.002), (1002.0, 0.001), (1004.0, 0.004)):
        clock.measure(now, now - trip, now - trip / 2 + 5.0)  # the other clock is 5 s ahead
    assert clock.offset == pytest.approx(5.0, abs=1e-3)
    clock.measure(1006.0, 990.0, 1006.0)  # an answer that took 16 s says nothing
    assert clock.offset == pytest.approx(5.0, abs=1e-3)
    now = 1008.0 + 3600.0  # an hour ahead all at once
    clock.measure(now, now - 0.004, 1008.0 - 0.002 + 5.0)
    assert clock.offset == pytest.approx(5.0 - 3600.0, abs=1e-2)


def test_a_keeper_whose_folder_cannot_be_written_says_so(tmp_path):
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "aegis"
    settings = Settings(("sh",), "rank", "n1", 1, 0, (1,), 1, folder, "127.0.0.1", 1, kernel_log=tmp_path / "kernel")
    file = settings.to_file()
    command = [sys.executable, "-m", "zaya_plugin.aegis.keeper", str(file)]
    done = subprocess.run(command, pass_fds=(file,), capture_output=True, text=True)
    os.close(file)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith(f"zaya: {folder}: Not a directory")

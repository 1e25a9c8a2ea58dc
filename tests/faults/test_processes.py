# SPDX-License-Identifier: Apache-2.0
"""Kills and signals of each process of a launch: the launcher, torchrun, slurmstepd, one rank. Real processes, with a
worker without torch; the slow test is a whole run.
"""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.running import MICRO, command, descendants
from tests.stand_in_worker import environment, worker_program  # noqa: F401
from zaya_plugin.checkpoint.run_lock import RunLock
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.ground import lock, parent_death
from zaya_plugin.ground.exit_codes import ENDED_EARLY

SECONDS = 120  # of a slow and busy machine; the ranks need 0.5 s for their save


def alive(pids):
    return [pid for pid in pids if parent_death.started(pid) is not None]


def all_end(pids, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)


def start(words, variables, lines, mode="save", **more):
    """Start a program and wait for its first lines, two a rank, and two of `zaya train`."""
    running = subprocess.Popen(
        words, env={**variables, "WORKER_MODE": mode, **more}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for _ in range(lines):
        assert running.stdout.readline(), running.stderr.read()
    return running


def saved(run_dir):
    return sorted(path.name for path in run_dir.glob("saved_by_*"))


def rank_of(pid):
    with open(f"/proc/{pid}/environ") as file:
        return dict(item.partition("=")[::2] for item in file.read().split("\0")).get("RANK")


@pytest.mark.slow
def test_a_killed_torchrun_takes_its_ranks_along(worker_program, tmp_path):  # noqa: F811
    words, variables = worker_program
    running = start([*words, f"run_dir={tmp_path}/run"], variables, 6)
    (torchrun,) = [pid for pid in descendants(running.pid) if parent_of(pid) == running.pid]
    ranks = [pid for pid in descendants(torchrun)]
    os.kill(torchrun, signal.SIGKILL)
    _, stderr = running.communicate(timeout=SECONDS)
    assert running.returncode == 128 + signal.SIGKILL
    assert not alive(ranks), "the launcher returns when its ranks have ended"
    assert saved(tmp_path / "run") == ["saved_by_0", "saved_by_1"]
    assert "torchrun was killed by SIGKILL; its ranks have ended" in stderr and "at step 96 of 240" in stderr


def parent_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


@pytest.mark.slow  # of rank 1: test_a_second_run_in_a_run_dir_is_refused_and_a_later_one_is_not
def test_a_signal_to_rank_0_is_an_early_end(worker_program, tmp_path):  # noqa: F811
    words, variables = worker_program
    running = start([*words, f"run_dir={tmp_path}/run"], variables, 6)
    end_by_a_signal_to_one(running, "0")


def end_by_a_signal_to_one(running, rank):
    """The other rank of the stand-in gets torchrun's own SIGTERM; the ranks of a real run agree."""
    (pid,) = [pid for pid in descendants(running.pid) if rank_of(pid) == rank]
    os.kill(pid, signal.SIGTERM)
    _, stderr = running.communicate(timeout=SECONDS)
    assert running.returncode == ENDED_EARLY
    assert "a signal ended the run early, at step 96 of 240" in stderr and "Traceback" not in stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers", [pytest.param(0, id="direct", marks=pytest.mark.slow), pytest.param(1, id="below a shell")]
)
def test_ranks_of_an_outer_torchrun_end_with_it(worker_program, tmp_path, layers):  # noqa: F811
    _, variables = worker_program
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_recipe(compose(["experiment=cpu_demo", f"run_dir={run_dir}"]), run_dir / "recipe.yaml")
    work = [sys.executable, "-m", "stand_in_worker", str(run_dir / "recipe.yaml")]
    if layers:  # the kernel's signal reaches the shell alone
        work = ["sh", "-c", f"{' '.join(work)}; true"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    running = start([*torchrun, "--no-python", *work], variables, 4)
    below = descendants(running.pid)
    running.kill()
    assert all_end(below), "they train on as orphans"
    assert saved(run_dir) == ["saved_by_0", "saved_by_1"]


STEP_DAEMON = """
    import os, subprocess, sys, time
    for rank in range(2):
        slurm = {"SLURM_PROCID": rank, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 2, "SLURM_LOCALID": rank, "RANK": rank}
        environment = {**os.environ, **{name: str(value) for name, value in slurm.items()}, "WORLD_SIZE": "2"}
        subprocess.Popen(["sh", "-c", f"{sys.executable} -m stand_in_worker {sys.argv[1]}; true"], env=environment)
    time.sleep(600)
"""


def test_ranks_of_srun_end_with_their_slurmstepd(worker_program, tmp_path):  # noqa: F811
    _, variables = worker_program
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_recipe(compose(["experiment=cpu_demo", f"run_dir={run_dir}"]), run_dir / "recipe.yaml")
    (tmp_path / "slurmstepd.py").write_text(textwrap.dedent(STEP_DAEMON))
    running = start([sys.executable, str(tmp_path / "slurmstepd.py"), str(run_dir / "recipe.yaml")], variables, 4)
    below = descendants(running.pid)
    running.kill()
    assert all_end(below)
    assert saved(run_dir) == ["saved_by_0", "saved_by_1"]


@pytest.mark.slow
def test_a_rank_that_does_not_react_is_ended(worker_program, tmp_path):  # noqa: F811
    """It waits for another rank, say; the time is torchrun's, made short for this test."""
    words, variables = worker_program
    short = "from zaya_plugin.ground import parent_death; parent_death.GRACE_SECONDS = 1.0\n"
    worker = tmp_path / "programs" / "stand_in_worker.py"
    worker.write_text(short + worker.read_text())
    running = start([*words, f"run_dir={tmp_path}/run"], variables, 6, mode="stuck")
    below = descendants(running.pid)
    (torchrun,) = [pid for pid in below if parent_of(pid) == running.pid]
    os.kill(torchrun, signal.SIGKILL)
    assert all_end(below) and running.wait(SECONDS) == 137


def test_a_rank_whose_launcher_is_gone_does_not_begin(worker_program, tmp_path):  # noqa: F811
    _, variables = worker_program
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    save_recipe(compose(["experiment=cpu_demo", f"run_dir={tmp_path}"]), tmp_path / "recipe.yaml")
    done = subprocess.run(
        [sys.executable, "-m", "stand_in_worker", str(tmp_path / "recipe.yaml")],
        env={**variables, "RANK": "0", "WORLD_SIZE": "1", "WORKER_MODE": "save", "ZAYA_LAUNCHER_PID": gone.stdout},
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == -signal.SIGTERM and "the launcher of this rank has ended" in done.stderr
    assert "ready" not in done.stdout


@pytest.mark.slow
def test_a_rank_that_a_shell_started_outlives_the_shell(worker_program, tmp_path):  # noqa: F811
    """`nohup zaya train &` with RANK set by hand."""
    _, variables = worker_program
    save_recipe(compose(["experiment=cpu_demo", f"run_dir={tmp_path}"]), tmp_path / "recipe.yaml")
    words = f"{sys.executable} -m stand_in_worker {tmp_path}/recipe.yaml & echo $!; sleep 600"
    running = start(["sh", "-c", words], {**variables, "RANK": "0", "WORLD_SIZE": "1"}, 0)
    rank = int(running.stdout.readline())
    assert [running.stdout.readline().split()[0] for _ in range(2)] == ["rank", "ready"]
    running.kill()
    running.wait()
    time.sleep(4 * parent_death.WATCH_SECONDS)
    assert alive([rank]) == [rank]
    os.kill(rank, signal.SIGTERM)
    assert all_end([rank])


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["torchrun", "SIGTERM to a rank", "SIGUSR1 to a rank", "SIGUSR2 to all"])
def test_a_whole_run_ends_early_and_says_where(corpus, tmp_path, killed):
    """SLURM sends the signal of --signal to all processes of a step: torchrun, data loaders and writers among them."""
    words = (
        "data.num_workers=1",
        "nproc=2",
        "stage.train_iters=2000",
        "stage.eval_interval=5000",
        "checkpoint.save_interval=1000",
    )
    running = subprocess.Popen(
        command("train", *MICRO, f"run_dir={tmp_path}", f"data.path={corpus}", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, deadline = tmp_path / "metrics.jsonl", time.monotonic() + 250
    while not (metrics.is_file() and '"step": 3,' in metrics.read_text()):
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()[0]
        time.sleep(0.05)
    below = descendants(running.pid)
    if killed == "torchrun":
        os.kill(next(pid for pid in below if parent_of(pid) == running.pid), signal.SIGKILL)
    elif killed == "SIGUSR2 to all":
        for pid in (running.pid, *below):
            os.kill(pid, signal.SIGUSR2)
    else:
        rank = next(
            pid for pid in below[::-1] if rank_of(pid) == "1" and "worker" in open(f"/proc/{pid}/cmdline").read()
        )
        os.kill(rank, signal.Signals[killed.split()[0]])
    output, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == (137 if killed == "torchrun" else ENDED_EARLY), output
    assert all_end(below)
    (folder,) = (tmp_path / "checkpoints").glob("iter_*")
    step = int(folder.name[5:])
    assert 3 <= step < 2000
    assert f"a signal ended the run early, at step {step} of 2000; step {step} is saved" in output


def test_a_second_run_in_a_run_dir_is_refused_and_a_later_one_is_not(worker_program, tmp_path):  # noqa: F811
    words, variables = worker_program
    words = [*words, f"run_dir={tmp_path}/run"]
    running = start(words, variables, 6)
    second = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=SECONDS)
    assert second.returncode == 2 and f"a run is writing there: process {running.pid} on" in second.stderr
    shared = [*words[:-1], f"run_dir={tmp_path}/run2", f"checkpoint.path={tmp_path}/run"]
    third = subprocess.run(shared, env=variables, capture_output=True, text=True, timeout=SECONDS)
    assert third.returncode == 2 and f"checkpoint.path={tmp_path}/run: a run is writing there" in third.stderr
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "20001"}
    joined = subprocess.run(words, env={**variables, **outer}, capture_output=True, text=True, timeout=SECONDS)
    assert joined.returncode == 2 and "a run is writing there" in joined.stderr
    end_by_a_signal_to_one(running, "1")
    assert not list((tmp_path / "run").glob("run.lock.*"))


@pytest.mark.slow
def test_a_stopped_run_that_was_taken_over_ends_when_it_goes_on_and_writes_nothing(corpus, tmp_path):
    """All its processes are stopped, and another machine takes its lock; the test rewrites the lock to be of a node."""
    words = ("nproc=2", "stage.train_iters=3000", "stage.eval_interval=5000", "checkpoint.save_interval=1000")
    run_dir = tmp_path / "run"
    running = subprocess.Popen(
        command("train", *MICRO, f"run_dir={run_dir}", f"data.path={corpus}", *words),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + 250
    while not (metrics.is_file() and '"step": 3,' in metrics.read_text()):
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()[0]
        time.sleep(0.05)
    everything = [running.pid, *descendants(running.pid)]
    for pid in everything:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(1.5 * lock.CHECK_SECONDS)
    file = run_dir / "run.lock.1"
    first, rank_0 = file.read_text().splitlines()
    file.write_text(json.dumps({**json.loads(first), "machine": "node7 other-boot"}) + "\n" + rank_0 + "\n")
    os.utime(file, times=(time.time() - 2 * lock.EXPIRES,) * 2)
    taken = RunLock.take({"run_dir": run_dir})
    before = metrics.read_bytes()
    for pid in everything:
        os.kill(pid, signal.SIGCONT)
    output, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 2 and "Traceback" not in output, output
    assert f"it was taken over by process {os.getpid()} on" in output
    assert metrics.read_bytes() == before and not list((run_dir / "checkpoints").glob("iter_*"))
    taken.check(now=True)
    taken.release()

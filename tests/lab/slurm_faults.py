# SPDX-License-Identifier: Apache-2.0
"""Leg 2: a real SLURM of three nodes on this machine, from Debian packages, and faults of supervised jobs in it.

Authentication is off (auth/none), processes are groups (proctrack/pgid), and a silent slurmd is noticed after 10 s.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.lab.faults import BREAK_AT, LOST, Fault
from tests.lab.faults import fault as enter_fault
from tests.lab.packages import SLURM, Unpacked, unpack
from tests.lab.results import Result, judge
from tests.lab.stand import NODES, Stand
from tests.lab.supervised_run import PORT, Reference, Run, python_path, rows, zaya
from zaya_plugin.aegis import slurm as aegis_slurm
from zaya_plugin.ground import processes

NODE_VARIABLE = "ZAYA_LAB_NODE"
FIRST_PORT = 26817
USER_WITHOUT_RIGHTS = 65534
UP_SECONDS, END_SECONDS = 20.0, 300.0
REQUEUE_SECONDS = 60.0  # SLURM itself waits for 121 s, and ends a job's processes within 30
CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/builtin
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldPort={port}
SlurmdTimeout=10
SlurmctldDebug=debug2
KillWait=5
ReturnToService=2
PartitionName=lab Nodes=n[1-3] Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running SLURM; `call` runs one of its programs."""

    def __init__(self, cache: Path, stand: Stand):
        self.stand, self.folder = stand, stand.folder / "slurm"
        self.unpacked = unpack(cache, SLURM, "slurmctld-wlm")
        self.public: Path | None = None  # programs and configuration where the jobs of any user can read them
        self.daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> Cluster:
        self.folder.mkdir(parents=True)
        (self.folder / "state").mkdir()
        self.public = Path(tempfile.mkdtemp(prefix="zaya-lab-slurm-")).resolve()
        self.public.chmod(0o755)
        shutil.copytree(self.unpacked.root, self.public / "root", symlinks=True)
        self.unpacked = Unpacked(self.public / "root")
        plugins = next(path / "slurm-wlm" for path in self.unpacked.libraries if (path / "slurm-wlm").is_dir())
        host = os.uname().nodename
        text = CONFIGURATION.format(host=host, plugins=plugins, folder=self.folder, port=FIRST_PORT)
        for number, node in enumerate(NODES, start=1):
            (self.folder / f"spool-{node}").mkdir()
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={FIRST_PORT + number} CPUs=2\n"
        self.file = self.public / "slurm.conf"
        self.file.write_text(text)
        self._daemon("slurmctld", "slurmctld-wlm")
        for node in NODES:
            step = str(self.unpacked.program("slurmstepd-wlm"))
            self._daemon(node, "slurmd-wlm", "-d", step, "-N", node, **{NODE_VARIABLE: node})
        deadline = time.monotonic() + UP_SECONDS
        while self.call("sinfo", "-h", "-o", "%T %D") != f"idle {len(NODES)}":
            if time.monotonic() > deadline:
                self.__exit__()
                raise OSError(f"SLURM did not start within {UP_SECONDS:.0f} s; see {self.folder}")
            time.sleep(0.2)
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        processes.send(self._programs(), signal.SIGKILL)  # those left would tell the next cluster that a node failed
        shutil.rmtree(self.public, ignore_errors=True)

    def environment(self, **more: str) -> dict[str, str]:
        """Return the environment of SLURM's programs."""
        own = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
        common = {**own, **self.stand.environment(), "SLURM_CONF": str(self.file), **more}
        return self.unpacked.environment(common)

    def _daemon(self, name: str, program: str, *words: str, **more: str) -> None:
        command = [str(self.unpacked.program(program)), "-D", "-f", str(self.file), *words]
        with open(self.folder / f"{name}.log", "wb") as log:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environment(**more), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def call(self, *words: str) -> str:
        """Run a program of SLURM and return what it printed."""
        done = subprocess.run(words, env=self.environment(), capture_output=True, text=True, timeout=30)
        return (done.stdout + done.stderr).strip()

    def submit(self, *words: str, script: str, environment: dict[str, str] | None = None, user: int = 0) -> str:
        """Submit a batch script and return the job's id."""
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        command = ["sbatch", "--parsable", "--output", str(self.folder / "job-%j.log"), "--open-mode=append", *words]
        done = subprocess.run(
            [*self._as(user), *command, str(path)],
            env=environment or self.environment(),
            capture_output=True,
            text=True,
            timeout=30,
            cwd=self.folder,
        )
        if done.returncode:
            raise OSError(f"sbatch: {done.stderr.strip()}")
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return the fields of a job."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    @staticmethod
    def _as(user: int) -> list[str]:
        """Return the words that run a program as a user who may read what this one reads."""
        if user == 0:
            return []
        caps = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *caps]

    @contextlib.contextmanager
    def with_rights_of(self, user: int):
        """Let this process call SLURM's programs as another user."""
        folder = self.folder / "as_user"
        folder.mkdir(exist_ok=True)
        for name in ("scontrol", "sbatch"):
            program, change = str(self.unpacked.program(name)), shlex.join(self._as(user))
            text = f'[ "$(id -u)" = {user} ] && exec {program} "$@"\nexec {change} {program} "$@"'  # in a job: is that user
            (folder / name).write_text(f"#!/bin/sh\n{text}\n")
            (folder / name).chmod(0o755)
        before = dict(os.environ)
        added = self.environment()
        os.environ.update({**added, "PATH": f"{folder}:{added['PATH']}"})
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)

    def kill_node(self, node: str) -> float:
        """Kill slurmd and everything else of a node; return the time."""
        now = time.time()
        # All are stopped first: a live process would start its killed child again.
        for number in (signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL):
            pids = {self.daemons[node].pid}
            for variable in (NODE_VARIABLE, "SLURMD_NODENAME"):
                pids.update(processes.started_with(f"{variable}={node}"))
            parents = {int(fields[1]) for fields in map(processes.stat, pids) if fields}
            processes.send(pids | parents.intersection(self._programs()), number)
        return now

    def _programs(self) -> list[int]:
        """Return the processes of SLURM's programs: slurmstepd writes its title over its environment."""
        pids = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if os.readlink(path / "exe").startswith(str(self.public)):
                    pids.append(int(path.name))
        return pids


class SlurmRun(Run):
    """A supervised run inside of a job; SLURM starts the agents."""

    def submit(self, cluster: Cluster, *words: str, options: tuple[str, ...] = (), step: tuple[str, ...] = ()) -> str:
        """Submit the job and return its id. options: of `zaya aegis run`. step: of srun."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.start_time = time.time()
        srun = ["srun", "--ntasks-per-node=1", "--kill-on-bad-exit=0", *step]
        aegis = zaya("aegis", "run", "--decider", f"127.0.0.1:{PORT}", "--kernel-log", self.folder / "kernel", *options)
        (self.folder / "kernel").touch()
        environment = cluster.environment(PYTHONPATH=python_path(), OMP_NUM_THREADS="1")
        # All nodes have this machine's address; the decider is to be on the first one, as in a real job.
        later = ["sh", "-c", '[ "$SLURM_NODEID" = 0 ] || sleep 2; exec "$@"', "sh"]
        script = shlex.join([*srun, *later, *aegis, "--", *self.command])
        return cluster.submit(*words, script=script, environment=environment)

    def victim(self) -> str:
        """Return a node that trains, and is not the first one of the job: SLURM ends a job whose batch script is lost."""
        nodes = [row["nodes"] for row in self.journal() if row["kind"] == "attempt"][-1]
        return next(node for node in nodes if node != NODES[0])

    def exit_codes(self) -> list[int]:
        """Return the exit codes in the journal: one, unless something is wrong."""
        return [row["code"] for row in self.journal() if row["kind"] == "end"]

    def judged(self, name: str, injected: float, reference: Reference, start: float) -> Result:
        """Return the result of the fault `name`, whose run trains to its end."""
        code = next(iter(self.exit_codes()), None)
        difference = reference.difference(rows(self.run_dir))
        return judge(FAULTS[name], self.journal(), injected, code, difference, start)


# name -> a fault; inject takes the cluster, a folder and the undisturbed run, and returns the result
FAULTS: dict[str, Fault] = {}


def fault(text: str, **expected: Any) -> Callable:
    """Enter a function into FAULTS."""
    return enter_fault(f"SLURM: {text}", FAULTS, needs=("slurm",), **expected)


@fault(
    "a node of the job is lost; a spare of the allocation takes over (--no-kill)",
    causes=("node_lost",),
    actions=("exchange",),
    within=LOST,
)
def slurm_node_lost(cluster: Cluster, folder: Path, reference: Reference) -> Result:
    run = SlurmRun(cluster.stand, folder / "trial", reference.data)
    options = ("--nodes", "2", "--spares", "1")
    job = run.submit(cluster, "--nodes=3", "--no-kill", options=options, step=("--no-kill",))
    run.wait_step(BREAK_AT)
    injected = cluster.kill_node(run.victim())
    fields = _ended(cluster, job)
    result = run.judged("slurm_node_lost", injected, reference, reference.start)
    if fields.get("Restarts") not in (None, "0"):
        result.wrong.append(f"SLURM started the job again ({fields['Restarts']} times)")
    return result


@fault(
    "a node of the job is lost and there is no spare: requeue, at once and without the node",
    causes=("node_lost",),
    actions=("requeue",),
    within=LOST,
)
def slurm_requeue(cluster: Cluster, folder: Path, reference: Reference) -> Result:
    run = SlurmRun(cluster.stand, folder / "trial", reference.data)
    job = run.submit(cluster, "--nodes=2", "--no-kill", "--requeue", options=("--requeue",), step=("--no-kill",))
    run.wait_step(BREAK_AT)
    lost = run.victim()
    injected = cluster.kill_node(lost)
    run.wait(lambda: any(row["kind"] == "decision" for row in run.journal(injected)), 60, "decision")
    attempts = run.wait(
        lambda: [row for row in run.journal(injected) if row["kind"] == "attempt"], 2 * REQUEUE_SECONDS, "new attempt"
    )
    fields = _ended(cluster, job)
    # the processes of the first start end within SLURM's KillWait before the second one can begin
    result = run.judged("slurm_requeue", injected, reference, reference.start + REQUEUE_SECONDS)
    seconds = attempts[0]["time"] - injected
    if seconds > REQUEUE_SECONDS:
        result.wrong.append(f"the job ran again after {seconds:.0f} s, not {REQUEUE_SECONDS:.0f} s")
    if lost in attempts[0]["nodes"]:
        result.wrong.append("the job ran again on the lost node")
    if fields.get("Restarts") != "1":
        result.wrong.append(f"SLURM counts {fields.get('Restarts')} restarts, not 1")
    return result


@fault("requeue, exclude and drain with the rights of a user; SLURM refuses the last one")
def slurm_no_rights(cluster: Cluster, folder: Path, reference: Reference) -> Result:
    result = Result("slurm_no_rights", FAULTS["slurm_no_rights"].text, actions=["requeue"], code=0)
    user, words = USER_WITHOUT_RIGHTS, ("--nodes=2", "--requeue", "--chdir=/", "--output=/dev/null")
    job = cluster.submit(*words, script="sleep 300", user=user)
    first = _nodes(cluster, _running(cluster, job, 20))
    with cluster.with_rights_of(user):
        drains = aegis_slurm.Drains()
        drains.start("n3", "lab")
        start_time = time.time()
        accepted, problem = aegis_slurm.requeue(job, ["n2"])
        while not drains.refused and time.time() - start_time < 10:
            drains.poll()
            time.sleep(0.1)
    fields = _running(cluster, job, start_time + REQUEUE_SECONDS - time.time())
    result.back = round(time.time() - start_time, 1)
    second = _nodes(cluster, fields)
    cluster.call("scancel", job)
    if not accepted or problem:
        result.wrong.append(f"requeue: {problem}")
    if fields.get("JobState") != "RUNNING":
        result.wrong.append(f"the job is {fields.get('JobState')} after {REQUEUE_SECONDS:.0f} s")
    if "n2" not in first or "n2" in second or not second:
        result.wrong.append(f"the job ran on {', '.join(first)}, then on {', '.join(second)}; n2 was excluded")
    if not drains.refused:
        result.wrong.append("SLURM did not refuse to drain a node, though the user is no operator")
    if "DRAIN" in cluster.call("sinfo", "-h", "-n", "n3", "-o", "%T").upper():
        result.wrong.append("n3 was drained by a user without rights")
    return result


@fault(
    "the exit code of a mistake reaches the job, and the journal keeps it",
    causes=("user_error", "data"),
    actions=("stop",),
    code=2,
)
def slurm_exit_code(cluster: Cluster, folder: Path, reference: Reference) -> Result:
    run = SlurmRun(cluster.stand, folder / "trial", folder / "no_such_data")
    job = run.submit(cluster, "--nodes=2", options=("--nodes", "2"))
    fields = _ended(cluster, job, 120)
    code = int(fields.get("ExitCode", "-1:0").partition(":")[0])
    result = judge(FAULTS["slurm_exit_code"], run.journal(), run.start_time, code, None, None)
    result.losses = ""
    if run.exit_codes() != [2]:
        result.wrong.append(f"the exit codes in the journal are {run.exit_codes()}, not [2]")
    return result


def _ended(cluster: Cluster, job: str, seconds: float = END_SECONDS) -> dict[str, str]:
    """Wait for the end of a job and return its fields."""
    deadline = time.monotonic() + seconds
    while (fields := cluster.job(job)).get("JobState") in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
        if time.monotonic() > deadline:
            cluster.call("scancel", "--signal=KILL", job)
            break
        time.sleep(0.5)
    return fields


def _running(cluster: Cluster, job: str, seconds: float) -> dict[str, str]:
    """Wait until a job runs, or for `seconds`, and return its fields."""
    deadline = time.monotonic() + seconds
    while (fields := cluster.job(job)).get("JobState") != "RUNNING" and time.monotonic() < deadline:
        time.sleep(0.2)
    return fields


def _nodes(cluster: Cluster, fields: dict[str, str]) -> list[str]:
    """Return the nodes of a job."""
    return cluster.call("scontrol", "show", "hostnames", fields.get("NodeList", "")).split()

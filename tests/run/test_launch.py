# SPDX-License-Identifier: Apache-2.0
"""Starting ranks for real (torchrun, two processes, a worker without torch) and joining those of an outer launcher."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin import cli
from zaya_plugin.config.compose import compose
from zaya_plugin.ground.exit_codes import ENDED_EARLY
from zaya_plugin.run import launch, rank_plan, surroundings
from zaya_plugin.run.launch import Ended, capture_failed, first_failure, last_words


def demo(*overrides):
    return compose(["experiment=cpu_demo", *overrides])


def finish(program, run_dir, mode, *overrides, **variables):
    command, environment = program
    return subprocess.run(
        [*command, f"run_dir={run_dir}", *overrides],
        env={**environment, "WORKER_MODE": mode, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_run_and_the_console_shows_them_without_decoration(worker_program, tmp_path):
    overrides = ["cluster.environment.CUSTOM=yes", "cluster.threads_per_rank=3"]
    done = finish(worker_program, tmp_path / "run", "variables", *overrides)
    assert (done.returncode, done.stderr) == (0, "")
    lines = sorted(done.stdout.splitlines())
    assert lines[2:4] == ["rank 0 of 2 runs cpu_demo", "rank 1 of 2 runs cpu_demo"]
    assert [line.split()[1] for line in lines[4:]] == ["parameters", "tokens"]
    assert lines[0] == lines[1] and lines[0].startswith(
        "OMP_NUM_THREADS=3|CUDA_VISIBLE_DEVICES=|TORCHDYNAMO_DISABLE=1|CUSTOM=yes|"
    )
    assert (tmp_path / "run" / "recipe.yaml").exists()
    logs = sorted((tmp_path / "run" / "logs").glob("launch_*/attempt_0/*/stdout.log"))
    assert [path.parent.name for path in logs] == ["0", "1"]


def test_the_first_failing_rank_is_shown_and_nothing_of_torchrun(worker_program, tmp_path):
    done = finish(worker_program, tmp_path, "raise")
    assert done.returncode == 1
    assert "zaya: rank 1 failed first, exit code 1:\nTraceback" in done.stderr
    assert "RuntimeError: the first error" in done.stderr
    assert (
        "RuntimeError: connection" not in done.stderr
        and "ChildFailedError" not in done.stderr
        and "torch/" not in done.stderr
    )


@pytest.mark.slow  # the next two tests have its parts
def test_where_a_capture_fails_auto_runs_kernel_by_kernel(worker_program, tmp_path):
    overrides = ("cluster=gpu", "nproc=1", "cluster.kernels=auto")
    done = finish(worker_program, tmp_path / "auto", "capture", *overrides, "cluster.graphs=auto")
    assert done.returncode == 0, done.stderr
    assert "could not be captured as a graph; starting again kernel by kernel" in done.stderr
    assert "in a capturing stream" in done.stderr, "the cause is shown"
    assert "graphs: none" in (tmp_path / "auto" / "recipe.yaml").read_text()
    assert len(list((tmp_path / "auto" / "logs").glob("launch_*"))) == 2


FAILED = Ended(1, Path("launch_0"))


@pytest.mark.parametrize(
    ("graphs", "ended", "launches"),
    [
        ("auto", FAILED, ["full_iteration", "none"]),
        ("full_iteration", FAILED, ["full_iteration"]),
        ("auto", Ended(128 + signal.SIGINT, Path("launch_0"), stopped=True), ["full_iteration"]),
        ("auto", Ended(1), ["full_iteration"]),
    ],
    ids=["auto", "explicit", "stopped", "no folder of logs"],
)
def test_only_a_failed_capture_that_auto_chose_starts_again(monkeypatch, tmp_path, graphs, ended, launches):
    seen = []

    def fails(plan, logs):
        seen.append("none" if "graphs: none" in (tmp_path / "recipe.yaml").read_text() else "full_iteration")
        return ended

    monkeypatch.setattr(launch, "run_ranks", fails)
    monkeypatch.setattr(launch, "capture_failed", lambda folder: True)
    monkeypatch.setattr(surroundings, "check_surroundings", lambda *_: None)
    words = ("cluster=gpu", "nproc=1", "cluster.kernels=auto", f"cluster.graphs={graphs}", f"run_dir={tmp_path}")
    assert launch.launch(demo(*words)) == ended.code
    assert seen == launches


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        ("CUDA error: operation not permitted when stream is capturing", True),
        ("HIP error: operation failed due to a previous error during capture", True),
        ("watchdog thread terminated with exception: ... (hipErrorCapturedEvent)", True),
        ("hip_ops: rms_norm was first used on cuda:0 while a graph is captured. It must be compared", True),
        ("hip_ops: the first product into fp32 came while a graph is captured; run it once", True),
        ("hip_ops: a graph is captured and there is no pinned memory left for a work table", True),
        ("RuntimeError: Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture", True),
        ("RuntimeError: Offset increment outside graph capture encountered unexpectedly.", True),
        ("RuntimeError: CUDA out of memory", False),
    ],
)
def test_a_failed_capture_is_known_by_what_a_rank_wrote(tmp_path, text, failed):
    assert not capture_failed(tmp_path)
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stderr.log").write_text(text)
    assert capture_failed(tmp_path) == failed


@pytest.mark.slow  # test_the_cause_is_a_killed_rank_a_mistake_or_the_first_error reads what these ranks and torchrun leave
def test_a_killed_rank_is_the_cause_and_not_the_closed_connections_of_the_others(worker_program, tmp_path):
    done = finish(worker_program, tmp_path, "killed")
    assert done.returncode == 128 + signal.SIGKILL
    assert "rank 1 failed first, exit code 137:\nkilled by SIGKILL" in done.stderr and "connection" not in done.stderr


@pytest.mark.slow  # test_the_cause_is_a_killed_rank_a_mistake_or_the_first_error reads what these ranks and torchrun leave
@pytest.mark.parametrize("mode", ["mistake", "mistake of one"])
def test_a_mistake_that_the_ranks_detect_is_one_line_and_code_2(worker_program, tmp_path, mode):
    done = finish(worker_program, tmp_path, mode)
    assert (done.returncode, done.stderr) == (2, "zaya: megatron.nope = 1: no such argument\n")


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGUSR1))],
)
def test_a_signal_reaches_the_ranks_and_they_have_time_to_save(worker_program, tmp_path, number):
    command, environment = worker_program
    running = subprocess.Popen(
        [*command, f"run_dir={tmp_path}/run"],
        env={**environment, "WORKER_MODE": "save"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(6):  # two lines about the run, two lines a rank
        running.stdout.readline()
    running.send_signal(number)
    assert running.stderr.readline().startswith("zaya: stopping; the ranks save first.")
    running.send_signal(number)  # a copy, as of a batch system
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == ENDED_EARLY == 75
    assert sorted(path.name for path in (tmp_path / "run").glob("saved_by_*")) == ["saved_by_0", "saved_by_1"]
    assert stderr.count("a signal ended the run early, at step 96 of 240") == 1
    assert f"stopped by {number.name}" in stderr and "Traceback" not in stderr


@pytest.mark.slow
def test_the_console_says_for_whom_the_ranks_wait(worker_program, tmp_path):
    command, environment = worker_program
    running = subprocess.Popen(
        [*command, f"run_dir={tmp_path}/run"],
        env={**environment, "WORKER_MODE": "rank 0 is late"},
        stdout=subprocess.PIPE,
        text=True,
    )
    lines = [running.stdout.readline() for _ in range(5)]
    assert lines[4] == "zaya: rank 1: waits for rank 0, of 2 ranks\n"
    running.send_signal(signal.SIGTERM)
    assert running.communicate(timeout=300)[0] == ""
    assert running.returncode == 128 + signal.SIGTERM


@pytest.mark.slow
def test_a_second_signal_ends_ranks_that_do_not_leave(worker_program, tmp_path):
    command, environment = worker_program
    running = subprocess.Popen(
        [*command, f"run_dir={tmp_path}/run"],
        env={**environment, "WORKER_MODE": "stuck", "COPY_SECONDS": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(6):
        running.stdout.readline()
    running.send_signal(signal.SIGTERM)
    assert [running.stdout.readline(), running.stdout.readline()] == ["saving\n", "saving\n"]
    running.send_signal(signal.SIGTERM)
    running.communicate(timeout=300)
    assert running.returncode == 143


def test_ranks_end_when_their_parent_is_killed(worker_program, tmp_path):
    command, environment = worker_program
    running = subprocess.Popen(
        [*command, f"run_dir={tmp_path}/run"],
        env={**environment, "WORKER_MODE": "save"},
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(6):
        running.stdout.readline()
    running.kill()
    deadline = time.monotonic() + 60
    while len(list((tmp_path / "run").glob("saved_by_*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(list((tmp_path / "run").glob("saved_by_*"))) == 2


def test_resume_is_checked_before_anything_is_written(worker_program, tmp_path):
    pretend_checkpoint(tmp_path, 7)
    done = finish(worker_program, tmp_path, "variables")
    assert done.returncode == 2 and "step 7. Allowed: a directory without a checkpoint with resume=never" in done.stderr
    assert not (tmp_path / "recipe.yaml").exists()


@pytest.mark.parametrize("outer", ["torchrun", "SLURM"])
def test_joining_runs_the_worker_in_this_process(worker_program, tmp_path, outer):
    variables = {
        "torchrun": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "1", "MASTER_ADDR": "localhost"},
        "SLURM": {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1", "SLURM_JOB_NODELIST": "a[1-2]"},
    }[outer]
    done = finish(worker_program, tmp_path / "run", "variables", "cluster.environment.CUSTOM=yes", **variables)
    assert done.returncode == 0, done.stderr
    assert "rank 1 of 2 runs cpu_demo\nOMP_NUM_THREADS=" in done.stdout and "CUSTOM=yes" in done.stdout
    assert list((tmp_path / "run").iterdir()) == []  # rank 0 alone writes the recipe
    done = finish(worker_program, tmp_path / "run", "mistake", **variables)
    assert done.returncode == 2


STORE = {"MASTER_PORT": "1", "MASTER_ADDR": "localhost"}
OUTER = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "localhost"}
CAPTURES = ("cluster=gpu", "nproc=1", "cluster.kernels=auto", "cluster.graphs=auto")


@pytest.mark.parametrize("mode", [pytest.param("capture", marks=pytest.mark.slow), "capture, then a closed connection"])
def test_a_rank_of_an_outer_launcher_whose_capture_fails_names_the_key(worker_program, tmp_path, mode):
    done = finish(worker_program, tmp_path / "run", mode, *CAPTURES, **OUTER)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("cluster.graphs=full_iteration: the step could not be captured as a graph: ")
    assert line.endswith("Fix: cluster.graphs=none in the command of all ranks.")
    done = finish(worker_program, tmp_path / "run", mode, *CAPTURES[:3], "cluster.graphs=none", **OUTER)
    assert done.returncode == 0, "the fix works"


def test_a_rank_that_a_watchdog_aborts_has_named_the_key(worker_program, tmp_path):
    """torch's watchdog aborts in C++; the rank of an outer launcher prints nothing afterwards."""
    line = "aborted while the first step is captured, add cluster.graphs=none to the command of all ranks"
    done = finish(worker_program, tmp_path / "run", "abort", *CAPTURES, **OUTER)
    assert done.returncode == -signal.SIGABRT and line in done.stdout
    done = finish(worker_program, tmp_path / "run", "abort", *CAPTURES[:3], "cluster.graphs=none", **OUTER)
    assert done.returncode == 0 and line not in done.stdout


def test_another_error_of_a_rank_of_an_outer_launcher_stays(worker_program, tmp_path):
    done = finish(worker_program, tmp_path / "run", "raise", *CAPTURES, **{**OUTER, "RANK": "1", "WORLD_SIZE": "2"})
    assert done.returncode == 1 and done.stderr.rstrip().endswith("RuntimeError: the first error")


def test_ranks_of_an_outer_launcher_share_a_run_directory(worker_program, tmp_path):
    command, environment = worker_program
    running = []
    for rank in range(2):
        outer = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), **STORE}
        variables = {**environment, **outer, "WORKER_MODE": "none"}
        running.append(
            subprocess.Popen([*command, f"run_dir={tmp_path}/run"], env=variables, stdout=subprocess.DEVNULL)
        )
    assert [process.wait(timeout=60) for process in running] == [0, 0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["recipe.yaml"]


def test_a_port_in_use_is_named_and_a_free_one_passes(monkeypatch, tmp_path):
    # the port is asked about first
    sources = SimpleNamespace(cache_path=tmp_path)
    monkeypatch.setattr("zaya_plugin.run.surroundings.find_sources", lambda recipe: sources)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        recipe = demo(f"master_port={number}")
        plan = rank_plan.make_plan(recipe, {})
        assert f"localhost:{number}" in plan.command
        with pytest.raises(ValueError, match=f"master_port={number}: the port is in use"):
            surroundings.check_surroundings(recipe, plan)
    surroundings.check_surroundings(recipe, plan)


def test_missing_data_and_missing_devices_are_detected_before_the_start(monkeypatch, tmp_path):
    recipe = demo(f"data.path={tmp_path}/absent")
    with pytest.raises(ValueError, match=f"{tmp_path}/absent"):
        surroundings.check_surroundings(recipe, rank_plan.make_plan(recipe, {}))
    monkeypatch.setattr(surroundings, "DEVICE_FILES", (str(tmp_path / "no_device"),))
    with pytest.raises(ValueError, match="cluster.device=cuda: no accelerator on this machine"):
        surroundings.check_surroundings(demo("cluster=gpu"), rank_plan.make_plan(recipe, {}))


def test_the_plan_follows_nproc_the_cluster_and_the_outer_launcher():
    assert rank_plan.make_plan(demo(), {}).world_size == 2
    assert rank_plan.make_plan(demo("nproc=null", "cluster.gpus_per_node=4"), {}).world_size == 4
    torchrun = rank_plan.make_plan(
        demo(), {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", **STORE}
    )
    assert (torchrun.world_size, torchrun.local_ranks, torchrun.rank, torchrun.command) == (4, 2, 3, None)
    with pytest.raises(ValueError, match="cluster.num_nodes=2: .*torchrun --nnodes"):
        rank_plan.make_plan(demo("cluster.num_nodes=2"), {})


def test_the_environment_of_a_rank():
    cores = len(os.sched_getaffinity(0))
    assert rank_plan.rank_environment(demo(), 1, {})["OMP_NUM_THREADS"] == str(cores)
    assert rank_plan.rank_environment(demo(), 10 * cores, {})["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in rank_plan.rank_environment(demo(), 1, {"OMP_NUM_THREADS": "7"})
    assert (
        rank_plan.rank_environment(demo("cluster.threads_per_rank=2"), 1, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"]
        == "2"
    )
    on_cpu, on_gpu = rank_plan.rank_environment(demo(), 1, {}), rank_plan.rank_environment(demo("cluster=gpu"), 1, {})
    assert all(on_cpu[name] == "" for name in rank_plan.HIDDEN_DEVICES) and not set(rank_plan.HIDDEN_DEVICES) & set(
        on_gpu
    )
    assert "TORCHDYNAMO_DISABLE" in on_cpu and "TORCHDYNAMO_DISABLE" not in on_gpu
    assert rank_plan.rank_environment(demo("cluster.environment.WANDB_SILENT=false"), 1, {})["WANDB_SILENT"] == "false"
    queues = "CUDA_DEVICE_MAX_CONNECTIONS"
    assert (
        queues not in on_cpu
        and on_gpu[queues] == "8"
        and queues not in rank_plan.rank_environment(demo("cluster=gpu"), 1, {queues: "4"})
    )
    assert rank_plan.rank_environment(demo("cluster=gpu", "parallel.context_parallel_size=2"), 1, {})[queues] == "1"
    assert not set(rank_plan.DETERMINISTIC) & set(on_gpu)
    repeated = rank_plan.rank_environment(demo("cluster.deterministic=true"), 1, {"NCCL_ALGO": "CollnetChain"})
    assert repeated["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8" and "NCCL_ALGO" not in repeated
    theirs = ("cluster=gpu", "cluster.transformer_impl=transformer_engine")
    full = "NVIDIA_TF32_OVERRIDE"
    assert rank_plan.rank_environment(demo(*theirs, "cluster.dtype=fp32"), 1, {})[full] == "0"
    assert full not in on_gpu and full not in rank_plan.rank_environment(demo(*theirs), 1, {})
    registered = demo("cluster=gpu", "parallel.nccl_ub=true")
    assert "NCCL_CTA_POLICY" not in on_gpu and rank_plan.rank_environment(registered, 1, {})["NCCL_CTA_POLICY"] == "2"
    assert "NCCL_CTA_POLICY" not in rank_plan.rank_environment(registered, 1, {"NCCL_CTA_POLICY": "1"})


def test_last_words_are_the_last_traceback_or_the_last_lines():
    first = "Traceback (most recent call last):\n  old\nKeyError: 1\n"
    last = "Traceback (most recent call last):\n  new\nValueError: 2\n"
    handling = "\nDuring handling of the above exception, another exception occurred:\n\n"
    whole = f"it began with KeyError: 1\n{last.rstrip()}"
    assert last_words(f"noise\n{first}{handling}{last}") == last_words(f"{last}again\n{first}{handling}{last}") == whole
    assert last_words(f"{first}a line\n{last}") == last.rstrip()
    long = "Traceback (most recent call last):\n" + "\n".join(f"  line {n}" for n in range(100)) + "\nValueError: 3"
    assert last_words(long).splitlines()[1] == "  ..." and last_words(long).endswith("ValueError: 3")
    assert last_words("\n".join(str(n) for n in range(100))).splitlines()[0] == "70"


@pytest.mark.parametrize(
    "noise",
    [
        "Exception ignored in: <function IndexedDataset.__del__ at 0x7ff5>\n",
        "Exception in thread Thread-1 (_pin_memory_loop):\n",
        "Process Process-1:\n",
        "Error in atexit._run_exitfuncs:\n",
    ],
)
@pytest.mark.parametrize("told", [False, True])
def test_a_traceback_that_ended_no_process_is_no_cause(tmp_path, noise, told):
    noise += "Traceback (most recent call last):\n  File \"x.py\", line 1, in y\n    z\nAttributeError: 'no such'\n"
    cause = 'Traceback (most recent call last):\n  File "own.py", line 1, in f\nKeyError: 7\n'
    cause = "zaya: ulimit -n=256: Too many open files.\n" if told else cause
    path = tmp_path / "attempt_0" / "0" / "stderr.log"
    path.parent.mkdir(parents=True)
    path.write_text(noise + cause + noise + noise)
    (tmp_path / "torchrun.log").write_text("Root Cause\n  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 7)\n")
    failure = first_failure(tmp_path, tmp_path / "torchrun.log")
    assert failure.exit_code == 1 and failure.text == cause.rstrip()
    assert failure.message.startswith(cause[:20] if told else "zaya: rank 0 failed first, exit code 1:")


ERROR = 'Traceback (most recent call last):\n  File "own.py", line 1, in f\n'
MISTAKE = "zaya: megatron.nope = 1: no such argument"


@pytest.mark.parametrize(
    ("exit_code", "wrote", "code", "message"),
    [
        (-signal.SIGKILL, "", 137, "zaya: rank 1 failed first, exit code 137:\nkilled by SIGKILL"),
        (2, MISTAKE + "\n", 2, MISTAKE),
        (-signal.SIGTERM, ERROR + "KeyError: 7\n", 1, f"zaya: rank 1 failed first, exit code 1:\n{ERROR}KeyError: 7"),
    ],
    ids=["killed", "mistake", "error"],
)
def test_the_cause_is_a_killed_rank_a_mistake_or_the_first_error(tmp_path, exit_code, wrote, code, message):
    """And not rank 0, whose connection was closed. A rank may get torchrun's signal while it ends with its error."""
    for rank, text in enumerate((ERROR + "RuntimeError: connection\n", wrote)):
        path = tmp_path / "attempt_0" / str(rank) / "stderr.log"
        path.parent.mkdir(parents=True)
        path.write_text(text)
        os.utime(path, (10 - rank, 10 - rank))  # rank 0 fails last
    (tmp_path / "torchrun.log").write_text(
        f"Root Cause\n  rank      : 1 (local_rank: 1)\n  exitcode  : {exit_code} (pid: 7)\n"
    )
    failure = first_failure(tmp_path, tmp_path / "torchrun.log")
    assert failure.exit_code == code and failure.message.startswith(message) and "connection" not in failure.message


def test_no_failure_without_failed_ranks(tmp_path):
    (tmp_path / "attempt_0" / "0").mkdir(parents=True)
    (tmp_path / "attempt_0" / "0" / "stderr.log").write_text("UserWarning: nothing\n")
    assert first_failure(tmp_path, tmp_path / "absent.log") is None


def test_a_torchrun_that_cannot_start_is_shown(worker_program, tmp_path):
    plan = rank_plan.Plan(1, 1, 0, "zaya train", [sys.executable, "-c", "import sys; sys.exit('no torchrun')"], {})
    program = (
        "from pathlib import Path; from zaya_plugin.run.launch import Plan, run_ranks; import sys; "
        f"ended = run_ranks({plan!r}, Path({str(tmp_path)!r})); assert ended.folder is None; sys.exit(ended.code)"
    )
    (tmp_path / "launch_0").mkdir()  # of an earlier start
    done = subprocess.run([sys.executable, "-c", program], env=worker_program[1], capture_output=True, text=True)
    assert done.returncode == 1 and "torchrun failed with exit code 1:\nno torchrun" in done.stderr
    assert Path(tmp_path / "torchrun.log").read_text() == "no torchrun\n"


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(("code", "jobs"), [(0, 2), (1, 2), (ENDED_EARLY, 1), (128 + signal.SIGTERM, 1)])
def test_a_signal_ends_a_multirun_and_a_failed_job_does_not(monkeypatch, tmp_path, capsys, code, jobs):
    """The table of its runs is the end of its output."""
    started = []

    def run(recipe, verbose):
        started.append(recipe.run_dir)
        Path(recipe.run_dir).mkdir()
        (Path(recipe.run_dir) / "recipe.yaml").write_text(f"optim: {{lr: {recipe.optim.lr}}}\n")
        return code

    monkeypatch.setattr(launch, "launch", run)
    words = ["train", "experiment=cpu_demo", f"run_dir={tmp_path}", "optim.lr=1e-3,2e-3", "-m"]
    assert cli.main(words) == code
    assert started == [f"{tmp_path}/{number}" for number in range(jobs)]
    rows = capsys.readouterr().out.splitlines()[-jobs - 1 :]
    assert rows[0].split()[:2] == ["name", "state"] and [row.split()[0] for row in rows[1:]] == ["0", "1"][:jobs]
    assert jobs == 1 or [row.split()[-1] for row in rows[1:]] == ["lr=0.001", "lr=0.002"]


def test_more_ranks_than_devices_or_memory_is_refused(monkeypatch):
    recipe = demo("cluster=gpu", "nproc=4")
    monkeypatch.setattr(surroundings, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="nproc=4: this machine has 2 devices.*Fix: nproc=2"):
        surroundings.check_sizes(recipe, rank_plan.make_plan(recipe, {}))
    large = demo("cluster=gpu", "nproc=1", "model.hidden_size=1048576", "cluster.memory_gib=140")
    with pytest.raises(
        ValueError,
        match="cluster.memory_gib=140: the step does not fit: the memory plan needs [0-9,.]+ GiB of a device",
    ):
        surroundings.check_sizes(large, rank_plan.make_plan(large, {}))
    large = demo("model.num_layers=10000", "model.hidden_size=65536")
    with pytest.raises(ValueError, match="need [0-9,.]+ GiB for 2 ranks on a machine with"):
        surroundings.check_sizes(large, rank_plan.make_plan(large, {}))


def test_what_a_cpu_run_does_not_use_is_reported(monkeypatch):
    monkeypatch.setattr(surroundings, "core_count", lambda: 2)
    recipe = demo("nproc=4", "optim=adamw", "cluster.kernels=hip")
    ranks, kernels = surroundings.unused(recipe, rank_plan.make_plan(recipe, {}))
    assert ranks == "zaya: 4 ranks share the 2 cores of this machine; nproc=2 is the most without"
    assert "g++ build" in kernels and "router_mlp, grouped_product, dense_product, newton_schulz, muon" in kernels
    recipe = demo("nproc=2")
    assert surroundings.unused(recipe, rank_plan.make_plan(recipe, {})) == []

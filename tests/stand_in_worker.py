# SPDX-License-Identifier: Apache-2.0
"""Running the console script, and a worker without torch that real torchrun processes run in its place."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.running import without_phases

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "WANDB_SILENT", "PYTHONUNBUFFERED", "COLUMNS")


@pytest.fixture
def environment() -> dict[str, str]:
    """This process' environment without the variables that steer a launch."""
    unwanted = ("SLURM_", "HYDRA_", "ZAYA_", "MASTER_", "TORCHELASTIC_")
    return {
        name: value
        for name, value in os.environ.items()
        if name not in RANK_VARIABLES and (name == "ZAYA_CHECK" or not name.startswith(unwanted))
    }


@pytest.fixture
def zaya(tmp_path, environment):
    """Runs `zaya <arguments>` in an empty directory: zaya("train", ...) -> CompletedProcess."""
    place = tmp_path / "cwd"
    place.mkdir()

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
        done = subprocess.run(
            [sys.executable, "-m", "zaya_plugin.cli", *arguments],
            cwd=place,
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=120,
        )
        done.stderr = without_phases(done.stderr)
        return done

    run.place = place
    return run


@pytest.fixture
def worker_program(tmp_path, environment) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a program that launches the demo with the worker below instead of the real one.

    Everything else is real: torchrun, its children, files and signals. WORKER_MODE says how the ranks behave.
    """
    folder = tmp_path / "programs"
    folder.mkdir()
    (folder / "stand_in_worker.py").write_text(textwrap.dedent(WORKER))
    (folder / "stand_in_launch.py").write_text(textwrap.dedent(LAUNCH))
    variables = {**environment, "PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parents[1])])}
    return [sys.executable, str(folder / "stand_in_launch.py")], variables


LAUNCH = """
    import os, sys
    from zaya_plugin.config.compose import compose
    from zaya_plugin.run import launch, rank_plan, surroundings

    rank_plan.WORKER = launch.WORKER = "stand_in_worker"
    launch.COPY_SECONDS = float(os.environ.get("COPY_SECONDS", launch.COPY_SECONDS))
    surroundings.check_surroundings = lambda *_: None  # there is no data
    try:
        code = launch.launch(compose(["experiment=cpu_demo", *sys.argv[1:]]))
    except ValueError as error:
        print(error, file=sys.stderr)
        code = 2
    assert "torch" not in sys.modules
    sys.exit(code)
"""

WORKER = """
    import os, signal, sys, time
    from pathlib import Path
    from zaya_plugin.config.compose import load_recipe
    from zaya_plugin.ground.exit_codes import ENDED_EARLY
    from zaya_plugin.ground.parent_death import follow_launcher

    def main(rank, mode, recipe):
        print(f"rank {rank} of {os.environ['WORLD_SIZE']} runs {recipe.name}", flush=True)
        if mode == "variables":
            names = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE", "CUSTOM", "MASTER_PORT")
            print("|".join(f"{name}={os.environ[name]}" for name in names), flush=True)
        if mode == "raise":
            if rank:
                raise RuntimeError("the first error")
            logs = Path(recipe.run_dir, "logs")
            while not any("first error" in log.read_text() for log in logs.glob("launch_*/attempt_0/1/stderr.log")):
                time.sleep(0.01)
            time.sleep(0.1)  # a file's time of change has steps of some milliseconds
            raise RuntimeError("connection closed by peer")
        if mode == "capture" and recipe.cluster.graphs == "full_iteration":
            raise RuntimeError("HIP error: operation not permitted on an event last recorded in a capturing stream")
        if mode == "abort" and recipe.cluster.graphs == "full_iteration":
            os.abort()
        if mode == "capture, then a closed connection" and recipe.cluster.graphs == "full_iteration":
            try:
                raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
            finally:
                raise RuntimeError("connection closed by peer")
        if mode == "killed":
            dying = Path(recipe.run_dir, "dying")
            if rank == 1:
                dying.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            while not dying.exists():  # ranks start at different times
                time.sleep(0.01)
            time.sleep(0.02)
            raise RuntimeError("connection closed by peer")
        if mode == "mistake of one" and rank:  # the others fail because one leaves
            while not Path(recipe.run_dir, "leaving").exists():
                time.sleep(0.01)
            time.sleep(0.05)
            raise RuntimeError("connection closed by peer")
        if mode.startswith("mistake"):
            Path(recipe.run_dir, "leaving").touch()
            print("a warning\\nzaya: megatron.nope = 1: no such argument", file=sys.stderr)
            sys.exit(2)
        if mode == "save":
            stopped = []
            signal.signal(signal.SIGTERM, lambda *unused: stopped.append(True))
            print("ready", flush=True)
            while not stopped:
                time.sleep(0.02)
            time.sleep(0.5)
            Path(recipe.run_dir, f"saved_by_{rank}").write_text("whole")
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print(f"zaya: a signal ended the run early, at step 96 of 240", file=sys.stderr, flush=True)
            sys.exit(ENDED_EARLY)
        if mode == "rank 0 is late":
            while rank == 0:
                time.sleep(0.02)
            from zaya_plugin.hosts import start_waits, worker
            start_waits.SAY_SECONDS = 0.1
            sys.exit(worker.main(sys.argv[1:], lambda *of_rank: 0))  # as `bench step` and `verify`
        if mode == "stuck":
            signal.signal(signal.SIGTERM, lambda *unused: print("saving", flush=True))
            print("ready", flush=True)
            while True:
                time.sleep(0.02)

    if __name__ == "__main__":
        follow_launcher()
        main(int(os.environ["RANK"]), os.environ["WORKER_MODE"], load_recipe(sys.argv[1]))
"""

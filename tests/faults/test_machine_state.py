# SPDX-License-Identifier: Apache-2.0
"""What depends on the machine's state around Python: every command in each of these states.

A command works, or ends with one message that names the limit. `tests/faults/README.md` has the reports.
Left out: few processes (`ulimit -u`), since root is exempt, and a small address space (`ulimit -v`), in which the
libraries below Python abort by themselves. tests/ground/test_errors.py has the messages of both.
"""

import os
import subprocess
from dataclasses import dataclass, field

import pytest

from tests.running import MICRO, command

SECONDS = 250


@dataclass
class State:
    """variables: set in the environment, None: absent. shell: run before the command, in an empty folder. words: in front
    of the command. told: what the message of each command that cannot work must hold, by command.
    """

    variables: dict[str, str | None] = field(default_factory=dict)
    shell: str = ":"
    words: tuple[str, ...] = ()
    told: dict[str, str] = field(default_factory=dict)


COMMANDS = ("prepare", "train", "export", "generate")
REMOVED = "mkdir gone && cd gone && rmdir ../gone"
NO_SHARED_MEMORY = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o ro none /dev/shm && exec "$@"', "sh")
STATES = {
    "locale C": State({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    "console latin-1": State({"PYTHONIOENCODING": "latin-1"}),
    "no HOME": State({"HOME": None}),
    "HOME that cannot be made": State({"HOME": "/proc/none"}),
    "folder removed": State(shell=REMOVED, told=dict.fromkeys(COMMANDS, "current directory")),
    "folder read-only": State(shell="cd /proc"),
    "user without a name": State({"USER": None, "LOGNAME": None}, words=("unshare", "--user", "--map-user=4242")),
    "umask 077": State(shell="umask 077"),
    "few files": State(shell="ulimit -n 128", told={"train": "ulimit -n=128: "}),
    "small stack": State(shell="ulimit -s 1024"),
    "small files": State(shell="ulimit -f 100", told=dict.fromkeys(COMMANDS[:3], "ulimit -f")),
    "no /dev/shm": State(
        words=NO_SHARED_MEMORY, told=dict.fromkeys(("prepare", "train"), "/dev/shm: Read-only file system")
    ),
}


def run(state: State, tmp_path, *words: str) -> tuple[int, str]:
    """Run `zaya` in a state; return its exit code and its messages."""
    place = tmp_path / "place"
    place.mkdir(exist_ok=True)
    environment = {**os.environ, **{name: value for name, value in state.variables.items() if value is not None}}
    for name in [name for name, value in state.variables.items() if value is None]:
        environment.pop(name, None)
    done = subprocess.run(
        ["sh", "-c", f'{state.shell} && exec "$@"', "sh", *state.words, *command(*words)],
        cwd=place,
        env=environment,
        capture_output=True,
        timeout=SECONDS,
    )
    return done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace")


def commands(tmp_path) -> dict[str, tuple[str, ...]]:
    data, runs, export = (str(tmp_path / name) for name in ("data", "run", "export"))
    prepare = (
        "--input",
        "stdlib",
        "--max-bytes",
        "300K",
        "--valid-fraction",
        "0.2",
        "--train-bpe",
        "400",
        "--workers",
        "2",
    )
    steps = ("stage.train_iters=2", "optim.lr_warmup_iters=1", "checkpoint.save_interval=1", "data.num_workers=1")
    return {
        "prepare": ("data", "prepare", "--output", data, *prepare),
        "train": ("train", *MICRO, *steps, "nproc=1", f"data.path={data}", f"run_dir={runs}"),
        "export": ("checkpoint", "export", runs, "--output", export),
        "generate": ("generate", export, "--prompt", "def", "--max-new-tokens", "4"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", STATES)
@pytest.mark.timeout(1800)
def test_the_commands_in_a_state_of_the_machine(tmp_path, name):
    state = STATES[name]
    if state.words and subprocess.run([*state.words, "true"], capture_output=True).returncode:
        pytest.skip("namespaces need root")
    for what, words in commands(tmp_path).items():
        code, said = run(state, tmp_path, *words)
        if what in state.told:
            assert code and state.told[what] in said and "Traceback" not in said, (what, said)
            code, said = run(State(), tmp_path, *words)
        assert code == 0 and "Traceback" not in said, (what, code, said)


def test_a_corpus_is_prepared_without_locale_home_and_name(tmp_path):
    variables = STATES["locale C"].variables | {"HOME": "/proc/none", "USER": None, "LOGNAME": None}
    code, said = run(State(variables, "umask 077 && cd /proc"), tmp_path, *commands(tmp_path)["prepare"])
    assert code == 0 and "Traceback" not in said, said

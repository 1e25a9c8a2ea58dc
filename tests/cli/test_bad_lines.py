# SPDX-License-Identifier: Apache-2.0
"""Bad command lines, generated: each ends with code 2 and one message, before anything is launched or created."""

import os
import random
import signal

import pytest

from tests.cli import bad_lines
from zaya_plugin import cli
from zaya_plugin.run import launch, surroundings

SEED = 26
LINE_SECONDS = 20  # seconds of one line on a busy machine; most take 0.1


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """A function that runs a line in this process and says what is wrong with its end, or nothing."""

    def started(*unused):
        raise AssertionError("a rank was started")

    def hangs(*unused):
        raise AssertionError("hangs")

    for name in ("run_ranks", "become_rank"):
        monkeypatch.setattr(launch, name, started)
    # The data is the one part of the demo's recipe that is missing.
    monkeypatch.setattr(surroundings, "check_surroundings", surroundings.check_machine)
    for name in os.environ:
        if name.startswith(("SLURM_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    previous = signal.signal(signal.SIGALRM, hangs)

    def run(line):
        signal.alarm(LINE_SECONDS)
        with monkeypatch.context() as patch:
            for name, value in line.environ.items():
                patch.setenv(name, value)
            try:
                code = cli.main(list(line.words))
            except Exception as error:
                code = f"{type(error).__name__}: {error}"
            finally:
                signal.alarm(0)
        told = capsys.readouterr().err
        whole = code == 2 and told.strip() and "Traceback" not in told and line.names in told
        if whole and not list(tmp_path.iterdir()):
            return None
        return f"{line} -> {code}: {told[-400:]!r} {[path.name for path in tmp_path.iterdir()]}"

    yield run
    signal.signal(signal.SIGALRM, previous)


def check(refused, lines):
    wrong = [problem for line in lines if (problem := refused(line))]
    assert not wrong, f"{len(wrong)} of {len(lines)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize(("train", "others"), [(10, 90), pytest.param(40, 460, marks=pytest.mark.slow)])
def test_bad_lines_are_refused(refused, train, others):
    check(refused, [*bad_lines.train(SEED, train), *bad_lines.others(SEED, others)])


@pytest.mark.slow
def test_500_bad_lines_of_train_are_refused(refused):
    check(refused, bad_lines.train(SEED + 1, 500))


@pytest.mark.slow
def test_bad_lines_through_the_real_command(zaya):
    lines = random.Random(SEED).sample([*bad_lines.train(SEED + 2, 30), *bad_lines.others(SEED + 2, 10)], 20)
    for line in lines:
        words = [word.replace("\0", "") for word in line.words]
        done = zaya(*words, **line.environ)
        assert done.returncode == 2 and "Traceback" not in done.stderr and line.names in done.stderr, (line, done)
        # A dry run launches nothing, and prints torchrun's words, `--rdzv-id launch` among them.
        assert {"--dry-run", "dry_run=true"} & set(words) or "launch" not in done.stdout
        assert list(zaya.place.iterdir()) == []

# SPDX-License-Identifier: Apache-2.0
"""Killed runs, leftovers and two runs at once. The end is always the bytes of an undisturbed run."""

import os
import shutil
import signal
import time

import pytest

from zaya_plugin.corpus.workspace import Workspace


@pytest.fixture
def command(corpus, prepared):
    """The arguments that made `prepared`, in parts of about 2 KB so that there are many; `prepared` is what they must
    end with.
    """
    return ["--input", corpus, "--train-bpe", 400, "--valid-fraction", 0.2, "--part-bytes", 2000]


def wait_for(condition, process):
    while not condition():
        assert process.poll() is None, f"it ended before it could be killed: {process.communicate()}"
        time.sleep(0.001)


def kill(process):
    """Kill a process and wait until its workers have noticed; return how many it had."""
    children = open(f"/proc/{process.pid}/task/{process.pid}/children").read().split()
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    end = time.monotonic() + 60
    while any(is_running(child) for child in children):
        assert time.monotonic() < end, "a worker is still there"
        time.sleep(0.01)
    return len(children)


def is_running(pid):
    try:
        return "\nState:\tZ" not in open(f"/proc/{pid}/status").read()
    except (FileNotFoundError, ProcessLookupError):
        return False


def interrupt(*_):
    raise KeyboardInterrupt


def part_files(output):
    directory = output.parent / f"{output.name}.partial" / "parts"
    return {path.name: path.stat().st_ino for path in directory.glob("*.part")} if directory.is_dir() else {}


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_continues_and_ends_with_the_same_bytes(
    tmp_path, workers, command, start, run, prepared, contents, capfd
):
    """Workers do not outlive their parent."""
    output = tmp_path / "out"
    process = start(*command, "--output", output, "--workers", workers)
    wait_for(lambda: len(part_files(output)) >= 3, process)
    assert kill(process) >= workers * (workers > 1)
    finished = part_files(output)
    assert len(finished) >= 3 and not output.exists()
    assert run(*command, "--output", output, "--workers", workers) == 0
    err = capfd.readouterr().err
    assert f"continued: {len(finished)} of " in err and int(err.split(" of ")[1].split()[0]) > len(finished)
    assert contents(output) == contents(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, command, start, run, prepared, contents):
    """As soon as each file is there: the lock, the plan, the tokenizer, a few parts, the merge and the manifest."""
    output, partial = tmp_path / "out", tmp_path / "out.partial"
    events = [
        *(lambda path=path: path.exists() for path in (tmp_path / "out.lock.1", partial / "plan.json")),
        lambda: (partial / "tokenizer.tmp").exists() or (partial / "tokenizer").exists(),
        *(lambda count=count: len(part_files(output)) >= count for count in (1, 5, 9)),
        *(
            lambda name=name: (partial / "final" / name).exists()
            for name in ("train.bin", "valid.idx", "manifest.json")
        ),
    ]
    kills = 0
    for event in events:
        for left in tmp_path.glob("out.lock.*"):
            left.unlink()
        process = start(*command, "--output", output, "--workers", 1)
        while not event() and process.poll() is None:
            time.sleep(0.0005)
        process.kill()
        process.communicate()
        kills += process.returncode != 0  # 0: this test was not scheduled until the end
    assert kills >= 2
    assert run(*command, "--output", output) == 0
    assert contents(output) == contents(prepared)
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_leftovers_of_every_stage(tmp_path, command, run, prepared, contents, monkeypatch, capfd):
    """What a kill may leave, put there by hand: half a merge, half a part, a worker's temporary file, an old dataset
    moved aside.
    """
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "publish", interrupt)
        assert run(*command, "--output", output) == 130
    assert "the same command continues from there" in capfd.readouterr().err
    partial = tmp_path / "out.partial"
    (partial / "final" / "train.bin").write_bytes(b"half a merge")
    parts = sorted((partial / "parts").glob("*.part"))
    parts[1].write_bytes(parts[1].read_bytes()[:1000])
    parts[3].unlink()
    (partial / "parts" / "0000003.part.77.tmp").write_bytes(b"half")
    shutil.copytree(prepared, tmp_path / "out.replaced")
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "publish", interrupt)
        assert run(*command, "--output", output) == 130
    assert sorted((partial / "parts").iterdir()) == parts
    err = capfd.readouterr().err
    assert run(*command, "--output", output) == 0
    assert f"continued: {len(parts) - 2} of {len(parts)} parts" in err
    assert contents(output) == contents(prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_part_that_is_damaged_inside_is_redone(tmp_path, command, run, prepared, contents, monkeypatch, capfd):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "publish", interrupt)
        assert run(*command, "--output", output) == 130
    part = sorted((tmp_path / "out.partial" / "parts").glob("*.part"))[2]
    data = bytearray(part.read_bytes())
    at = data.index(b"train_tokens.npy") + 400
    data[at] ^= 0xFF
    part.write_bytes(data)
    assert run(*command, "--output", output) == 2
    assert f"{part}: is damaged" in capfd.readouterr().err
    assert run(*command, "--output", output) == 0
    assert contents(output) == contents(prepared)


def test_output_appears_by_one_rename(tmp_path, command, run, monkeypatch):
    seen = []

    def publish(self):
        seen.append(os.stat(self.final).st_ino)
        whole(self)

    whole = Workspace.publish
    monkeypatch.setattr(Workspace, "publish", publish)
    for more in ([], ["--overwrite"]):
        assert run(*command, "--output", tmp_path / "out", *more) == 0
        assert seen[-1] == (tmp_path / "out").stat().st_ino


def test_killed_after_the_last_rename(tmp_path, command, run, prepared, contents, capsys):
    output = tmp_path / "out"
    assert run(*command, "--output", output) == 0
    (tmp_path / "out.partial" / "parts").mkdir(parents=True)
    (tmp_path / "out.partial" / "plan.json").write_text("{}")
    assert run(*command, "--output", output) == 0
    assert "already complete" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and contents(output) == contents(prepared)


def test_unfinished_run_with_other_arguments_is_refused(tmp_path, command, corpus, run, monkeypatch, capsys):
    output = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(Workspace, "publish", interrupt)
        assert run(*command, "--output", output) == 130
    capsys.readouterr()
    other = ["--input", corpus, "--train-bpe", 300, "--valid-fraction", 0.2]
    assert run(*other, "--output", output) == 2
    error = capsys.readouterr().err
    assert "unfinished run with other arguments" in error and "--train-bpe: it was made with 400, now 300" in error
    assert run(*command[:-1], 3000, "--output", output) == 2
    assert "--part-bytes: it was made with 2000, now 3000" in capsys.readouterr().err
    os.utime(corpus)
    assert run(*command, "--output", output) == 2
    assert "modification times of the input files" in capsys.readouterr().err
    assert run(*other, "--output", output, "--overwrite") == 0


def test_second_process_on_the_same_output_is_turned_away(tmp_path, command, start, run, capsys, prepared, contents):
    output = tmp_path / "out"
    process = start(*command, "--output", output, "--workers", 1)
    wait_for(lambda: part_files(output), process)
    process.send_signal(signal.SIGSTOP)
    assert run(*command, "--output", output) == 2
    assert f"another process is preparing {output} (process {process.pid} on " in capsys.readouterr().err
    process.send_signal(signal.SIGCONT)
    process.communicate()
    assert process.returncode == 0 and contents(output) == contents(prepared)


def test_interrupt_says_how_to_go_on(tmp_path, command, start, run, prepared, contents):
    command = [*command, "--part-bytes", 200]  # many parts, so that the signal comes before the end
    for attempt in range(5):
        output = tmp_path / f"out{attempt}"
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job
        process = start(*command, "--output", output, "--workers", 2)
        signal.signal(signal.SIGINT, before)
        wait_for(lambda output=output: part_files(output), process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
        if process.returncode != 0:  # 0: this test was not scheduled until the end
            break
    assert process.returncode == 130 and "the same command continues from there" in err and "Traceback" not in err
    assert run(*command, "--output", output) == 0 and contents(output) == contents(prepared)

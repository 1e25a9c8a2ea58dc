# SPDX-License-Identifier: Apache-2.0
"""`zaya checkpoint`: what it says about complete, damaged and unfinished checkpoints, and what it removes."""

import json
import os
import subprocess
import sys
import time

import pytest
import xxhash

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin import cli
from zaya_plugin.checkpoint import manifest, on_disk, places

STEPS = (100, 200, 300, 400)
# Manifests with the right checksum of their own, that state nothing else, and only the format.
NOTHING = b'{"xxh3_128": "%s"}' % xxhash.xxh3_128_hexdigest(b"{}").encode()
EMPTY = b'{"format": "zaya checkpoint/1", "xxh3_128": "%s"}' % (
    xxhash.xxh3_128_hexdigest(b'{"format": "zaya checkpoint/1"}').encode()
)


@pytest.fixture
def run_dir(tmp_path):
    for step in STEPS:
        folder = tmp_path / "checkpoints" / f"iter_{step:07d}"
        folder.mkdir(parents=True)
        (folder / "__0_0.distcp").write_bytes(bytes([step % 251]) * 2000)
        files = {"__0_0.distcp": manifest.describe(folder / "__0_0.distcp")}
        manifest.write(folder, step, files, run_id="ab12", ranks=1)
    return tmp_path


def shard(run_dir, step):
    return run_dir / "checkpoints" / f"iter_{step:07d}" / "__0_0.distcp"


def test_list_and_show(run_dir, capsys):
    (run_dir / "checkpoints" / "iter_0000500.unfinished").mkdir()
    (run_dir / "checkpoints" / "iter_0000050.damaged").mkdir()
    (run_dir / "checkpoints" / "iter_0000060.replaced").mkdir()
    shard(run_dir, 200).write_bytes(b"short")
    assert cli.main(["checkpoint", "list", str(run_dir)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "100",
        "200",
        "300",
        "400",
        "iter_0000500.unfinished:",
        "iter_0000050.damaged:",
        "iter_0000060.replaced:",
    ]
    assert lines[0].endswith("complete") and "has 5 bytes, its manifest states 2000" in lines[1]
    assert cli.main(["checkpoint", "show", str(run_dir / "checkpoints"), "--step", "300"]) == 0
    shown = capsys.readouterr().out
    assert "  run_id              ab12\n" in shown and manifest.describe(shard(run_dir, 300))["xxh3_128"] in shown


def test_show_is_readable_and_json_has_all(tmp_path, capsys):
    """The values of a recipe filled one line of 5,200 characters."""
    values = {f"stage.key_{number}": "x" * 20 for number in range(200)} | {"megatron": {"seed": 1}}
    data = {"tokenizer": "0123", "special_tokens": False, "train": {f"data/{n}/train": "abcdef" for n in range(30)}}
    folder = tmp_path / "checkpoints" / "iter_0000007"
    folder.mkdir(parents=True)
    files = {f"__{rank}_0.distcp": {"bytes": 0, "xxh3_128": "ff"} for rank in range(40)}
    for name in files:
        (folder / name).touch()
    manifest.write(
        folder, 7, files, run_id="ab12", lineage={"stage": "one", "steps": 5}, recipe_values=values, data=data
    )
    assert cli.main(["checkpoint", "show", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and max(map(len, lines)) < 130, lines
    assert lines[4].split(maxsplit=1) == ["lineage", "stage one, steps 5"]
    assert lines[5].split() == ["data.tokenizer", "0123"] and lines[6].split() == ["data.special_tokens", "False"]
    assert lines[7].split()[0] == "data.train" and lines[7].endswith("...")
    assert lines[8].split(maxsplit=1) == ["files", "40, 0.00 MB, the largest of 0.00 MB"] and lines[9] == "complete"
    assert cli.main(["checkpoint", "show", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["recipe_values"] == values and told["files"] == files and told["problems"] == []


def test_verify_finds_a_flipped_byte(run_dir, capsys):
    content = bytearray(shard(run_dir, 300).read_bytes())
    content[1234] ^= 1
    shard(run_dir, 300).write_bytes(content)
    assert cli.main(["checkpoint", "list", str(run_dir)]) == 0, "sizes are as before"
    assert cli.main(["checkpoint", "verify", str(run_dir)]) == 0, "the newest is intact"
    assert cli.main(["checkpoint", "verify", str(run_dir), "--all"]) == 1
    out = capsys.readouterr().out
    assert "iter_0000300: damaged" in out and "has the checksum" in out and "iter_0000200: intact" in out


def test_verify_also_reads_what_the_next_start_loads(run_dir, capsys):
    shard(run_dir, 400).unlink()
    assert cli.main(["checkpoint", "verify", str(run_dir)]) == 1
    out = capsys.readouterr().out
    assert "iter_0000300: intact, read" in out and "iter_0000400: damaged" in out


def test_verify_reads_at_a_limited_rate_and_prints_it(run_dir, capsys):
    began = time.monotonic()
    assert cli.main(["checkpoint", "verify", str(run_dir), "--limit", "1e-5"]) == 0  # 10 kB a second
    assert time.monotonic() - began >= 0.2
    assert "iter_0000400: intact, read 0.00 MB in " in capsys.readouterr().out


def test_prune_keeps_the_newest_the_permanent_and_what_is_not_complete(run_dir, capsys):
    shard(run_dir, 300).unlink()
    words = ["checkpoint", "prune", str(run_dir), "--keep-last", "1", "--keep-every", "200"]
    assert cli.main([*words, "--dry-run"]) == 0
    assert capsys.readouterr().out.split() == ["would", "remove", str(shard(run_dir, 100).parent)]
    assert cli.main(words) == 0
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == [
        "iter_0000200",
        "iter_0000300",
        "iter_0000400",
    ]


def test_odd_folders_are_distinguished_and_nothing_of_others_is_removed(run_dir, tmp_path, capsys):
    """Links, names that are nearly those of checkpoints, broken manifests, folders in the place of files."""
    checkpoints = run_dir / "checkpoints"
    moved = tmp_path / "tape" / "iter_0000100"
    moved.parent.mkdir()
    (checkpoints / "iter_0000100").rename(moved)
    (checkpoints / "iter_0000100").symlink_to(moved)
    (checkpoints / "iter_0000300" / "dangling").symlink_to("nowhere")
    odd = [
        "iter_",
        "iter_12",
        "iter_0000500.mine",
        "iter_000050\u0660",
        "iter_00000500",
        "iter_0000500 (copy)",
        "iter_-000001",
    ]
    odd += ["iter_mine.unfinished", "iter_0000500.my copy.removed"]
    for name in odd:
        (checkpoints / name).mkdir()
        (checkpoints / name / "file").touch()
    (checkpoints / "iter_0000600").write_text("a file")
    assert cli.main(["checkpoint", "list", str(run_dir)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][:4] == [str(step) for step in STEPS]
    assert cli.main(["checkpoint", "verify", str(run_dir), "--all"]) == 0
    assert cli.main(["checkpoint", "prune", str(run_dir), "--keep-last", "1"]) == 0
    manifest.remove_leftovers(checkpoints)
    left = ["iter_0000100", "iter_0000400", "iter_0000600", *odd]
    assert sorted(path.name for path in checkpoints.iterdir()) == sorted(left), "a link's content is not here"
    assert manifest.damaged(moved) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's rights")
def test_a_folder_without_permission_holds_up_no_other(run_dir, tmp_path, capsys, monkeypatch):
    """An unreadable checkpoint ended the removal of old ones, also a run's, and the disk filled up."""
    monkeypatch.setattr(places, "require_answer", lambda *_: None)  # its process would be root's
    checkpoints = run_dir / "checkpoints"
    for path in (*tmp_path.rglob("*"), tmp_path):
        os.chown(path, 65534, 65534)
    for parent in tmp_path.parents:
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o711)
    cli.main(["checkpoint", "list", str(run_dir)])  # the modules that it imports may be root's
    capsys.readouterr()
    (checkpoints / "iter_0000300").chmod(0)
    os.seteuid(65534)
    try:
        codes = {words: cli.main(["checkpoint", words, str(run_dir)]) for words in ("list", "show", "prune")}
        codes["verify"] = cli.main(["checkpoint", "verify", str(run_dir), "--all"])
        codes["adopt"] = cli.main(["checkpoint", "adopt", str(run_dir), "--step", "300"])
        assert cli.main(["checkpoint", "prune", str(run_dir), "--keep-last", "1"]) == 0
    finally:
        os.seteuid(0)
    assert codes == {"list": 1, "show": 0, "prune": 0, "verify": 1, "adopt": 1}
    assert sorted(path.name for path in checkpoints.iterdir()) == ["iter_0000300", "iter_0000400"]
    printed = capsys.readouterr().out
    assert printed.count("iter_0000300/manifest.json cannot be read (Permission denied)") == 3
    assert "iter_0000400: intact" in printed


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b"{}", b"\xff\xfe", b'{"format": "zaya checkpoint/1"', NOTHING, EMPTY, None]
)
def test_a_manifest_of_any_content_is_named(run_dir, capsys, content):
    """Also without a part and with the checksum that it states: it ended in a traceback, and a run's ranks waited."""
    path = run_dir / "checkpoints" / "iter_0000400" / manifest.NAME
    path.unlink()
    path.mkdir() if content is None else path.write_bytes(content)
    for command in ("list", "show", "verify", "adopt"):
        assert cli.main(["checkpoint", command, str(run_dir)]) == 1
        assert f"damaged: {path} " in capsys.readouterr().out.replace("damaged\n  ", "damaged: "), command
    assert path.is_dir() if content is None else path.read_bytes() == content, "adopt replaces no manifest"


def test_a_step_of_more_than_seven_digits(tmp_path, capsys):
    """Megatron's folder names have seven digits or more: a run would have begun from the start after step 9,999,999."""
    pretend_checkpoint(tmp_path, 9_999_999)
    pretend_checkpoint(tmp_path, 12_345_678)
    assert on_disk.latest(tmp_path / "checkpoints") == (12_345_678, [])
    assert cli.main(["checkpoint", "prune", str(tmp_path), "--keep-last", "1"]) == 0
    assert cli.main(["checkpoint", "show", str(tmp_path)]) == 0
    assert "iter_12345678" in capsys.readouterr().out
    assert on_disk.put_aside_from(tmp_path / "checkpoints", 5)[0].name == "iter_12345678.failed"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["list", "nowhere"], "RUN=nowhere: no such checkpoint: the path does not exist. Allowed: a run directory"),
        (["verify", "{run}", "--step", "100", "--all"], "--all: --step 100 was given too. Allowed: one of the two"),
        (
            ["verify", "{run}", "--step", "7"],
            "--step=7: no such checkpoint in {run}/checkpoints. Allowed: 100, 200, 300",
        ),
        (["prune", "{run}", "--keep-last", "0"], "--keep-last: '0' is not a whole number from 1 to "),
    ],
)
def test_mistakes(run_dir, capsys, words, named):
    assert cli.main(["checkpoint", *(word.format(run=run_dir) for word in words)]) == 2
    assert named.format(run=run_dir) in capsys.readouterr().err


OPTIONS = {
    "list": (),
    "show": ("--step", "--json"),
    "verify": ("--step", "--all", "--limit"),
    "prune": ("--keep-last", "--keep-every", "--dry-run"),
    "adopt": ("--step",),
    "reshape": ("--step", "--output", "--files"),
}


def test_options_of_another_action_are_refused_and_not_in_its_help(run_dir, capsys):
    everything = {option for options in OPTIONS.values() for option in options}
    needed = {"reshape": ("--output", "there", "--files", "2")}
    for action, own in OPTIONS.items():
        with pytest.raises(SystemExit):
            cli.main(["checkpoint", action, "--help"])
        text = capsys.readouterr().out
        assert {option for option in everything if option in text} == set(own)
        for option in sorted(everything - set(own)):
            given = [option] if option in ("--json", "--all", "--dry-run") else [option, "3"]
            assert cli.main(["checkpoint", action, str(run_dir), *given, *needed.get(action, ())]) == 2
            assert f"zaya: {option}: no such option" in capsys.readouterr().err


def test_no_torch_is_imported(run_dir):
    """It runs on a login node."""
    program = (
        "import sys; from zaya_plugin import cli\n"
        "for words in (['list'], ['verify', '--all'], ['prune', '--keep-last', '2']):\n"
        "    assert cli.main(['checkpoint', words[0], sys.argv[1], *words[1:]]) == 0, words\n"
        "    assert not {'torch', 'megatron'} & set(sys.modules), words"
    )
    done = subprocess.run([sys.executable, "-c", program, str(run_dir)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_pipe_in_the_place_of_the_recipe_is_not_waited_for(run_dir, capsys):
    os.mkfifo(run_dir / "recipe.yaml")
    assert cli.main(["checkpoint", "list", str(run_dir)]) == 2
    assert capsys.readouterr().err.startswith(f"zaya: {run_dir / 'recipe.yaml'}: must be a regular file.")


def test_a_recipe_of_other_bytes_hides_no_checkpoint(run_dir):
    (run_dir / "recipe.yaml").write_bytes(b"\xff\xfe\x00")
    assert cli.main(["checkpoint", "list", str(run_dir)]) == 0


def test_prune_leaves_what_is_read_and_verify_reads_under_a_lock(run_dir, capsys, monkeypatch):
    stock, left = manifest.damaged, []

    def damaged(folder, *arguments):
        left.append(on_disk.remove(folder.parent, on_disk.iteration_of(folder)))  # as a run would
        return stock(folder, *arguments)

    monkeypatch.setattr(manifest, "damaged", damaged)
    assert cli.main(["checkpoint", "verify", str(run_dir), "--all"]) == 0 and left == [False] * len(STEPS)
    capsys.readouterr()
    with manifest.hold(shard(run_dir, 100).parent):
        assert cli.main(["checkpoint", "prune", str(run_dir), "--keep-last", "2"]) == 0
    assert f"{shard(run_dir, 100).parent} stays: another program is reading it" in capsys.readouterr().out
    assert on_disk.iterations(run_dir / "checkpoints") == [100, 300, 400]

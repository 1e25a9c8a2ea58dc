# SPDX-License-Identifier: Apache-2.0
"""The run directory: resuming, whether it is writable, and the recipes kept in it."""

import os
import subprocess
import sys
import tempfile

import pytest

from tests.checkpoint_files import pretend_checkpoint
from zaya_plugin.config import run_directory
from zaya_plugin.config.compose import compose, load_recipe
from zaya_plugin.config.run_directory import check_resume, checkpoint_path, checkpoints_of, keep_recipe, make_writable
from zaya_plugin.config.schema import Recipe
from zaya_plugin.run import dry_run, megatron_check, surroundings
from zaya_plugin.run.rank_plan import make_plan


def with_checkpoint(run_dir, step=40):
    pretend_checkpoint(run_dir, step)
    return run_dir


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_an_empty_place_may_be_used(tmp_path, resume):
    check_resume(Recipe(run_dir=str(tmp_path / "run"), resume=resume))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("resume", ["auto", "must"])
def test_a_checkpoint_may_be_continued(tmp_path, resume):
    check_resume(Recipe(run_dir=str(with_checkpoint(tmp_path)), resume=resume))


def test_a_run_is_never_overwritten_and_the_message_names_three_ways_on(tmp_path):
    with pytest.raises(ValueError) as caught:
        check_resume(Recipe(run_dir=str(with_checkpoint(tmp_path)), resume="never"))
    for part in (
        str(tmp_path),
        "step 40",
        "resume=never",
        "Fix: resume=auto",
        "run_dir=<other directory>",
        f"delete {tmp_path}",
    ):
        assert part in str(caught.value)


def test_must_needs_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=f"resume=must: no checkpoint in {tmp_path}/checkpoints"):
        check_resume(Recipe(run_dir=str(tmp_path), resume="must"))


def test_checkpoints_in_another_directory_than_the_recipes_are_seen(tmp_path):
    """NVIDIA-NeMo/Megatron-Bridge#4900, #5090: a second place was not looked at, and the run began at step 0."""
    recipe = compose(["experiment=cpu_demo", f"run_dir={tmp_path}/run", f"checkpoint.path={tmp_path}/fast"])
    assert checkpoints_of(tmp_path / "run") == tmp_path / "run" / "checkpoints", "before there is a recipe"
    keep_recipe(recipe, make_directory(tmp_path / "run"))
    assert checkpoints_of(tmp_path / "run") == checkpoint_path(recipe) == tmp_path / "fast"
    (tmp_path / "fast" / "iter_0000040").mkdir(parents=True)
    (tmp_path / "fast" / "iter_0000040" / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=f"the checkpoints of this run are in {tmp_path}/fast"):
        check_resume(Recipe(run_dir=str(tmp_path / "run"), resume="auto"))
    (tmp_path / "moved").symlink_to(tmp_path / "fast")
    recipe.checkpoint.path, recipe.resume = str(tmp_path / "moved"), "auto"
    check_resume(recipe)


def make_directory(path):
    path.mkdir(parents=True)
    return path


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path):
    """Path.glob() takes it for one, and a run that has checkpoints would begin at step 0."""
    run_dir = with_checkpoint(tmp_path / "run")
    program = (
        "import os, sys; sys.path[:] = sys.argv[2:]; from zaya_plugin.config.schema import Recipe; "
        "from zaya_plugin.config.run_directory import check_resume; os.getuid() or os.setuid(65534); "
        "check_resume(Recipe(run_dir=sys.argv[1]))"
    )
    for path in (*tmp_path.parents, tmp_path):
        if path.stat().st_uid == os.getuid() and path.is_relative_to(tempfile.gettempdir()):
            path.chmod(path.stat().st_mode | 0o11)  # the way to the run is open to the other user
    iteration = run_dir / "checkpoints" / "iter_0000040"
    for closed, said in (
        (iteration.parent, f"{iteration.parent}: cannot be read (Permission denied)"),
        (iteration, "contains a checkpoint of step 40"),
    ):
        mode = closed.stat().st_mode
        closed.chmod(0)
        done = subprocess.run([sys.executable, "-c", program, run_dir, *sys.path], capture_output=True, text=True)
        closed.chmod(mode | 0o55)
        assert said in done.stderr


def test_the_probe_leaves_nothing(tmp_path):
    make_writable(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=f"run_dir={tmp_path}/run: cannot be written .File exists"):
        make_writable(tmp_path / "run")


@pytest.mark.skipif(not os.path.isdir("/proc/sys"), reason="needs Linux's /proc")
def test_what_even_root_cannot_write_is_named():
    with pytest.raises(ValueError, match="run_dir=/proc/run: cannot be written"):
        make_writable("/proc/run")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's mount namespaces")
def test_a_read_only_mount_is_named(tmp_path):
    program = "import sys; from zaya_plugin.config.run_directory import make_writable; make_writable(sys.argv[1])"
    script = 'mount -t tmpfs none "$1" && mkdir "$1/run" && mount -o remount,ro "$1" && exec "$2" -c "$3" "$1/run"'
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c", script, "sh", str(tmp_path), sys.executable, program]
    done = subprocess.run(inside, capture_output=True, text=True)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace is available: {done.stderr.strip()}")
    assert f"run_dir={tmp_path}/run: cannot be written (Read-only file system)" in done.stderr


def test_a_changed_recipe_keeps_the_older_ones(tmp_path):
    recipe = compose(["experiment=cpu_demo"])
    for lr in (1.0, 1.0, 2.0, 3.0):
        recipe.optim.lr = lr
        assert keep_recipe(recipe, tmp_path) == tmp_path / "recipe.yaml"
    kept = {path.name: load_recipe(path).optim.lr for path in tmp_path.iterdir()}
    assert kept == {"recipe.1.yaml": 1.0, "recipe.2.yaml": 2.0, "recipe.yaml": 3.0}


@pytest.mark.parametrize("name", ["checkpoints", "logs", "tensorboard", "wandb", "metrics.jsonl", "recipe.yaml"])
def test_a_file_for_a_folder_or_the_reverse_is_refused_by_a_dry_run(tmp_path, monkeypatch, name):
    monkeypatch.setattr(surroundings, "check_surroundings", lambda *_: None)
    monkeypatch.setattr(megatron_check, "check", lambda recipe, plan: None)
    recipe = compose(["experiment=cpu_demo", "data.path=none", f"run_dir={tmp_path}"])
    plan = make_plan(recipe, {})
    assert dry_run.stops(recipe, plan) == []
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).write_text("")
    problems = dry_run.stops(recipe, plan)
    kind = "file" if "." in name else "folder"
    assert f"{tmp_path / name} must be a {kind}: the run writes it" in problems[-1]
    assert f"Fix: mv {tmp_path / name} <another place>, or run_dir=<another directory>." in problems[-1]


def test_a_dry_check_of_a_directory_says_what_the_run_says_and_makes_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nothing").symlink_to(tmp_path / "gone")
    before = sorted(tmp_path.rglob("*"))
    for part in ("file", "file/x", "file/x/y", "loop/x", "nothing/x", "a" * 300 + "/x"):
        told = []
        for check in (run_directory.check_creatable, make_writable):
            with pytest.raises(ValueError, match="^run_dir=.*cannot be written") as caught:
                check(tmp_path / part, "run_dir")
            told.append(str(caught.value))
        assert told[0] == told[1]
    run_directory.check_creatable(tmp_path / "new" / "run", "run_dir")
    assert sorted(tmp_path.rglob("*")) == before

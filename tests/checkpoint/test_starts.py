# SPDX-License-Identifier: Apache-2.0
"""When failed starts count against the checkpoint that they began from."""

import json
import os
import shutil

import pytest

from zaya_plugin.checkpoint import starts
from zaya_plugin.checkpoint.starts import FAILED, History
from zaya_plugin.ground.metrics_file import TAIL_BYTES


@pytest.fixture
def run(tmp_path):
    """A run directory whose last start from step 500 had reached step 507."""
    rows = [{"step": 506, "loss": 1.0}, {"step": 507, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + '\n{"step": 508, "lo')
    starts.begin(tmp_path, run_id="ab12", step=500, recipe="r")
    return tmp_path


def history(run, step=500, recipe="r"):
    return starts.history(run, step, recipe, run)


def test_a_start_fails_where_its_metrics_end_and_only_by_an_error(run):
    assert history(run) == History(), "killed, or stopped"
    starts.note_failure(run)
    assert history(run) == History(failed_at=507)


@pytest.mark.parametrize("before, again", [(None, False), (507, True), (506, True), (505, False), (500, False)])
def test_the_second_failure_at_the_same_step(run, before, again):
    starts.begin(run, run_id="ab12", step=500, recipe="r", failed_at=before)
    starts.note_failure(run)
    assert history(run) == History(507, again)


def test_another_checkpoint_or_a_changed_recipe_begins_a_new_history(run):
    starts.begin(run, run_id="ab12", step=500, recipe="r", failed_at=507, passed=600)
    starts.note_failure(run)
    assert history(run, step=600) == History()
    assert history(run, recipe="changed") == History(passed=600)


def test_a_run_that_died_before_its_first_step_failed_at_its_checkpoint(run):
    starts.note_failure(run)
    (run / "metrics.jsonl").write_text('{"step": 480}\n')
    assert history(run).failed_at == 500
    (run / "metrics.jsonl").unlink()
    assert history(run).failed_at == 500


def test_the_last_step_is_read_at_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in range(20_000)) + "[]\n7\n")
    assert path.stat().st_size > 4 * TAIL_BYTES and starts.last_step(path) == 19_999


def test_the_last_validation_up_to_a_step(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = ({"step": 4}, {"step": 4, "valid_loss": 1.0}, {"step": 6, "valid_loss": 1.0}, {"step": 7})
    path.write_text("\n".join(map(json.dumps, rows)))
    assert [starts.last_step(path, "valid_loss", until) for until in (3, 5, 6, 9)] == [0, 4, 6, 6]


def test_the_mark_is_gone_at_the_next_start_and_a_broken_record_is_no_record(run):
    starts.note_failure(run)
    assert (run / FAILED).exists()
    starts.begin(run, run_id="ab12", step=500, recipe="r")
    assert sorted(path.name for path in run.iterdir()) == [starts.NAME, "metrics.jsonl"]
    for text in ("", "{", "[]"):
        (run / starts.NAME).write_text(text)
        assert starts.read(run) == {} and history(run) == History()


def test_a_mark_that_cannot_be_written_is_no_error(tmp_path):
    starts.note_failure(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


def test_a_copied_directory_is_distinguished_from_one_that_was_moved(tmp_path):
    """m2lines/Samudra#279: a copied run would write to the W&B run of its original."""
    original, copy, moved = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    original.mkdir()
    copied = starts.original_of_copy
    assert copied(original, "ab12") is None, "no record"
    starts.keep_run(original, "ab12")
    (tmp_path / "link").symlink_to(original)
    shutil.copytree(original, copy)
    assert [copied(path, "ab12") for path in (original, tmp_path / "link", copy)] == [None, None, original]
    (copy / starts.NAME).unlink()
    assert copied(copy, "ab12") is None, "a checkpoint of an older version names no directory"
    assert copied(copy, "ab12", str(original)) == original, (
        "only the checkpoint was copied, or reshaped to another directory"
    )
    starts.begin(copy, run_id="ab12", step=2, recipe="r", fork="cd34")
    assert copied(copy, "ab12", str(original)) is None and starts.read(copy)["fork"] == "cd34", (
        "it has its own identity now"
    )
    original.rename(moved)
    assert copied(moved, "ab12") is None
    starts.begin(moved, run_id="ef56", step=2, recipe="r")
    shutil.copytree(moved, original)
    starts.begin(moved, run_id="another", step=0, recipe="r")
    assert copied(original, "ef56") is None, "the original's place holds another run"

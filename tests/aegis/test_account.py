# SPDX-License-Identifier: Apache-2.0
"""The account of a journal, against numbers computed by hand."""

import json

import pytest

from tests.aegis.journals import (
    BEGIN,
    GPUS,
    ONE_CRASH,
    TWO_STAGES,
    account_of,
    attempt,
    begin,
    failure,
    first_step,
    row,
)
from zaya_plugin.aegis.account import END, START, TRAINING
from zaya_plugin.aegis.bookkeeping import INTERRUPTED, account
from zaya_plugin.aegis.journal import Journal, read
from zaya_plugin.aegis.protocol import AttemptStart, Progress


def test_one_crash_by_hand():
    found = account_of(ONE_CRASH)
    assert (found.seconds, found.ended, found.code, found.restarts) == (280.0, True, 0, 1)
    # Steps 1 to 30 from 20 to 80 s, and 31 to 100 from 130 to 270 s.
    assert found.training == pytest.approx(60 + 140)
    assert found.ettr == pytest.approx(200 / 280)
    assert found.kept_steps == 100 and found.goodput == pytest.approx(100 * 2.0 / 280)
    assert found.up == pytest.approx((104.5 - 10) + (280 - 110)) and found.uptime == pytest.approx(264.5 / 280)
    (crash,) = found.failures
    assert (crash.cause, crash.action, crash.node, crash.rank) == ("sigkill", "restart", "n2", 9)
    assert crash.detect == pytest.approx(0.5)
    assert crash.recover == pytest.approx(132 - 101.5)
    assert crash.lost_steps == pytest.approx(10)
    assert crash.seconds == pytest.approx(130 - 80) and crash.gpu_hours == pytest.approx(50 * GPUS / 3600)
    assert found.by_cause() == [
        {
            "cause": "sigkill",
            "failures": 1,
            "lost_steps": pytest.approx(10),
            "seconds": 50,
            "gpu_hours": crash.gpu_hours,
        }
    ]
    assert (found.mean("detect"), found.mean("recover")) == (crash.detect, crash.recover)
    assert found.gpu_hours == pytest.approx(280 * GPUS / 3600)


def used(found):
    return [(span.begin, span.end, getattr(span.use, "cause", span.use)) for span in found.spans]


def test_every_second_has_one_use():
    found = account_of(ONE_CRASH)
    assert used(found) == [
        (0, 10, START),
        (10, 20, START),
        (20, 80, TRAINING),
        (80, 100, "sigkill"),
        (100, 104.5, "sigkill"),
        (104.5, 110, "sigkill"),
        (110, 130, "sigkill"),
        (130, 270, TRAINING),
        (270, 280, END),
    ]


def test_a_hang_is_lost_from_its_last_step_on_and_its_detection_lasts_since_then():
    rows = [begin(0), attempt(0, 1), first_step(12, 1)]
    rows += failure(160, 100, "hang", "exchange", 45, 100.0, nodes_out=["n2"])
    rows += [row(164, "node", node="n2", state="out", reason="hang")]
    found = account_of([*rows, attempt(165, 2, 45), first_step(180, 46, 2)])
    (hang,) = found.failures
    assert hang.detect == 60 and hang.recover == 20 and hang.lost_steps == 0
    assert hang.seconds == pytest.approx(178 - 100)
    assert found.nodes_out == {"n2": "hang"}
    # without `at` the steps' own seconds say when the last one was done: 1 + 44 steps of 2 s after second 12
    for each in rows:
        each.pop("at", None)
    (hang,) = account_of([*rows, attempt(165, 2, 45), first_step(180, 46, 2)]).failures
    assert hang.seconds == pytest.approx(178 - 100)


def test_a_second_failure_before_any_step_takes_the_time_from_its_own_symptom_on():
    rows = [begin(0), attempt(0, 1), first_step(2, 1), *failure(100, 100, "ras_ue", "exchange", 50, 100)]
    rows += [attempt(110, 2, 50)]
    early = failure(125, 125, "port_in_use", "restart", None, 0, generation=2)
    rows += [each for each in early if each["kind"] != "progress"]
    found = account_of([*rows, attempt(130, 3, 50), first_step(152, 51, 3)])
    first, second = found.failures
    assert (first.seconds, second.seconds) == (25, 25)  # the last attempt's first step began at 150 s
    assert (first.recover, second.recover) == (52, 27)
    assert found.training == pytest.approx(100 + 2)


def test_a_roll_back_gives_up_steps_of_earlier_attempts():
    rows = [begin(0), attempt(0, 1), first_step(2, 1), *failure(200, 200, "sigkill", "restart", 100, 200)]
    rows += [attempt(210, 2, 100), first_step(212, 101, 2)]
    rows += failure(310, 310, "loss_spike", "rollback", 150, 310, generation=2, to_step=80)
    found = account_of([*rows, attempt(320, 3, 80), first_step(322, 81, 3), row(420, "progress", 3, step=131)])
    crash, spike = found.failures
    assert crash.lost_steps == 0 and spike.lost_steps == 50 + 20
    assert crash.seconds == pytest.approx(10)  # 200 to 210 s
    assert spike.seconds == pytest.approx(10 + 100 + 40)  # down, steps 101 to 150, and steps 81 to 100
    assert found.kept_steps == 131 and found.training == pytest.approx(160 + 100)
    assert sum(span.end - span.begin for span in found.spans) == pytest.approx(found.seconds)


def test_two_stages_by_hand():
    found = account_of(TWO_STAGES)
    crash, lost = found.failures
    assert [(each.name, each.before, each.step_seconds) for each in found.stages] == [("one", 0, 2), ("two", 50, 4)]
    # Stage one from 10 to 110 s; stage two: steps 1 to 10 from 140 to 180 s, and 11 to 30 from 230 to 310 s.
    assert used(found)[2:] == [
        (10, 110, TRAINING),
        (110, 140, START),
        (140, 180, TRAINING),
        (180, 200, "sigkill"),
        (200, 204, "sigkill"),
        (204, 210, "sigkill"),
        (210, 230, "sigkill"),
        (230, 310, TRAINING),
        (310, 318, "ras_ue"),
        (318, 320, "ras_ue"),
    ]
    assert (crash.lost_steps, crash.seconds, crash.recover) == (5, 230 - 180, 234 - 201)
    assert (lost.lost_steps, found.kept_steps, found.training) == (0, 50 + 30, 100 + 40 + 80)
    assert [found.kept_in(each) for each in found.stages] == [50, 30]
    assert found.ettr == pytest.approx(220 / 320) and found.goodput == pytest.approx((50 * 2 + 30 * 4) / 320)


def test_a_stage_that_fails_before_its_first_step_makes_no_step_of_the_stage_before_again():
    rows = [each for each in TWO_STAGES if each["time"] < BEGIN + 120]
    early = [each for each in failure(130, 130, "sigkill", "restart", 0, 0) if each["kind"] != "progress"]
    rows += [*early, attempt(140, 2), row(164, "first_step", 2, step=1, stage="two", after=0)]
    found = account_of([*rows, row(196, "progress", 2, step=9, step_seconds=4.0, stage="two")])
    (crash,) = found.failures
    assert (crash.lost_steps, crash.seconds) == (0, 160 - 110) and found.kept_steps == 59
    assert found.attempts[1].base == 50 and found.training == 100 + 36


def test_stages_without_a_name_are_distinguished_by_steps_that_count_from_one_again():
    rows = [{name: value for name, value in each.items() if name not in ("stage", "after")} for each in TWO_STAGES]
    rows[0]["command"] = ["zaya", "curriculum"]
    found = account_of(rows)
    assert [(each.name, each.before) for each in found.stages] == [("", 0), ("", 50)]
    assert (found.kept_steps, found.failures[0].lost_steps) == (80, 5)
    rows[0]["command"] = ["zaya", "train"]  # a line that the disk has damaged, for one
    assert len(account_of(rows).stages) == 1


def test_the_pause_until_a_person_starts_again_is_not_supervised():
    stopped = failure(100, 100, "user_error", "stop", 50, 100)
    rows = [begin(0), attempt(0, 1), first_step(2, 1), *stopped, row(103, "end", code=2, reason="user_error")]
    rows += [begin(5000), attempt(5010, 2, 40), first_step(5022, 41, 2), row(5060, "progress", 2, step=60)]
    found = account_of(rows)
    assert found.seconds == pytest.approx(103 + 60) and found.pauses == [103] and not found.ended
    assert found.failures[0].lost_steps == 10 and found.failures[0].seconds == pytest.approx(20 + 3)
    assert used(found)[-3:] == [(103, 113, START), (113, 123, START), (123, 163, TRAINING)]


def test_an_attempt_without_an_end_was_interrupted():
    """The whole job was killed; SLURM started it again, and the decider went on."""
    rows = [begin(0), attempt(0, 1), first_step(2, 1), row(62, "progress", step=31, step_seconds=2.0)]
    rows += [row(100, "decider", 1, pid=2, reason="again"), attempt(110, 2, 20), first_step(122, 21, 2)]
    found = account_of(rows)
    (cut,) = found.failures
    assert (cut.cause, cut.action, cut.detect, cut.lost_steps) == (INTERRUPTED, "", None, 11)
    assert cut.seconds == pytest.approx(120 - 40)


def test_a_run_that_goes_on_is_accounted_up_to_its_last_line():
    found = account_of([begin(0), attempt(10, 1), first_step(32, 1), row(92, "progress", step=31, step_seconds=2.0)])
    assert not found.ended and found.failures == [] and found.seconds == 92
    assert found.training == pytest.approx(62) and found.attempts[0].end == 92


def test_a_decider_that_starts_again_changes_nothing():
    again = row(150, "decider", 2, pid=3, reason="started again from the journal")
    at = next(i for i, each in enumerate(ONE_CRASH) if each["time"] > BEGIN + 150)
    found = account_of([*ONE_CRASH[:at], again, *ONE_CRASH[at:]])
    assert found.ettr == account_of(ONE_CRASH).ettr and len(found.failures) == 1


def test_a_clock_that_is_set_back_adds_no_time():
    rows = [dict(each) for each in ONE_CRASH]
    for each in rows:
        if each["time"] >= BEGIN + 110:
            each["time"] -= 3600
    found = account_of(rows)
    assert found.seconds == 280 - (110 - 104.5) and all(span.end > span.begin for span in found.spans)
    assert found.training == pytest.approx(200) and found.failures[0].detect == 0.5


def test_rides_and_watched_evidence_end_no_attempt():
    ride = failure(50, 50, "ionic_link", "ride", 20, 50)[:-1]
    watch = failure(60, 60, "throttle", "watch", 20, 50)[:-1]
    found = account_of([begin(0), attempt(0, 1), first_step(2, 1), *ride, *watch, row(99, "end", code=0, reason="")])
    assert found.failures == [] and found.decisions == {"ride": 1, "watch": 1}
    assert [(each["cause"], each["node"]) for each in found.rides] == [("ionic_link", "n2")]


def test_evidence_that_was_kept_long_before_a_crash_is_not_its_symptom():
    early = row(30, "symptom", evidence={"time": BEGIN + 30, "node": "n2", "source": "kernel", "text": "ecc"})
    rows = [begin(0), attempt(0, 1), first_step(2, 1), early, *failure(100, 99, "sigkill", "restart", 49, 98)]
    late = row(101, "symptom", evidence={"time": BEGIN + 80, "node": "n2", "source": "kernel", "text": "ecc"})
    assert account_of([*rows[:5], late, *rows[5:]]).failures[0].detect == 1


@pytest.mark.parametrize("rows", [[], [begin(0)], [row(0, "end", code=0, reason="")], [attempt(0, 1)], ONE_CRASH[6:]])
def test_odd_journals_have_an_account(rows):
    found = account_of(rows)
    assert found.ettr is None or 0 <= found.ettr <= 1
    assert found.mean("detect") is None or found.failures


def test_a_journal_cut_off_at_any_byte_has_an_account(tmp_path):
    whole = "".join(json.dumps(each) + "\n" for each in ONE_CRASH)
    path = tmp_path / "journal.jsonl"
    for end in range(0, len(whole), 37):
        path.write_text(whole[:end])
        found = account(read(path))
        assert sum(span.end - span.begin for span in found.spans) == pytest.approx(found.seconds)


@pytest.mark.parametrize("wrong", [None, "x", [], {}, float("nan"), -1, True, pytest.param(10**400, id="huge")])
def test_fields_of_any_kind_break_nothing(wrong):
    for number, each in enumerate(ONE_CRASH):
        for name in each.keys() - {"kind"}:
            found = account_of([*ONE_CRASH[:number], each | {name: wrong}, *ONE_CRASH[number + 1 :]])
            assert found.seconds >= 0


def test_the_journal_takes_the_time_of_a_step(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    journal.write(AttemptStart(["n1"], 1), 1)
    row = Progress(3, 0.5, at=1.0)
    journal.write(row, 1)
    assert list(read(tmp_path / "journal.jsonl"))[-1] == row

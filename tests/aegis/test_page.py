# SPDX-License-Identifier: Apache-2.0
"""The page of the report: its timeline has the times of the account, of many failures too. That no text becomes markup is
tested in tests/pictures.
"""

import pytest

from tests.aegis.journals import ONE_CRASH, account_of, attempt, begin, failure, first_step, row
from tests.pictures.pages import HOSTILE, read
from zaya_plugin.aegis.page import COLUMNS, USES, page, timeline
from zaya_plugin.pictures.content import ALARM, GOOD, NEUTRAL


def of(panel, name):
    return next(layer for layer in panel.layers if layer.row == name)


def test_the_drawing_has_the_times_of_the_account():
    used, steps = timeline(account_of(ONE_CRASH))
    assert used.x_label == steps.x_label == "seconds since the start" and used.rows[0] == "time"
    bars = of(used, "time")
    expected = [
        (0, 20, NEUTRAL),
        (20, 80, GOOD),
        (80, 130, ALARM),
        (130, 270, GOOD),
        (270, 280, USES["after the last step"]),
    ]
    assert [*zip(bars.begin, bars.end, bars.colours, strict=True)] == expected
    assert bars.texts[2] == "sigkill on n2: 50.0 s"
    fault, saved, tries = of(used, "failures"), of(used, "checkpoints"), of(used, "attempts")
    assert ([*fault.x], fault.colours, [*saved.x]) == ([101.5], [ALARM], [81])
    assert fault.texts == ["1: sigkill on n2, restart. sigkill: restart"] and saved.texts == ["checkpoint of step 30"]
    assert ([*tries.begin], [*tries.end]) == ([10, 110], [pytest.approx(104.5), 280])
    kept, lost = steps.layers
    points = [*zip(kept.x, kept.mean, strict=True)]
    assert points[1] == (20, 0) and (80, 30) in points and points[-1] == (270, 100)
    assert [*zip(lost.x, lost.mean, strict=True)][1:] == [(80, 30), (100, 40)] and lost.colour == ALARM


def many(number):
    """A run of `number` crashes, one after 100 s of steps each, and a pause at the end."""
    rows, time = [begin(0)], 0.0
    for generation in range(1, number + 1):
        rows += [
            attempt(time, generation, 10 * (generation - 1)),
            first_step(time + 2, 10 * generation - 9, generation),
        ]
        rows += [row(time + 50 + i / 10, "checkpoint", generation, step=i) for i in range(20)]
        rows += failure(
            time + 100, time + 99, f"cause{generation % 9}", "restart", 10 * generation, time + 98, generation
        )
        time += 110
    return [*rows, row(time, "end", code=1, reason="stopped"), begin(time + 900)]


def test_a_drawing_of_many_failures_stays_small():
    content = page(account_of(many(700)), "run")
    used, steps = content.panels
    assert used.x_label == "hours since the start" and len(used.marks) == 1
    assert len(of(used, "time").begin) <= 2 * COLUMNS and len(of(used, "checkpoints").x) <= COLUMNS
    assert len(of(used, "failures").x) == 700 and len(set(of(used, "failures").colours)) == 5
    assert max(len(layer.x) for layer in steps.layers) <= 3 * 700
    notes = {table.title: table.note for table in content.tables}
    assert notes["Failures"] == "the last 500 of 700"
    names = next(name for name, colour, _ in used.key if "," in name)
    assert len(names.split(", ")) == 5  # nine causes share five colours


@pytest.mark.parametrize("seconds", [0, 61, 86400, 400 * 86400])
def test_a_journal_without_a_step_is_drawn(seconds):
    content = page(account_of([begin(0), row(seconds, "end", code=0, reason="")]), "run")
    assert [panel.title for panel in content.panels] == ["Timeline"] and content.tables == []


def test_a_hostile_journal_is_text_of_the_page():
    pytest.importorskip("bokeh")
    from zaya_plugin.pictures.page import html

    rows = [begin(0) | {"command": ["zaya", HOSTILE]}]
    rows += [attempt(0, 1) | {"nodes": [HOSTILE, "n2"]}, first_step(2, 1)]
    fault = failure(90, 88, HOSTILE, "restart", 40, 85, reason=HOSTILE)
    for each in fault:
        if each["kind"] == "diagnosis":
            each |= {"node": HOSTILE, "evidence": [{"text": HOSTILE}]}
    ride = failure(95, 95, HOSTILE, "ride", 40, 85, reason=HOSTILE)[:-1]
    rows += [*ride, *fault, row(99, "node", node=HOSTILE, state="out", reason=HOSTILE)]
    rows += [row(100, "end", code=1, reason=HOSTILE)]
    elements = read(html(page(account_of(rows), HOSTILE)))
    assert sum("<script>alert(1)</script>" in each for each in elements.texts) >= 8

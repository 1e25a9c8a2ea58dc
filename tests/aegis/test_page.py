# SPDX-License-Identifier: Apache-2.0
"""The HTML page: nothing of a log becomes markup, nothing is loaded, and the drawing shows the times of the account."""

from html.parser import HTMLParser

import pytest

from tests.aegis.journals import ONE_CRASH, account_of, attempt, begin, failure, first_step, row
from zaya_plugin.aegis.page import BAR, HEIGHT, LEFT, RIGHT, STYLE, USE_Y, WIDTH, Timeline, page
from zaya_plugin.aegis.report import figures, state, tables

HOSTILE = "</title><script>alert(1)</script><img src=//x onerror=alert(1)>\" onload='x' ]]> \x00 <!-- &lt; {0} %s"


class Elements(HTMLParser):
    """Collects elements with their attributes, and the text of the page."""

    VOID = {"meta", "line", "rect", "circle", "polyline"}

    def __init__(self, html):
        super().__init__()
        self.found, self.texts, self.open = [], [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def of(self, tag, kind=None):
        return [a for each, a in self.found if each == tag and (kind is None or kind in a.get("class", "").split())]


def shown(rows, name="run"):
    found = account_of(rows)
    html = page(found, name, state(found), figures(found), tables(found))
    elements = Elements(html)
    assert elements.open == []  # every element is closed
    return elements, html


def test_no_text_becomes_markup_and_nothing_is_loaded():
    rows = [begin(0) | {"command": ["zaya", HOSTILE]}]
    rows += [attempt(0, 1) | {"nodes": [HOSTILE, "n2"]}, first_step(2, 1)]
    fault = failure(90, 88, HOSTILE, "restart", 40, 85, reason=HOSTILE)
    for each in fault:
        if each["kind"] == "diagnosis":
            each |= {"node": HOSTILE, "evidence": [{"text": HOSTILE}]}
    ride = failure(95, 95, HOSTILE, "ride", 40, 85, reason=HOSTILE)[:-1]
    rows += [*ride, *fault, row(99, "node", node=HOSTILE, state="out", reason=HOSTILE)]
    rows += [row(100, "end", code=1, reason=HOSTILE)]
    elements, html = shown(rows, HOSTILE)
    tags = {tag for tag, _ in elements.found}
    assert not tags & {
        "script",
        "img",
        "link",
        "iframe",
        "object",
        "embed",
        "base",
        "form",
        "a",
        "image",
        "use",
        "foreignObject",
    }
    assert not [a for _, attrs in elements.found for a in attrs if a.startswith("on") or a in ("href", "src", "style")]
    assert "default-src 'none'" in elements.of("meta")[1]["content"]
    assert "url(" not in STYLE and "@import" not in STYLE and "http:" not in html and "https:" not in html
    assert "\x00" not in html and sum("<script>alert(1)</script>" in each for each in elements.texts) >= 8


def test_the_drawing_has_the_times_of_the_account():
    elements, _ = shown(ONE_CRASH)
    scale = (WIDTH - LEFT - RIGHT) / 280
    bars = [each for each in elements.of("rect") if float(each["y"]) == USE_Y]
    expected = [(0, 20, "start"), (20, 80, "training"), (80, 130, "c0"), (130, 270, "training"), (270, 280, "end")]
    for bar, (begin_, end, kind) in zip(bars, expected, strict=True):
        assert bar["class"] == kind
        assert float(bar["x"]) == pytest.approx(LEFT + begin_ * scale, abs=0.02)
        assert float(bar["width"]) == pytest.approx((end - begin_) * scale, abs=0.02)
    (mark,) = elements.of("circle")
    assert float(mark["cx"]) == pytest.approx(LEFT + 101.5 * scale, abs=0.02) and mark["class"] == "c0"
    (tick,) = elements.of("line", "checkpoint")
    assert float(tick["x1"]) == pytest.approx(LEFT + 81 * scale, abs=0.02)
    assert [len(each["points"].split()) for each in elements.of("polyline", "lost")] == [2]
    kept = [each for each in elements.of("polyline") if each["class"] == "steps"]
    ends = [[tuple(map(float, dot.split(","))) for dot in each["points"].split()] for each in kept]
    assert ends[0][0][0] == pytest.approx(LEFT + 20 * scale, abs=0.02)
    assert ends[0][-1][0] == pytest.approx(LEFT + 80 * scale, abs=0.02)
    assert ends[0][-1][1] == pytest.approx(ends[1][0][1], abs=0.02)  # attempt 2 goes on at the height of step 30


def many(number):
    """A run of `number` crashes, one after 100 s of steps each."""
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
    return rows


def test_a_drawing_of_many_failures_stays_inside_and_small():
    elements, html = shown(many(700))
    assert len(html) < 1_500_000
    for tag, attrs in elements.found:
        for name in ("x", "x1", "x2", "cx"):
            assert tag == "text" or 0 <= float(attrs.get(name, LEFT)) <= WIDTH
        for name in ("y", "y1", "y2", "cy"):
            assert -1 <= float(attrs.get(name, 0)) <= HEIGHT
    bars = [each for each in elements.of("rect") if float(each["y"]) == USE_Y and float(each["height"]) == BAR]
    assert len(bars) <= 2 * (WIDTH - LEFT - RIGHT) / 0.4
    assert any("the last 500 of 700" in each for each in elements.texts)
    assert len({kind for each in elements.of("circle") for kind in each["class"].split()}) == 6


def test_marks_that_would_touch_go_to_another_row():
    elements, _ = shown(
        [
            *ONE_CRASH[:-1],
            *failure(272, 271, "hang", "restart", 100, 270, 2),
            attempt(274.5, 3, 100),
            *failure(275, 275, "hang", "stop", None, 270, 3),
        ]
    )
    places = [(float(each["cx"]), float(each["cy"])) for each in elements.of("circle")]
    near = [(a, b) for i, a in enumerate(places) for b in places[:i] if abs(a[0] - b[0]) < 18]
    assert near and all(abs(a[1] - b[1]) >= 18 for a, b in near)


def test_light_and_dark_have_every_colour():
    light, _, dark = STYLE.partition("prefers-color-scheme:dark")
    for name in ("text", "soft", "line", "back", "panel", "training", "start", "end", *(f"c{i}" for i in range(6))):
        assert f"--{name}:" in light and f"--{name}:" in dark
    assert contrast("#1d2530", "#fff") > 7 and contrast("#e4e8ed", "#14181d") > 7
    assert contrast("#5b6675", "#ffffff") > 4.5 and contrast("#9aa5b3", "#1d232a") > 4.5


def contrast(one, two):
    """The contrast of two colours by WCAG."""

    def light(colour):
        digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [each / 12.92 if each <= 0.04045 else ((each + 0.055) / 1.055) ** 2.4 for each in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((light(one), light(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_the_axis_has_few_round_places():
    for seconds in (0, 5, 61, 3600, 86400, 54 * 86400, 400 * 86400):
        timeline = Timeline(account_of([begin(0), row(seconds, "end", code=0, reason="")]))
        texts = [each for each in timeline.axis() if each.startswith("<text")]
        assert 1 <= len(texts) <= 60 and len(set(texts)) == len(texts)

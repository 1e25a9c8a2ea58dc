# SPDX-License-Identifier: Apache-2.0
"""What came of a fault, by the journal and the losses, compared with what must come of it; and the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.lab.faults import Fault

BACK = 30.0  # seconds from a fault to training again, beside the time that a start takes


@dataclass
class Result:
    """One fault. seconds are since the fault; wrong: what did not come as it must; left_out: why it was not tried."""

    name: str
    text: str
    detected: float | None = None
    cause: str = ""
    node: str = ""
    actions: list[str] = field(default_factory=list)
    back: float | None = None
    start: float | None = None
    attempts: int = 0
    code: int | None = None
    losses: str = ""
    wrong: list[str] = field(default_factory=list)
    left_out: str = ""

    @property
    def ok(self) -> bool:
        """Whether all came as it must; of a fault that was left out, nothing is known."""
        return not self.wrong and not self.left_out


def judge(
    fault: Fault,
    journal: Sequence[Mapping[str, Any]],
    injected: float,
    code: int | None,
    difference: str | None,
    start: float | None,
) -> Result:
    """Return the result of a fault.

    journal: of the whole run. injected: when. code: of the run. difference: of its losses. start: seconds from an
    attempt to its first step in the undisturbed run.
    """
    after = [row for row in journal if row["time"] >= injected - 0.05]
    before = max((row["generation"] for row in journal if row["time"] < injected), default=0)
    found = Result(fault.name, fault.text, start=start, code=code)
    # A journal begins with rows about the start, and a node that trains again is news as well.
    first = next((row for row in after if row["kind"] in ("symptom", "diagnosis", "decision")), None)
    others = (row for row in after if row["kind"] == "node" and row["state"] == "lost" or row["kind"] == "decider")
    signs = [row["time"] for row in (first, next(others, first)) if row is not None]
    found.detected = round(min(signs) - injected, 2) if signs else None
    diagnoses = [row for row in after if row["kind"] == "diagnosis"]
    decisions = [row for row in after if row["kind"] == "decision"]
    if diagnoses:
        found.cause, found.node = diagnoses[0]["cause"], diagnoses[0]["node"] or ""
    elif first is not None and first["kind"] == "symptom":
        found.cause, found.node = first["evidence"].get("rule") or "", first["evidence"]["node"]
    found.actions = [row["action"] for row in decisions]
    found.attempts = max((row["generation"] for row in journal if row["kind"] == "attempt"), default=0)
    again = next((row for row in after if row["kind"] == "first_step" and row["generation"] > max(before, 1)), None)
    if again is not None:
        found.back = round(again["time"] - injected, 1)
    found.losses = difference or "same"
    found.wrong = list(_wrong(fault, found, again is not None))
    return found


def _wrong(fault: Fault, found: Result, again: bool):
    active = [action for action in found.actions if action != "watch"]
    if found.code != fault.code:
        yield f"exit code {found.code}, not {fault.code}" if found.code is not None else "the run did not end"
    if fault.quiet:
        if active:
            yield f"a decision where none was needed: {', '.join(active)}"
        if found.attempts != 1:
            yield f"{found.attempts} attempts, not 1"
    if fault.within is not None:
        if found.detected is None:
            yield "not detected"
        elif found.detected > fault.within and fault.code != 2:
            yield f"detected after {found.detected:.1f} s, not {fault.within:.0f} s"
        if fault.causes and found.cause not in fault.causes:
            yield f"cause {found.cause or 'unnamed'}, not {' or '.join(fault.causes)}"
    if not fault.quiet:
        if active and active[0] not in fault.actions or not active and "watch" not in fault.actions:
            yield f"decided {', '.join(active) or 'nothing'}, not {' or '.join(fault.actions)}"
        if fault.attempts is not None and found.attempts != fault.attempts:
            yield f"{found.attempts} attempts, not {fault.attempts}"
    if again and found.start is not None and found.back > BACK + found.start:
        yield f"training again after {found.back:.0f} s, not {BACK:.0f} s and the start of {found.start:.0f} s"
    if fault.code == 0 and found.losses != "same":
        yield f"losses: {found.losses}"


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results for a file."""
    return [asdict(result) | {"ok": result.ok} for result in results]


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| Fault | Detected | Cause | Decision | Training again | Losses | Result |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results:
        if each.left_out:
            lines.append(f"| {each.text} (`{each.name}`) | | | | | | left out: {each.left_out} |")
            continue
        detected = "-" if each.detected is None else f"{each.detected:.1f} s"
        back = "-" if each.back is None else f"{each.back:.1f} s"
        result = "ok" if each.ok else "; ".join(each.wrong)
        cells = (detected, each.cause or "-", ", ".join(each.actions) or "-", back, each.losses or "-", result)
        lines.append(
            f"| {each.text} (`{each.name}`) | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def line(result: Result) -> str:
    """Return one result for the terminal."""
    if result.left_out:
        return f"left out  {result.name}: {result.left_out}"
    detected = "not detected" if result.detected is None else f"detected {result.detected:.1f} s"
    back = "" if result.back is None else f", training again {result.back:.1f} s"
    what = f"{detected}, {result.cause or 'no cause'}, {'+'.join(result.actions) or 'no decision'}{back}"
    return f"{'ok  ' if result.ok else 'WRONG'}  {result.name}: {what}" + "".join(
        f"\n       {each}" for each in result.wrong
    )

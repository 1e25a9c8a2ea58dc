# SPDX-License-Identifier: Apache-2.0
"""The result of a fault, from the journal and the losses, compared with the expected one; and the tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.lab.faults import Fault

RECOVERY_SECONDS = 30.0  # from a fault to the next new step, without the time of a start


@dataclass
class Result:
    """One fault. Seconds are since the fault; wrong: differences from the expected result; left_out: why it was skipped."""

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
        """Return whether the result is the expected one; False for a fault that was left out."""
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

    journal: of the whole run. injected: time of the fault. code: of the run. difference: of its losses. start: seconds from an
    attempt to its first step in the undisturbed run.
    """
    after = [row for row in journal if row["time"] >= injected - 0.05]
    before = max((row["generation"] for row in journal if row["time"] < injected), default=0)
    result = Result(fault.name, fault.text, start=start, code=code)
    # rows about the start, and about a node that trains again, are no signs
    first = next((row for row in after if row["kind"] in ("symptom", "diagnosis", "decision")), None)
    others = (row for row in after if row["kind"] == "node" and row["state"] == "lost" or row["kind"] == "decider")
    signs = [row["time"] for row in (first, next(others, first)) if row is not None]
    result.detected = round(min(signs) - injected, 2) if signs else None
    diagnoses = [row for row in after if row["kind"] == "diagnosis"]
    decisions = [row for row in after if row["kind"] == "decision"]
    if diagnoses:
        result.cause, result.node = diagnoses[0]["cause"], diagnoses[0]["node"] or ""
    elif first is not None and first["kind"] == "symptom":
        result.cause, result.node = first["evidence"].get("rule") or "", first["evidence"]["node"]
    result.actions = [row["action"] for row in decisions]
    result.attempts = max((row["generation"] for row in journal if row["kind"] == "attempt"), default=0)
    later = max(before, 1)
    restart = next((row for row in after if row["kind"] == "first_step" and row["generation"] > later), None)
    if restart is not None:
        result.back = round(restart["time"] - injected, 1)
    result.losses = difference or "same"
    result.wrong = list(_wrong(fault, result))
    return result


def _wrong(fault: Fault, result: Result) -> Iterator[str]:
    """Yield the differences from the expected result."""
    active = [action for action in result.actions if action != "watch"]
    if result.code != fault.code:
        yield f"exit code {result.code}, not {fault.code}" if result.code is not None else "the run did not end"
    if fault.quiet:
        if active:
            yield f"a decision where none was needed: {', '.join(active)}"
        if result.attempts != 1:
            yield f"{result.attempts} attempts, not 1"
    if fault.within is not None:
        if result.detected is None:
            yield "not detected"
        elif result.detected > fault.within and fault.code != 2:
            yield f"detected after {result.detected:.1f} s, not {fault.within:.0f} s"
        if fault.causes and result.cause not in fault.causes:
            yield f"cause {result.cause or 'unnamed'}, not {' or '.join(fault.causes)}"
    if not fault.quiet:
        if active and active[0] not in fault.actions or not active and "watch" not in fault.actions:
            yield f"decided {', '.join(active) or 'nothing'}, not {' or '.join(fault.actions)}"
        if fault.attempts is not None and result.attempts != fault.attempts:
            yield f"{result.attempts} attempts, not {fault.attempts}"
    if None not in (result.back, result.start) and result.back > RECOVERY_SECONDS + result.start:
        limit = f"{RECOVERY_SECONDS:.0f} s and the start of {result.start:.0f} s"
        yield f"training again after {result.back:.0f} s, not {limit}"
    if fault.code == 0 and result.losses != "same":
        yield f"losses: {result.losses}"


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the results for a file."""
    return [asdict(result) | {"ok": result.ok} for result in results]


def table(results: Sequence[Result]) -> str:
    """Return the results as a Markdown table."""
    lines = [
        "| Fault | Detected | Cause | Decision | Training again | Losses | Result |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if result.left_out:
            lines.append(f"| {result.text} (`{result.name}`) | | | | | | left out: {result.left_out} |")
            continue
        detected = "-" if result.detected is None else f"{result.detected:.1f} s"
        back = "-" if result.back is None else f"{result.back:.1f} s"
        verdict = "ok" if result.ok else "; ".join(result.wrong)
        cells = (detected, result.cause or "-", ", ".join(result.actions) or "-", back, result.losses or "-", verdict)
        lines.append(
            f"| {result.text} (`{result.name}`) | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def line(result: Result) -> str:
    """Return one result for the terminal."""
    if result.left_out:
        return f"left out  {result.name}: {result.left_out}"
    detected = "not detected" if result.detected is None else f"detected {result.detected:.1f} s"
    back = "" if result.back is None else f", training again {result.back:.1f} s"
    text = f"{detected}, {result.cause or 'no cause'}, {'+'.join(result.actions) or 'no decision'}{back}"
    return f"{'ok  ' if result.ok else 'WRONG'}  {result.name}: {text}" + "".join(
        f"\n       {reason}" for reason in result.wrong
    )

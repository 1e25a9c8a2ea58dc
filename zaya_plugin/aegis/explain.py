# SPDX-License-Identifier: Apache-2.0
"""Read a folder of logs, name the first cause of each attempt's failure, and find the decision that follows from it."""

from __future__ import annotations

import calendar
import dataclasses
import re
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.diagnosis import diagnose
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.policy import decide
from zaya_plugin.aegis.diagnose.rules import KERNEL, Reader, Rule, Rules
from zaya_plugin.aegis.journal import NAME, read
from zaya_plugin.aegis.protocol import AttemptStart, Decision, Diagnosis, FirstStep, to_json
from zaya_plugin.ground.progress import bar

SKIPPED = {".json", ".jsonl", ".yaml", ".html", ".pt", ".bin", ".idx", ".distcp", ".gz", ".zst", ".tar", ".png", ".py"}
KERNEL_NAME = re.compile(r"dmesg|kern|kmsg|messages|syslog|journal", re.IGNORECASE)
KERNEL_LINE = re.compile(r"(?m)^(?:<\d+>)?\[ *\d+\.\d{3,6}\] |^.{10,80} kernel: ")
SLURM_LINE = re.compile(r"slurmstepd: |srun: ")
RANK = re.compile(r"rank[-_]?(\d{1,7})(?!\d)")
LOCAL_RANK = re.compile(r"/attempt_\d+/(\d{1,4})/(?:stdout|stderr)\.log$")
ATTEMPT = re.compile(r"(?:^|/)attempt_(\d{1,7})(?:/|$)")
HOST = re.compile(r"[A-Za-z][\w-]*\d[\w-]*")
NO_HOST = re.compile(  # words of a file's or folder's name that are no part of a host's name
    r"(?:^|[-_.])(?:rank[-_]?\d+|dmesg|kern(?:el)?|kmsg|messages|syslog|journal|stdout|stderr"
    r"|(?:attempt|launch|none|slurm|iter)[-_]\w+|log|txt|out|err)(?=[-_.]|$)"
)
SYSLOG_HOST = re.compile(r"^.{10,40}? (\S{1,80}) kernel: ")
STAMP = re.compile(
    r"(?P<date>\d{4}-\d\d-\d\d)[T_ ](?P<clock>\d\d:\d\d:\d\d)(?P<part>[.,]\d{1,9})?(?P<zone>Z|[+-]\d\d:?\d\d)?"
    r"|\[?\w{3} (?P<day>\w{3} [ \d]?\d) (?P<clock2>\d\d:\d\d:\d\d) (?P<year>\d{4})\]"
    r"|[EWIF](?P<month_day>\d{3,4}) (?P<clock3>\d\d:\d\d:\d\d)(?P<part3>\.\d{1,9})?"
    r"|^(?P<day4>[A-Z][a-z]{2} [ \d]\d) (?P<clock4>\d\d:\d\d:\d\d)"
    r"|^(?:<\d+>)?\[ *(?P<boot>\d{1,9}\.\d{3,9})\]"
)
MONTHS = {name: number for number, name in enumerate(calendar.month_abbr)}


@dataclass
class Log:
    """A file, its writer, and the evidence in it."""

    path: Path
    name: str  # below the folder
    source: str
    node: str
    rank: int | None
    attempt: int | None
    changed: float
    evidence: list[Evidence] = field(default_factory=list)
    lines: int = 0
    first: float | None = None  # the first and the last time that a line states
    last: float | None = None
    by_boot: bool = False  # times are seconds since the machine was started


def read_logs(folder: Path, rules: Rules) -> list[Log]:
    """Return the logs below `folder` with their evidence, on one clock as far as their lines state times."""
    logs = [log for path in sorted(folder.rglob("*")) if path.is_file() and (log := _open(folder, path))]
    with bar("logs", sum(log.path.stat().st_size for log in logs)) as shown:
        for log in logs:
            _read(log, rules, shown.update)
    begin = min((log.first for log in logs if log.first and not log.by_boot), default=0)
    end = max((log.last for log in logs if log.last is not None and not log.by_boot), default=None)
    for log in logs:
        # The times of copied files are not reliable: those that do not fit to the others become the end of the logs.
        changed = log.changed if end is None or begin <= log.changed <= end + 3600 else end
        if log.by_boot:
            log.evidence = [dataclasses.replace(item, time=item.time + changed - log.last) for item in log.evidence]
        elif log.first is None:
            log.evidence = [dataclasses.replace(item, time=changed) for item in log.evidence]
    return logs


def _open(folder: Path, path: Path) -> Log | None:
    name = "/" + path.relative_to(folder).as_posix()
    if path.suffix in SKIPPED or path.name.startswith("."):
        return None
    try:
        with open(path, "rb") as file:
            head = file.read(4096).decode(errors="replace")
        changed = path.stat().st_mtime
    except OSError:
        return None
    source = "rank"
    if KERNEL_NAME.search(path.name) or not RANK.search(name) and KERNEL_LINE.search(head):
        source = KERNEL
    elif path.name.startswith("slurm") or SLURM_LINE.search(head):
        source = "slurm"
    elif "torchrun" in path.name:
        source = "agent"
    match = RANK.search(name) or LOCAL_RANK.search(name)
    attempt = ATTEMPT.search(name)
    parts = [NO_HOST.sub("", part).strip("-_.") for part in reversed(name.split("/"))]
    hosts = [part for part in parts if HOST.fullmatch(part)]
    return Log(
        path,
        name[1:],
        source,
        hosts[0] if hosts else "",
        int(match[1]) if match and source == "rank" else None,
        int(attempt[1]) if attempt else None,
        changed,
    )


def _read(log: Log, rules: Rules, progress: Callable[[int], object]) -> None:
    reader, now = Reader(rules, log.source, log.node, log.rank), 0.0
    year = time.gmtime(log.changed).tm_year
    with open(log.path, "rb") as file:
        for line in _lines(file):
            log.lines += 1
            progress(len(line))
            text = line.decode(errors="replace")
            if (stamp := STAMP.search(text, 0, 80)) and (stated := _seconds(stamp, year)) is not None:
                log.by_boot |= stamp["boot"] is not None
                now = stated
                if log.first is None:
                    log.first = stated
                    log.evidence = [dataclasses.replace(item, time=stated) for item in log.evidence]
                log.last = stated
            evidence = reader.read(text, now)
            if evidence and log.source == KERNEL and (host := SYSLOG_HOST.match(text)):
                evidence = [dataclasses.replace(item, node=host[1]) for item in evidence]
            log.evidence += evidence
    if reader.progress is not None and log.first is not None:
        values = {"step": reader.step}
        log.evidence.append(
            Evidence(reader.progress, log.node, "progress", f"step {reader.step}", log.rank, values=values)
        )


def _lines(file) -> Iterator[bytes]:
    """Yield the lines of a file; of a line that is longer than 8 KiB only the begin."""
    whole = True
    while line := file.readline(8192):
        if whole:
            yield line
        whole = line.endswith(b"\n")


def _seconds(stamp: re.Match, year: int) -> float | None:
    """Return the time of a line: seconds since 1970, UTC where it names no zone, or since the machine was started."""
    if stamp["boot"]:
        return float(stamp["boot"])
    try:
        if stamp["date"]:
            year, month, day = map(int, stamp["date"].split("-"))
            clock, part, zone = stamp["clock"], stamp["part"], stamp["zone"]
        elif stamp["month_day"]:
            month, day = int(stamp["month_day"][:-2]), int(stamp["month_day"][-2:])
            clock, part, zone = stamp["clock3"], stamp["part3"], None
        else:
            name, _, number = (stamp["day"] or stamp["day4"]).partition(" ")
            month, day, year = MONTHS[name], int(number), int(stamp["year"] or year)
            clock, part, zone = stamp["clock2"] or stamp["clock4"], None, None
        hour, minute, second = map(int, clock.split(":"))
        seconds = calendar.timegm((year, month, day, hour, minute, second)) + float(f"0.{part[1:]}" if part else 0)
    except (KeyError, ValueError, OverflowError):
        return None
    if zone and zone != "Z":
        seconds -= (1 if zone[0] == "+" else -1) * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
    return seconds


@dataclass
class Attempt:
    """number: None if the logs have no attempts. step: the last one that the logs name. action, reason: of the decision
    that would have followed.
    """

    number: int | None
    result: Diagnosis
    nodes: tuple[str, ...]
    step: int | None
    action: str = "watch"
    reason: str = "nothing"


def explain(folder: Path, rules: Rules) -> list[Attempt]:
    """Return the attempts below `folder`, each with its diagnosis and what would have been done."""
    logs, journal = read_logs(folder, rules), _journal(folder)
    numbers = sorted({log.attempt for log in logs if log.attempt is not None} | journal.keys())
    attempts, begin = [], float("-inf")
    for number in numbers or [None]:
        own = [log for log in logs if log.attempt == number]
        times = [log.last for log in own if log.last is not None] + [item.time for log in own for item in log.evidence]
        end = float("inf") if not numbers or number == numbers[-1] else max(times, default=begin) + 30
        # Kernels and SLURM write one log for all attempts.
        common = [log for log in logs if log.attempt is None and numbers]
        evidence = [item for log in own for item in log.evidence]
        evidence += [item for log in common for item in log.evidence if begin < item.time <= end]
        steps = [item.values["step"] for item in evidence if item.source == "progress" and "step" in item.values]
        nodes = tuple(sorted({log.node for log in logs if log.node} | {item.node for item in evidence if item.node}))
        result = journal[number][0] if number in journal else diagnose(evidence, rules)
        attempts.append(Attempt(number, result, nodes, max(steps, default=None)))
        begin = end
    _decide(attempts, rules)
    for one in attempts:
        if one.number in journal and (decision := journal[one.number][1]):
            one.action, one.reason = decision.action, decision.reason
    return attempts


def _journal(folder: Path) -> dict[int, tuple[Diagnosis, Decision | None]]:
    """Return from the journal of the run in `folder`: attempt -> its last diagnosis, and the decision upon it. The
    supervisor has more evidence than the logs: exit codes, heartbeats, lost nodes.
    """
    paths = list(folder.rglob(NAME))
    known: dict[int, tuple[Diagnosis, Decision | None]] = {}
    for row in read(paths[0]) if len(paths) == 1 else ():  # attempts of several runs have equal numbers
        if isinstance(row, Diagnosis) and row.generation is not None:
            known[row.generation] = row, None
        elif isinstance(row, Decision) and row.generation in known:
            known[row.generation] = known[row.generation][0], row
    return known


def _decide(attempts: list[Attempt], rules: Rules) -> None:
    """Add what the supervisor would have done, with one spare, and the attempts before as its history."""
    cluster = Cluster(sizes=(len(attempts[0].nodes),))
    for number, one in enumerate(attempts, 1):
        stamp = {"time": one.result.first or 0.0, "generation": number}
        cluster.apply(AttemptStart(list(one.nodes), **stamp))
        cluster.spares = ("a spare",)
        if one.step is not None:
            cluster.apply(FirstStep(one.step))
        if one.result.evidence:
            decision = decide(one.result, cluster, rules, alive=_still_runs(one.result, rules))
            one.action, one.reason = decision.action, decision.reason
            cluster.apply(one.result)
            cluster.apply(dataclasses.replace(decision, **stamp))


def _still_runs(diagnosis: Diagnosis, rules: Rules) -> bool:
    """Whether the run has not failed as far as the logs show: nothing but what may end by itself,
    or is only counted.
    """
    others = [rules[name] for name in (diagnosis.cause, *diagnosis.cascades) if name in rules]
    return all(rule.role != "cascade" and rule.action in ("ride", "watch") for rule in others)


def show(attempt: Attempt, rules: Rules) -> str:
    """Return an attempt as text for a person."""
    result, head = attempt.result, "" if attempt.number is None else f"attempt {attempt.number}: "
    if not result.evidence:
        return f"{head}no row of the rules names a line"
    where = " ".join(
        [f"on {result.node}" * bool(result.node), f"rank {result.rank}" * (result.rank is not None)]
    ).strip()
    lines = [f"{head}{result.cause} {where}".rstrip() + f" ({result.confidence}, {result.severity})"]
    rule = rules.get(result.cause)
    text = rule.explain if rule else "The logs hold only signs of an earlier failure of something else."
    lines += textwrap.wrap(text, 100, initial_indent="  ", subsequent_indent="  ")
    lines.append("  evidence:")
    for item in result.evidence:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(item.time)) + f"{item.time % 1:.3f}"[1:]
        origin = " ".join(filter(None, [item.node, item.source, "" if item.rank is None else str(item.rank)]))
        lines.append(f"    {stamp}  {origin}  {item.text[:160]}")
    if result.cascades:
        lines.append("  followed by: " + ", ".join(f"{number} {name}" for name, number in result.cascades.items()))
    lines.append(f"  the supervisor: {attempt.action}: {attempt.reason}")
    if rule and rule.fix:
        lines += textwrap.wrap(f"a person: {rule.fix}", 100, initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines)


def as_json(attempts: list[Attempt]) -> list[dict[str, Any]]:
    """Return the attempts as plain data."""
    rows = []
    for one in attempts:
        result = {
            name: value for name, value in to_json(one.result).items() if name not in ("kind", "time", "generation")
        }
        rows.append({"attempt": one.number, **result, "action": one.action, "reason": one.reason})
    return rows


def show_rule(rule: Rule) -> str:
    """Return what a class means, and what is done about it, as text for a person."""
    rows = [
        ("what", rule.explain),
        ("read from", ", ".join(rule.source) + ("" if rule.pattern else " (no line of a log)")),
        ("exit code", ", ".join(map(str, rule.exit_code))),
        ("role", f"{rule.role}, {rule.severity}, {rule.confidence}"),
        ("action", rule.action + (f", up to {rule.ride:g} s" if rule.ride else "")),
        ("affects", rule.affects),
        ("from", f"{rule.count} lines in {rule.within:g} s" if rule.count > 1 else ""),
        ("same again", f"the same {rule.repeats}"),
        ("a person", rule.fix),
        ("seen in", rule.link),
        ("AMD's code", rule.safe_code),
        *(("example", sample) for sample in rule.samples[:2]),
    ]
    return "\n".join([rule.name, *(f"  {name:11} {text}" for name, text in rows if text)])

# SPDX-License-Identifier: Apache-2.0
"""The classes of failures: loads rules.yaml and a user's own file, and matches lines of logs and exit codes with rows.

`Rules.load()` reads the rows of zaya_plugin; `Rules.load([path])` adds the rows of a user's file, and a row of the same
name replaces ours. `match(source, line)` returns the rows that name a line, `find` also the values that they read from
it.

A row has the keys of `Rule`; docs/failures.md describes them. A line is cut at LINE characters before it is compared, and
patterns whose time grows faster than the square of that are refused, so no line takes long.
"""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.aegis.diagnose.evidence import Evidence, printable
from zaya_plugin.ground.errors import mistake

FILE = Path(__file__).with_name("rules.yaml")
LINE = 2000  # characters of a line that are compared
A_MINUTE = 20  # lines of one row that a log gives in a minute
KERNEL = "kernel"
TEXTS = ("rank", "agent", "slurm")  # they share files: srun and torchrun write into the logs of the ranks
ESCAPES = re.compile(r"\x1b\[[0-9;?]{0,16}[A-Za-z]")
CHOICES = {
    "source": (KERNEL, *TEXTS, "metrics", "counter"),
    "role": ("root", "cascade", "confirmation", "watch"),
    "severity": ("fatal", "high", "warn", "user", "policy"),
    "confidence": ("sure", "likely", "weak"),
    "action": ("ride", "restart", "exchange", "stop", "rollback", "watch"),
    "affects": ("link", "state", "node"),
    "repeats": ("node", "rank", "frame", "run"),
}
LISTS = ("source", "words", "pattern", "not", "exit_code", "samples", "near")
NUMBERS = ("count", "within", "ride")
LIMITED = 16  # a repeat of more than this may take long within another one


@dataclass(frozen=True)
class Rule:
    """A class of failures.

    name: small letters, digits and _.
    source: kernel, rank, agent, slurm (the last three share files), metrics, counter; one or a list. Without patterns:
        the reporter.
    words: in small letters; every line of the row holds one of them. Without words each line is compared.
    pattern: Python patterns, each sufficient; their named groups become values of the evidence.
    but_not: patterns of lines that do not count.
    exit_code: of a rank, as Python shows it (-9 for SIGKILL); one or a list.
    role: root names a first cause; cascade never does; confirmation joins one; watch is only counted.
    severity: fatal, high, warn, user (never restarted) or policy (the scheduler's doing).
    confidence: sure, likely or weak.
    action: ride, restart, exchange, stop, rollback or watch, before the history of the run counts.
    affects: link (down twice in five minutes: the node is exchanged), state (the same failure at the same step again:
        roll back), or node, which the next attempt cannot use.
    count, within: `count` lines of one node within `within` seconds are a fault; fewer are only counted.
    recover, ride: the pattern of the line that ends it, and how many seconds it may last without a loss.
    repeats: what must be equal for a second failure to be the same failure: node, rank, frame (the place in the code)
        or run; default: node for kernel and counter rows, else run.
    fallback: the row counts only for lines that no other row names.
    explain, fix: what it means, and what a person does.
    link: a report or thread.
    samples, near: lines that the row names, and lines that it nearly names; tests read them.
    safe_code: AMD's code of the class in Primus-SaFE.
    """

    name: str
    source: tuple[str, ...]
    role: str
    severity: str
    confidence: str
    action: str
    explain: str
    fix: str = ""
    words: tuple[str, ...] = ()
    pattern: tuple[str, ...] = ()
    but_not: tuple[str, ...] = ()
    exit_code: tuple[int, ...] = ()
    affects: str = ""
    count: int = 1
    within: float = 0
    recover: str = ""
    ride: float = 0
    repeats: str = "run"
    fallback: bool = False
    link: str = ""
    safe_code: str = ""
    samples: tuple[str, ...] = ()
    near: tuple[str, ...] = ()


KEYS = {"not" if field.name == "but_not" else field.name: field for field in fields(Rule)}


@dataclass(frozen=True)
class Match:
    """A row that names a line, the values of its groups, and whether the line says that the fault is over."""

    rule: Rule
    values: dict[str, Any]
    recovered: bool = False


class Rules:
    """Rows by name, a quick search for those that name a line, and the row of an exit code."""

    def __init__(self, rows: Iterable[Rule]):
        self.rows = {rule.name: rule for rule in rows}
        self._kernel = _Family(rule for rule in self if KERNEL in rule.source)
        self._texts = _Family(rule for rule in self if not {KERNEL} >= set(rule.source))
        self._exits = {code: rule for rule in self for code in rule.exit_code}

    @classmethod
    def load(cls, paths: Iterable[str | Path] = ()) -> Rules:
        """Return the rows of zaya_plugin with those of the files `paths`, the later ones before the earlier ones. A row
        that replaces another one keeps its exit codes and what it affects, unless it names its own.

        Raises ValueError, in the form of `mistake`, for a file that holds no valid rows.
        """
        rows: dict[str, Rule] = {}
        for path in (FILE, *map(Path, paths)):
            for rule in read(path):
                old = rows.get(rule.name, rule)
                kept = {"exit_code": rule.exit_code or old.exit_code, "affects": rule.affects or old.affects}
                rows[rule.name] = replace(rule, **kept)
        return cls(rows.values())

    def __getitem__(self, name: str) -> Rule:
        return self.rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def get(self, name: str | None) -> Rule | None:
        """Return the row of a name, or None."""
        return self.rows.get(name)

    def of_exit(self, code: int) -> Rule | None:
        """Return the row of an exit code, as Python shows it (-9) or as a shell does (137); None for 0."""
        code = 128 - code if code > 128 else code
        unknown = "signal" if -code in {*signal.Signals} else "rank_failed"
        return self._exits.get(code, self.rows[unknown]) if code else None

    def exit_evidence(self, code: int, at: float, node: str, rank: int | None, **values: Any) -> Evidence:
        """Return the evidence that a rank has ended with an exit code other than 0."""
        text = f"ended with exit code {code}: {self.of_exit(code).explain}"
        return Evidence(at, node, "exit", text, rank, None, {"exit_code": code, **values})

    def match(self, source: str, line: str | bytes) -> list[Rule]:
        """Return the rows that name `line` as a fault. source: kernel, or rank, agent or slurm, which are the same."""
        return [match.rule for match in self.find(source, line) if not match.recovered]

    def find(self, source: str, line: str | bytes) -> list[Match]:
        """Return the rows that name `line` as a fault, or as the end of one."""
        line = _cut(line)
        if "\x1b" in line:
            line = ESCAPES.sub("", line)
        return (self._kernel if source == KERNEL else self._texts).find(line)


def _cut(line: str | bytes) -> str:
    return (line[: 4 * LINE].decode(errors="replace") if isinstance(line, bytes) else line)[:LINE]


class _Family:
    """The rows of one kind of log. Most lines hold none of the words of the rows, and are left early."""

    def __init__(self, rules: Iterable[Rule]):
        self.rules = [
            (
                rule,
                [re.compile(text) for text in rule.but_not],
                [(re.compile(text), text == rule.recover) for text in (*rule.pattern, rule.recover) if text],
            )
            for rule in rules
            if rule.pattern
        ]
        # Grouped by their first letter: re tries the branches of a pattern one after the other.
        words = sorted({word for rule, *_ in self.rules for word in rule.words})
        branches = (
            re.escape(letter) + f"(?:{'|'.join(re.escape(word[1:]) for word in group)})"
            for letter, group in groupby(words, key=lambda word: word[0])
        )
        self.any_word = re.compile("|".join(branches) or r"(?!)")
        self.wordless = [entry for entry in self.rules if not entry[0].words]

    def find(self, line: str) -> list[Match]:
        lowered, matches = line.lower(), []
        for rule, excluded, patterns in self.rules if self.any_word.search(lowered) else self.wordless:
            if rule.words and not any(word in lowered for word in rule.words):
                continue
            for pattern, recovers in patterns:
                if (groups := pattern.search(line)) and not any(other.search(line) for other in excluded):
                    matches.append(Match(rule, _values(groups), recovers))
                    break
        return [match for match in matches if not match.rule.fallback] or matches


class Reader:
    """Reads one log line by line, and returns the evidence in it.

    It holds what a single line does not show: in which file an exception was raised, which rank a line of a common log
    belongs to, and how far the run is (`step`, at the time `progress`).
    """

    # torch of today, srun --label, zaya_plugin, torch of before
    PREFIX = re.compile(r"\[rank(\d{1,7})\]:|^ *(\d{1,7}): |^zaya: rank (\d{1,7}): |\[Rank (\d{1,7})\]")
    STEP = re.compile(r"\biteration +(\d{1,12})/")  # Megatron's line
    FRAME = re.compile(r'File "([^"]{1,500})", line \d+, in (\S{1,80})')
    SUMMARY = re.compile(r"^ *(rank|host) +: (\S{1,80})")  # torchrun's table of failures: before the exit code

    def __init__(self, rules: Rules, source: str, node: str, rank: int | None = None):
        self.rules, self.source, self.node, self.rank = rules, source, node, rank
        self.step: int | None = None
        self.progress: float | None = None
        self._frames: dict[int | None, tuple[bool, str]] = {}  # by rank: whether it is the run's own code, and where
        self._summary: dict[str, str] = {}
        self._counts: dict[str, tuple[float, int]] = {}  # row -> begin of the minute, lines in it

    def read(self, line: str | bytes, time: float) -> list[Evidence]:
        """Return the evidence of one line that was written at `time`; none for almost all lines."""
        line = _cut(line)
        if self.source != KERNEL:
            self._follow(line, time)
        return [
            self._evidence(match, line, time)
            for match in self.rules.find(self.source, line)
            if self._is_new(match.rule, time)
        ]

    def _is_new(self, rule: Rule, time: float) -> bool:
        """Whether the row was not yet named A_MINUTE times in this minute:
        one bad rank may write a line a million times.
        """
        since, number = self._counts.get(rule.name, (time, 0))
        if not 0 <= time - since < 60:
            since, number = time, 0
        self._counts[rule.name] = since, number + 1
        return number < max(A_MINUTE, rule.count)

    def _follow(self, line: str, time: float) -> None:
        if "iteration" in line and (read := self.STEP.search(line)) and int(read[1]) != self.step:
            self.step, self.progress = int(read[1]), time
        elif "Traceback (most" in line:
            self._frames.pop(self._rank_of(line), None)
        elif 'File "' in line and (read := self.FRAME.search(line)):
            path, rank = read[1], self._rank_of(line)
            own = "zaya_plugin" in path or not re.search(r"site-packages|dist-packages|/lib/python|^<", path)
            if own or not self._frames.get(rank, (False, ""))[0]:
                self._frames[rank] = own, f"{'/'.join(path.split('/')[-2:])} in {read[2]}"
        elif "  : " in line and (read := self.SUMMARY.search(line)):
            self._summary[read[1]] = read[2]

    def _rank_of(self, line: str) -> int | None:
        if self.rank is None and (read := self.PREFIX.search(line)):
            return int(next(number for number in read.groups() if number is not None))
        return self.rank

    def _evidence(self, match: Match, line: str, time: float) -> Evidence:
        rule, values, rank, source = match.rule, dict(match.values), self._rank_of(line), self.source
        if match.recovered:
            values["recovered"] = True
        node = str(values.get("host", self.node))
        if "exit_code" in values:
            source, rule = "exit", self.rules.of_exit(values["exit_code"]) or rule
            if "task" not in values and self._summary:
                node = self._summary.get("host", node)
                rank = int(number) if (number := self._summary.get("rank", "")).isdecimal() else rank
                self._summary = {}
        rank = values.pop("task", rank)
        if frame := self._frames.pop(rank, None):
            kind = re.search(r"(?:^|[\s.:])([A-Z]\w{1,60})(?::|\s*$)", line)
            values |= {"frame": frame[1], "exception": kind[1] if kind else rule.name}
        return Evidence(time, node, source, printable(line), rank, rule.name, values)


def _values(read: re.Match) -> dict[str, Any]:
    """Return the named groups that took part, numbers as numbers."""
    groups = {name: value for name, value in read.groupdict().items() if value is not None}
    values = {
        name: int(value) if re.fullmatch(r"-?\d{1,18}", value) and value.isascii() else value
        for name, value in groups.items()
    }
    # `\d` takes digits of all scripts, and a line may hold a hundred of them: no exit code and no rank.
    return {
        name: value for name, value in values.items() if name not in ("exit_code", "task") or isinstance(value, int)
    }


def read(path: Path) -> list[Rule]:
    """Return the rows of a file. Raises ValueError, in the form of `mistake`, naming the row and the key."""
    try:
        rows = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise mistake("--rules", path, problem=error.strerror or str(error), fix="correct the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise mistake("--rules", path, problem=f"not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(rows, list):
        raise mistake("--rules", path, problem="must hold a list of rows", fix="begin each row with `- name: ...`")
    rules = [_rule(path, number, row) for number, row in enumerate(rows, 1)]
    for rule in rules:
        if sum(other.name == rule.name for other in rules) > 1:
            raise mistake(str(path), problem=f"the row {rule.name} comes twice", fix="remove or rename one of them")
    return rules


def _rule(path: Path, number: int, row: Any) -> Rule:
    name = row.get("name") if isinstance(row, dict) else None
    where = f"{path}, row {number}" + (f" ({name})" if isinstance(name, str) else "")
    if not isinstance(row, dict):
        raise mistake(where, problem="must be a row of keys and values", fix="begin it with `- name: ...`")
    for key in row:
        if key not in KEYS:
            raise mistake(f"{where}, key {key}", problem="no such key", allowed=", ".join(KEYS))
    for key, field in KEYS.items():
        if field.default is MISSING and not row.get(key):
            raise mistake(f"{where}, key {key}", problem="is missing")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise mistake(f"{where}, key name", name, problem="not a valid name", allowed="small letters, digits and _")
    values = {}
    for key, value in row.items():
        at = f"{where}, key {key}"
        if key in LISTS:
            value = tuple(value) if isinstance(value, list) else (value,)
        kind = {"fallback": bool, "exit_code": int}.get(key, (int, float) if key in NUMBERS else str)
        for one in value if key in LISTS else (value,):
            if not isinstance(one, kind) or (isinstance(one, bool) and kind is not bool):
                type_name = {bool: "true or false", str: "text", int: "a whole number"}.get(kind, "a number")
                raise mistake(
                    at, one, problem=f"must be {type_name}", fix="put the value in quotes" if kind is str else ""
                )
            if key == "words" and one != (one.lower() or None):
                raise mistake(at, one, problem="must be a word in small letters")
            if key in CHOICES and one not in CHOICES[key]:
                raise mistake(at, one, problem="no such value", allowed=", ".join(CHOICES[key]))
            if key in NUMBERS and (one < 0 or key == "count" and one < 1):
                raise mistake(at, one, problem="is too small", allowed="1 or more" if key == "count" else "0 or more")
            if key in ("pattern", "not", "recover"):
                _check_pattern(at, one)
        values["but_not" if key == "not" else key] = value
    if values.get("count", 1) > 1 and not values.get("within"):
        raise mistake(
            f"{where}, key within", problem="is missing", fix="name the seconds in which `count` lines matter"
        )
    if "recover" in values and not values.get("pattern"):
        raise mistake(f"{where}, key recover", problem="needs a pattern")
    if "repeats" not in values and {KERNEL, "counter"} >= set(values["source"]):
        values["repeats"] = "node"
    rule = Rule(**values)
    for sample in rule.samples:
        if rule.words and not any(word in sample.lower() for word in rule.words):
            problem = (
                f"the sample {sample!r} holds none of them, and lines without one are not compared with the pattern"
            )
            raise mistake(
                f"{where}, key words", ", ".join(rule.words), problem=problem, fix="words of the line, or no key"
            )
    return rule


REPEAT = r"(?:[*+?]|\{(?:\d+(?:,\d*)?|,\d*)\})"
TOKENS = re.compile(
    rf"(?P<repeat>{REPEAT})[?+]?"
    r"|(?P<open>\((?:\?(?:P<\w+>|P=\w+|<?[=!]|[>:]|[aiLmsux-]+:?|\(\w+\)|#[^)]*))?)|(?P<close>\))"
    r"|(?P<wide>\.|\\[SDW]|\[\^\]?(?:\\.|[^\]\\])*\]|\[\]?(?:\\.|[^\]\\])*?\\[SDW](?:\\.|[^\]\\])*\])"
    r"|\[\]?(?:\\.|[^\]\\])*\]|\\.|.",
    re.DOTALL,
)


def _check_pattern(at: str, pattern: str) -> None:
    """Refuse a pattern that does not compile, matches every line, or may need very long for one."""
    try:
        matches_nothing = re.compile(pattern).search("")
    except (re.error, OverflowError, RecursionError) as error:
        raise mistake(at, pattern, problem=f"not a valid Python pattern: {error}") from None
    if matches_nothing:
        raise mistake(at, pattern, problem="matches every line", fix="name a word of the line")
    wide, nested = _repeats(pattern)
    if nested or wide > 1:
        problem = "repeats a repeated part" if nested else "has more than one repeat without a limit, such as .* or .+"
        raise mistake(
            at, pattern, problem=f"{problem}: a long line would take for ever", fix="a limit, such as .{0,80}"
        )


def _repeats(pattern: str) -> tuple[int, bool]:
    """Return how many repeats without a limit take almost any letter, and whether a repeat lies within another one."""
    wide_repeats, nested = 0, False
    # Of each open group: whether a part of it takes most letters, and whether one is repeated.
    groups = [(False, False)]
    wide, repeated, outer = False, False, (False, False)  # of the last part, and of its group before it
    for token in TOKENS.finditer(pattern):
        if token["open"]:
            groups.append((False, False))
        elif token["repeat"]:
            most = _most(token["repeat"])
            nested |= repeated and most > LIMITED
            wide_repeats += wide and most > 1000
            groups[-1] = outer[0], outer[1] or repeated or most > LIMITED
        else:
            wide, repeated = groups.pop() if token["close"] else (bool(token["wide"]), False)
            outer = groups[-1]
            groups[-1] = outer[0] or wide, outer[1] or repeated
    return wide_repeats, nested


def _most(repeat: str) -> float:
    """Return how often the part before a repeat may come."""
    if repeat in "*+?":
        return 1 if repeat == "?" else math.inf
    least, limited, most = repeat.strip("{}").partition(",")
    return int(most or least) if most or not limited else math.inf

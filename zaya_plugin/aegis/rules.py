# SPDX-License-Identifier: Apache-2.0
"""The classes of failures: loads rules.yaml and a user's own file, and finds the rows that name a line of a log.

`Rules.load()` reads the rows of zaya_plugin; `Rules.load([path])` adds the rows of a user's file, and a row of the same
name replaces ours. `match(source, line)` returns the rows that name a line, `find` also what they read from it.

A row has the keys of `Rule`; docs/aegis.md describes them. A line is cut at LINE characters before it is compared, and
patterns whose time grows faster than the square of that are refused, so no line takes long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.aegis.evidence import Evidence, printable
from zaya_plugin.aegis.exit_codes import meaning
from zaya_plugin.ground.errors import mistake

try:
    from re import _constants as sre
    from re import _parser as sre_parser
except ImportError:  # Python 3.10
    import sre_constants as sre
    import sre_parse as sre_parser

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
    "repeats": ("node", "rank", "frame", "run"),
}
LISTS = ("source", "pattern", "not", "samples", "near")
NUMBERS = ("count", "within", "ride")


@dataclass(frozen=True)
class Rule:
    """A class of failures.

    source: where its lines come from; without patterns: who reports it.
    pattern: Python patterns, each sufficient; their named groups become Evidence.values.
    but_not: patterns of lines that do not count (the key `not`).
    role: root names a first cause; cascade never does; confirmation joins one; watch is only counted.
    action: what is done about it, before the history of the run is looked at.
    count, within: so many lines of one node within so many seconds are a fault; fewer are only counted.
    recover, ride: the pattern of the line that ends it, and how many seconds it may last without a loss.
    repeats: what must be the same for a second failure to be the same again: the node, the rank, the place in the code
        (frame), or only the run.
    fallback: the row counts only for lines that no other row names.
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
    pattern: tuple[str, ...] = ()
    but_not: tuple[str, ...] = ()
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
class Found:
    """A row that names a line, what its groups read from it, and whether the line says that the fault is over."""

    rule: Rule
    values: dict[str, Any]
    recovered: bool = False


class Rules:
    """Rows by name, and a quick search for those that name a line."""

    def __init__(self, rows: Iterable[Rule]):
        self.rows = {rule.name: rule for rule in rows}
        self._kernel = _Family(rule for rule in self if KERNEL in rule.source)
        self._texts = _Family(rule for rule in self if not {KERNEL} >= set(rule.source))

    @classmethod
    def load(cls, paths: Iterable[str | Path] = ()) -> Rules:
        """Return the rows of zaya_plugin with those of the files `paths`, the later ones before the earlier ones.

        Raises ValueError, in the form of `mistake`, for a file that holds no valid rows.
        """
        rows: dict[str, Rule] = {}
        for path in (FILE, *map(Path, paths)):
            rows.update({rule.name: rule for rule in read(path)})
        return cls(rows.values())

    def __getitem__(self, name: str) -> Rule:
        return self.rows[name]

    def __contains__(self, name: object) -> bool:
        return name in self.rows

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rows.values())

    def __len__(self) -> int:
        return len(self.rows)

    def match(self, source: str, line: str | bytes) -> list[Rule]:
        """Return the rows that name `line` as a fault. source: kernel, or rank, agent or slurm, which are the same."""
        return [match.rule for match in self.find(source, line) if not match.recovered]

    def find(self, source: str, line: str | bytes) -> list[Found]:
        """Return the rows that name `line` as a fault, or as the end of one."""
        if isinstance(line, bytes):
            line = line[: 4 * LINE].decode(errors="replace")
        line = line[:LINE]
        if "\x1b" in line:
            line = ESCAPES.sub("", line)
        return (self._kernel if source == KERNEL else self._texts).find(line)


class _Family:
    """The rows of one kind of log. Most lines hold none of the words that the patterns need, and are left early."""

    def __init__(self, rules: Iterable[Rule]):
        self.tests: list[tuple[str, re.Pattern, Rule, list[re.Pattern], bool]] = []
        for rule in rules:
            excluded = [re.compile(text) for text in rule.but_not]
            for text, recovered in [(text, False) for text in rule.pattern] + [(rule.recover, True)] * bool(
                rule.recover
            ):
                for word in words(text) or [""]:
                    self.tests.append((word, re.compile(text), rule, excluded, recovered))
        # Grouped by their first letter: re tries the branches of a pattern one after the other.
        groups = groupby(sorted({word for word, *_ in self.tests if word}), key=lambda word: word[0])
        branches = (
            re.escape(letter) + f"(?:{'|'.join(re.escape(word[1:]) for word in group)})" for letter, group in groups
        )
        self.any_word = re.compile("|".join(branches) or r"(?!)")
        self.wordless = [test for test in self.tests if not test[0]]

    def find(self, line: str) -> list[Found]:
        lowered = line.lower()
        tests = self.tests if self.any_word.search(lowered) else self.wordless
        by_name: dict[str, Found] = {}
        for word, pattern, rule, excluded, recovered in tests:
            if word in lowered and rule.name not in by_name and (read := pattern.search(line)):
                if not any(other.search(line) for other in excluded):
                    by_name[rule.name] = Found(rule, _values(read), recovered)
        if any(not one.rule.fallback for one in by_name.values()):
            return [one for one in by_name.values() if not one.rule.fallback]
        return list(by_name.values())


class Reader:
    """Reads one log line by line, and gives the evidence in it.

    It knows what a single line does not show: in which file an exception was raised, which rank a line of a common log
    belongs to, and how far the run came (`step`, at the time `progress`).
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
        self._given: dict[str, tuple[float, int]] = {}  # row -> begin of the minute, lines in it

    def read(self, line: str | bytes, time: float) -> list[Evidence]:
        """Return the evidence of one line that was written at `time`; none for almost all lines."""
        if isinstance(line, bytes):
            line = line[: 4 * LINE].decode(errors="replace")
        line = line[:LINE]
        if self.source != KERNEL:
            self._follow(line, time)
        matches = self.rules.find(self.source, line)
        return [self._evidence(one, line, time) for one in matches if self._is_new(one.rule, time)] if matches else []

    def _is_new(self, rule: Rule, time: float) -> bool:
        """Whether the row was not yet named A_MINUTE times in this minute: one bad rank may write a line a million times."""
        since, number = self._given.get(rule.name, (time, 0))
        if not 0 <= time - since < 60:
            since, number = time, 0
        self._given[rule.name] = since, number + 1
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

    def _evidence(self, match: Found, line: str, time: float) -> Evidence:
        rule, values, rank, source = match.rule, dict(match.values), self._rank_of(line), self.source
        if match.recovered:
            values["recovered"] = True
        node = str(values.get("host", self.node))
        if "exit_code" in values:
            source, rule = "exit", self.rules[meaning(values["exit_code"]).rule or rule.name]
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


def words(pattern: str) -> list[str] | None:
    """Return words, in lower case, one of which every match of `pattern` holds; None if there are none of 3 letters."""
    groups = _words(sre_parser.parse(pattern))
    return groups if groups and min(map(len, groups)) >= 3 else None


def _words(parsed: Iterable) -> list[str] | None:
    """Of the parts that every match must hold take the one whose shortest word is the longest."""
    candidates: list[list[str]] = []
    run = ""
    for kind, value in [*parsed, (None, None)]:
        if kind is sre.LITERAL and value < 128:
            run += chr(value).lower()
            continue
        if run:
            candidates.append([run])
            run = ""
        inner = None
        if kind is sre.SUBPATTERN:
            inner = _words(value[-1])
        elif kind is sre.BRANCH:
            branches = [_words(branch) for branch in value[1]]
            inner = [word for branch in branches for word in branch] if all(branches) else None
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT) and value[0] > 0:
            inner = _words(value[2])
        if inner:
            candidates.append(inner)
    return max(candidates, key=lambda words: min(map(len, words)), default=None)


def read(path: Path) -> list[Rule]:
    """Return the rows of a file. Raises ValueError, in the form of `mistake`, naming the row and the key."""
    try:
        rows = yaml.load(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise mistake("--rules", path, problem=error.strerror or str(error), fix="correct the path") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise mistake("--rules", path, problem=f"is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(rows, list):
        raise mistake("--rules", path, problem="holds no list of rows", fix="begin each row with `- name: ...`")
    rules = [_rule(path, number, row) for number, row in enumerate(rows, 1)]
    for rule in rules:
        if sum(other.name == rule.name for other in rules) > 1:
            raise mistake(str(path), problem=f"the row {rule.name} comes twice", fix="remove or rename one of them")
    return rules


def _rule(path: Path, number: int, row: Any) -> Rule:
    name = row.get("name") if isinstance(row, dict) else None
    where = f"{path}, row {number}" + (f" ({name})" if isinstance(name, str) else "")
    if not isinstance(row, dict):
        raise mistake(where, problem="is not a row of keys and values", fix="begin it with `- name: ...`")
    for key in row:
        if key not in KEYS:
            raise mistake(f"{where}, key {key}", problem="no such key", allowed=", ".join(KEYS))
    for key, field in KEYS.items():
        if field.default is MISSING and not row.get(key):
            raise mistake(f"{where}, key {key}", problem="is missing")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]{0,39}", name):
        raise mistake(f"{where}, key name", name, problem="is no name", allowed="small letters, digits and _")
    values = {}
    for key, value in row.items():
        at = f"{where}, key {key}"
        if key in LISTS:
            value = tuple(value) if isinstance(value, list) else (value,)
        kind = {"fallback": bool}.get(key, (int, float) if key in NUMBERS else str)
        for one in value if key in LISTS else (value,):
            if not isinstance(one, kind) or (isinstance(one, bool) and kind is not bool):
                want = {bool: "true or false", str: "text"}.get(kind, "a number")
                raise mistake(at, one, problem=f"is not {want}", fix="put the value in quotes" if kind is str else "")
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
    return Rule(**values)


def _check_pattern(at: str, pattern: str) -> None:
    """Refuse a pattern that does not compile, matches every line, or may need very long for one."""
    try:
        parsed = sre_parser.parse(pattern)
        matches_nothing = re.compile(pattern).search("")
    except (re.error, OverflowError, RecursionError) as error:
        raise mistake(at, pattern, problem=f"is no pattern of Python: {error}") from None
    if matches_nothing:
        raise mistake(at, pattern, problem="matches every line", fix="name a word of the line")
    wide, nested = _repeats(parsed)
    if nested or wide > 1:
        problem = "repeats a repeated part" if nested else "has more than one repeat without a limit, such as .* or .+"
        raise mistake(
            at, pattern, problem=f"{problem}: a long line would take for ever", fix="a limit, such as .{0,80}"
        )


def _repeats(parsed: Iterable, inside: bool = False) -> tuple[int, bool]:
    """Return how many repeats without a limit take almost any letter, and whether a repeat lies within another one."""
    wide, nested = 0, False
    for kind, value in parsed:
        parts, repeated = [], inside
        if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            wide += value[1] > 1000 and any(_is_wide(one) for one in value[2])
            nested |= inside and value[1] > 16
            parts, repeated = [value[2]], inside or value[1] > 16
        elif kind is sre.SUBPATTERN:
            parts = [value[-1]]
        elif kind is sre.BRANCH:
            parts = value[1]
        elif kind in (sre.ASSERT, sre.ASSERT_NOT):
            parts = [value[1]]
        for part in parts:
            more, deeper = _repeats(part, repeated)
            wide, nested = wide + more, nested or deeper
    return wide, nested


def _is_wide(one: tuple) -> bool:
    """Whether a part of a pattern takes most letters: `.`, `[^x]` or a class such as \\S."""
    kind, value = one
    if kind is sre.SUBPATTERN:
        return any(map(_is_wide, value[-1]))
    if kind is sre.BRANCH:
        return any(_is_wide(part) for branch in value[1] for part in branch)
    if kind is sre.IN:
        return any(what is sre.NEGATE or what is sre.CATEGORY and "NOT" in str(which) for what, which in value)
    return kind in (sre.ANY, sre.NOT_LITERAL)

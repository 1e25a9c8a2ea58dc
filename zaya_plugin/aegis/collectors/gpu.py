# SPDX-License-Identifier: Apache-2.0
"""Counters of AMD GPUs: memory errors (RAS), links between GPUs, PCIe, heat, and whether a GPU is gone.

sysfs costs nothing and is read often. amd-smi starts a process that wakes the driver and may hang in it, so it runs
every 30 s with a deadline. Only growth is evidence. The forms of its JSON that are known are those of the releases 24
to 27 (ROCm 6.2 to 10.1); another form is reported once, as is a name that is missing from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hip_ops.runtime.rocm import find_program
from zaya_plugin.aegis.collectors.runner import Collector, Growth, Tool
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.ground.mounts import read

AMD = "0x1002"
# Some queries of rocm-smi add this many to a count at each call: a defect of the report, not errors.
DEFECT = 1_048_560
LINKS = "xgmi"  # of the RAS block for the links between GPUs: XGMI_WAFL
# Path in amd-smi's JSON -> rule, and the growth that is evidence.
# A power limit is reached at full load and is no fault.
FIELDS = (
    (re.compile(r"ecc\.total_uncorrectable_count"), "counter_ue", 1),
    (re.compile(r"ecc\.total_deferred_count"), "counter_deferred", 1),
    (re.compile(r"ecc\.total_correctable_count"), "counter_ce", 100),
    (re.compile(r"ecc_blocks\.xgmi\w*\.uncorrectable\w*"), "counter_xgmi", 1),
    (re.compile(r"ecc_blocks\.xgmi\w*\.correctable\w*"), "counter_xgmi", 100),
    (re.compile(r"pcie\.(?:replay_count|nak_\w*count)"), "counter_pcie", 1000),
    (re.compile(r"throttle\.(?:prochot|socket_thermal|vr_thermal|hbm_thermal)\w*_accumulated"), "counter_throttle", 1),
)
NAMES = ("ecc.total_uncorrectable_count", "pcie.replay_count")  # in every release, with a number or "N/A"
# Fields of `amd-smi bad-pages --json`: a sentence where there is no page, an object for one, a list for more.
PAGES = ("retired", "pending", "un_res")
NO_PAGES = "No bad pages"
UNREAD = "These counters are not watched: compare `amd-smi version` with the releases that docs/failures.md names"
KINDS = {"ue": ("counter_ue", 1), "de": ("counter_deferred", 1), "ce": ("counter_ce", 100)}


class GpuSysfs(Collector):
    """Reads the error counts of each block in sysfs, and the number of GPUs."""

    name, source, interval, deadline = "gpu_sysfs", "counter", 2.0, 10.0

    def __init__(self, node: str, root: Path = Path("/")):
        super().__init__(node)
        self.root = root
        self._counts = Counts()
        self._cards: set[str] = set()

    def poll(self, now: float) -> list[Evidence]:
        cards = {path.name: path for path in (self.root / "sys/class/drm").glob("card*") if path.name[4:].isdecimal()}
        cards = {name: path for name, path in cards.items() if read(path / "device/vendor") == AMD}
        evidence = []
        for name in sorted(self._cards - cards.keys()):
            text = f"{name} is gone; {len(cards)} of {len(self._cards)} GPUs are left"
            evidence.append(self.evidence(now, "gpu_missing", text, gpu=name, left=len(cards)))
        self._cards = set(cards)
        for name, path in sorted(cards.items()):
            for file in sorted((path / "device/ras").glob("*_err_count")):
                block = file.name.removesuffix("_err_count")
                for kind, value in re.findall(r"^(ue|ce|de): *(\d+)", read(file), re.MULTILINE):
                    rule, least = KINDS[kind]
                    rule = "counter_xgmi" if LINKS in block else rule
                    if grown := self._counts.grown((name, block, kind), int(value), least):
                        text = f"{name}: {kind} errors of block {block} have grown by {grown} to {value}"
                        evidence.append(self.evidence(now, rule, text, gpu=name, block=block, kind=kind, growth=grown))
        return evidence


class AmdSmi(Collector):
    """Asks amd-smi for the counters that sysfs lacks, and for memory pages that are out of use."""

    name, source, interval, deadline = "amd_smi", "counter", 30.0, 25.0

    def __init__(self, node: str, command: str | None = None, seconds: float = 20.0):
        super().__init__(node)
        self.command = command or find_program("amd-smi") or "amd-smi"
        self._reported: set[str] = set()  # commands of amd-smi whose answer has an unknown form
        self._tool = Tool(seconds)
        self._counts = Counts()

    def poll(self, now: float) -> list[Evidence]:
        try:
            metric_text = self._tool.output(self.command, "metric", "-g", "all", "--json")
            pages_text = self._tool.output(self.command, "bad-pages", "--json")
        except TimeoutError as error:
            return [self.evidence(now, "collector_late", str(error), collector=self.name)]
        metric, pages = gpus(metric_text), gpus(pages_text)
        evidence = []
        for problem in filter(None, (metric_problem(metric_text, metric), pages_problem(pages_text, pages))):
            if (command := problem.split()[0]) not in self._reported:
                self._reported.add(command)
                evidence.append(self.evidence(now, "collector_late", f"{self.command} {problem}", collector=self.name))
        for gpu, path, value in numbers(metric):
            for pattern, rule, least in FIELDS:
                if pattern.fullmatch(path) and (grown := self._counts.grown((gpu, path), value, least)):
                    text = f"GPU {gpu}: {path} has grown by {grown} to {value}"
                    evidence.append(self.evidence(now, rule, text, gpu=gpu, field=path, growth=grown))
        is_free = NO_PAGES in (pages_text or "") and not pages
        none = {gpu.get("gpu", at): 0 for at, gpu in enumerate(metric)} if is_free else {}
        for gpu, count in (none | bad_pages(pages)).items():
            if grown := self._counts.grown((gpu, "bad pages"), count, 1):
                text = f"GPU {gpu}: {grown} more memory page(s) are out of use, {count} in all"
                evidence.append(self.evidence(now, "counter_bad_pages", text, gpu=gpu, growth=grown, count=count))
        return evidence


class Counts:
    """Growth of error counts, without what the defect of the report has added."""

    def __init__(self) -> None:
        self._growth = Growth()
        self._added: dict[object, tuple[int, int]] = {}  # counter -> its last value, and the sum of the defect's parts

    def grown(self, key: object, value: int, least: int) -> int:
        """Return by how much a counter has grown, or 0 below `least`."""
        last, added = self._added.get(key, (value, 0))
        added += max(0, value - last) // DEFECT * DEFECT
        self._added[key] = value, added
        return self._growth.of(key, value - added, least)


def parsed(text: str | None) -> Any:
    """Return the JSON of a tool that may print warnings before it; None for none."""
    for at in sorted(at for at in ((text or "").find(sign) for sign in "[{") if at >= 0):
        try:
            return json.loads(text[at:])
        except ValueError:
            continue
    return None


def metric_problem(text: str | None, metric: list[dict]) -> str | None:
    """Say why the counters of `amd-smi metric --json` cannot be read, or return None. text: None where it did not run."""
    if text is None:
        return None
    if not metric:
        return f"metric --json: no list of GPUs in its answer, which begins with {text.strip()[:60]!r}. {UNREAD}"
    known = {path for gpu in metric for path in names(gpu)}
    absent = [name for name in NAMES if name not in known and name.split(".")[0] not in known]
    return f"metric --json: no field {' and '.join(absent)} in its answer. {UNREAD}" if absent else None


def pages_problem(text: str | None, pages: list[dict]) -> str | None:
    """Say why the pages of `amd-smi bad-pages --json` cannot be read, or return None."""
    if text is None or NO_PAGES in text or any(name in gpu for gpu in pages for name in PAGES):
        return None
    return f"bad-pages --json: no field {', '.join(PAGES)} in its answer: {text.strip()[:60]!r}. {UNREAD}"


def numbers(metric: list[dict]) -> Iterator[tuple[int, str, int]]:
    """Yield GPU, path and value of every whole number in the GPUs' objects. A number may stand in {"value": 1, "unit":
    "W"}; "N/A" is none.
    """
    for at, gpu in enumerate(metric):
        yield from ((gpu.get("gpu", at), path, value) for path, value in leaves(gpu))


def names(values: Any, path: str = "") -> Iterator[str]:
    """Yield the dotted paths, in lower case, of all that is no object, and of the objects that are empty."""
    if isinstance(values, dict) and values and "value" not in values:
        for name, value in values.items():
            yield from names(value, f"{path}.{name}".lower().lstrip("."))
    else:
        yield path


def gpus(text: str | None) -> list[dict]:
    """Return the objects of the GPUs in an answer: a list of them, or an object with one (`gpu_data`), by release."""
    answer = parsed(text)
    if isinstance(answer, dict) and "gpu" not in answer:
        answer = next((value for value in answer.values() if isinstance(value, list)), [answer])
    answer = answer if isinstance(answer, list) else [answer]
    return [gpu for gpu in answer if isinstance(gpu, dict)]


def leaves(values: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield the whole numbers below `values` with their dotted paths in lower case."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from leaves(value, path if name == "value" else f"{path}.{name}".lower().lstrip("."))
    elif isinstance(values, int) and not isinstance(values, bool):
        yield path, values
    elif isinstance(values, str) and values.isdecimal():
        yield path, int(values)


def bad_pages(pages: list[dict]) -> dict[int, int]:
    """Return the pages out of use, or about to be, of each GPU that tells them."""
    counts = {}
    for at, gpu in enumerate(pages):
        kinds = [gpu[name] for name in PAGES if gpu.get(name, "N/A") != "N/A"]
        if kinds:
            counts[gpu.get("gpu", at)] = sum(len(k) if isinstance(k, list) else isinstance(k, dict) for k in kinds)
    return counts

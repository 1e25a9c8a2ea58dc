# SPDX-License-Identifier: Apache-2.0
"""`zaya verify --nodes`: runs `zaya verify` on each node, then all-reduces of pairs of nodes, and compares each node
with thresholds and with the others.

This process starts one program a node, by srun, by the user's launcher, or on this machine. The programs answer by
files in nodes/ in the folder of the record, which all nodes share.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import printable
from zaya_plugin.aegis.slurm import write_failing
from zaya_plugin.bench.results import write
from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.node_list import node_names
from zaya_plugin.ground.option_numbers import MOST_AMOUNT, real_number
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.machines.check_process import run_all
from zaya_plugin.machines.checks import Check
from zaya_plugin.machines.examination import header

SRUN = "srun --overlap --nodes=1 --ntasks=1 --nodelist={node}"
RANK = (sys.executable, "-m", "zaya_plugin.machines.collective_rank", "all_reduce")
PAIR = "pair_gb_per_s"
FIGURES = ("gemm_tflops", "copy_tb_per_s", "all_reduce_gb_per_s", PAIR, "rails", "rail_gb_per_s", "storage_mb_per_s")
FLOORS = {"MI300X": {"gemm_tflops": 600.0, "copy_tb_per_s": 2.0, "all_reduce_gb_per_s": 100.0}}
SLOWER = 0.1  # Megatron's gpu_sniff_test.py calls a GPU an outlier from 10 % on
STORAGE_SLOWER = 0.5  # a shared file system answers nodes at different moments
SECONDS, PAIR_SECONDS = 900.0, 240.0
NODE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # never an option of the launcher
AMD_CODES = (  # of failures, in Primus-SaFE
    (r"^environment: .*(\d+ of \d+ devices|finds no device)", "004"),
    (r"uncorrectable errors in", "008"),
    (r"PCIe link of width", "308"),
    (r"^links: port", "201"),
    (r"^links: rail", "202"),
    (r"^rails is", "210"),
)


@dataclass
class Node:
    """The findings of one node.

    Attributes:
        machine: name of its devices. running: the check that it has not ended. failures: [AMD's code or "", reason].
        figures: name -> device, partner or "" -> value; of an all-reduce with a partner that failed 0.
    """

    node: str
    machine: str = ""
    running: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def fail(self, reason: str) -> None:
        code = next((code for pattern, code in AMD_CODES if re.search(pattern, reason)), "")
        self.failures.append([code, printable(reason)])


def node_of(name: str, record: Mapping[str, Any]) -> Node:
    """Return the findings in a node's record."""
    node = Node(name, str(record["machine"].get("name", "")), record["running"])
    if node.running:
        node.fail(f"it did not end: {node.running}")
    for entry in record["checks"]:
        reasons = [f"{entry['check']}: {reason}" for reason in entry["reason"].split("; ")]
        if entry["state"] == "wrong":
            for reason in reasons:
                node.fail(reason)
        elif entry["state"] in ("slow", "unsupported"):  # the expected rates of some devices are predictions
            node.notes += map(printable, reasons)
        node.notes += map(printable, entry["details"])
        node.figures |= entry["compared"]
    return node


def examine_nodes(options: argparse.Namespace, checks: Sequence[Check], storage: Path, command: str) -> int:
    """Run `zaya verify --nodes` and return its exit code."""
    names, launcher = nodes_and_launcher(options, os.environ)
    output = options.output.absolute()
    folder = output.parent / "nodes"
    words = ["--only", ",".join(check.name for check in checks), "--device", options.device, "--storage", str(storage)]
    records = {name: folder / f"{name}.json" for name in names}
    variables = recipe_variables(options.overrides)
    for key, value in ({"--storage": storage, "--output": folder} | variables).items():
        if launcher and shlex.quote(str(value)) != str(value):
            raise mistake(
                key,
                value,
                problem="cannot be passed to another node",
                allowed="text without blanks and quotes, because ssh and its like give it to a shell",
            )
    program = [sys.executable, "-m", "zaya_plugin.cli", "verify", *words, "--output"]
    commands = [on(launcher, name) + [*program, str(records[name])] for name in names]
    if options.dry_run:
        print("\n".join(map(shlex.join, commands)))
        for number, pairs in enumerate(rounds(names), 1):
            print(f"pairs, round {number}: " + ", ".join(f"{one} with {other}" for one, other in pairs), *variables)
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for path in records.values():
        path.unlink(missing_ok=True)
    codes = run_all(commands, [folder / f"{name}.log" for name in names], options.seconds or SECONDS)
    nodes = {name: read_node(name, records[name], code) for name, code in zip(names, codes, strict=True)}
    complete = {name: node for name, node in nodes.items() if node.figures and not node.running}
    run_pairs(complete, launcher, folder, options.device, variables)
    judge([*nodes.values()], dict(options.min), SLOWER if options.slower is None else options.slower)
    failing = [name for name, node in nodes.items() if node.failures]
    write_whole(output.parent / "passing_nodes.txt", "".join(f"{name}\n" for name in names if name not in failing))
    write_failing(output.parent, failing)
    write(output, header(command) | {"nodes": [asdict(node) for node in nodes.values()]})
    print(f"{table([*nodes.values()])}\n{len(names) - len(failing)} of {len(names)} nodes pass; written: {output}")
    return int(bool(failing))


def read_node(name: str, path: Path, code: int | None) -> Node:
    """Return the findings in the record of a node, or the reason for its absence."""
    try:
        return node_of(name, json.loads(path.read_text()))
    except (OSError, ValueError, TypeError, KeyError):
        node = Node(name)
        node.fail("no report" + (" in time" if code is None else f", exit code {code}") + f"; see nodes/{name}.log")
        return node


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs in which every node gets two partners where there are three nodes or more: a node that is
    slow with one partner alone may not be the cause.
    """
    if len(nodes) < 3:
        return [[(nodes[0], nodes[1])]] if len(nodes) == 2 else []
    ring = [*itertools.pairwise([*nodes, nodes[0]])]
    even = len(ring) - len(ring) % 2  # the last pair of an odd ring has a round of its own
    return [ring[:even:2], ring[1:even:2], *([ring[even:]] if len(ring) % 2 else [])]


def recipe_variables(overrides: Sequence[str]) -> dict[str, str]:
    """Return the `cluster.environment` of the recipe of these words, as its ranks have it; {} without words."""
    from zaya_plugin.config.compose import compose

    return compose(["data.path=none", *overrides]).cluster.environment if overrides else {}


def run_pairs(
    nodes: Mapping[str, Node], launcher: Sequence[str], folder: Path, device: str, variables: Mapping[str, str]
) -> None:
    """Run an all-reduce over the devices of two nodes, for each pair; the figure of one that fails is 0. variables: of
    the ranks; by the program env, since ssh passes none.
    """
    program = ["env", *(f"{name}={value}" for name, value in variables.items()), *RANK]
    for number, pairs in enumerate(rounds(sorted(nodes))):
        commands, logs, owners = [], [], []
        for pair in pairs:
            meeting = folder / f"pair{number}.{pair[0]}.{pair[1]}"
            shutil.rmtree(meeting, ignore_errors=True)  # of an earlier start
            meeting.mkdir()
            kind = "cpu" if device == "cpu" or nodes[pair[0]].machine.startswith("CPU") else "cuda"
            devices = len(nodes[pair[0]].figures.get("gemm_tflops", ())) or 1
            for rank in range(2 * devices):
                name = pair[rank // devices]
                words = [*program, kind, str(rank), str(2 * devices), str(meeting), str(rank % devices)]
                commands.append(on(launcher, name) + words)
                logs.append(folder / f"{name}.log")
                owners.append((pair, meeting / "result.json"))
        codes = run_all(commands, logs, PAIR_SECONDS)
        for (one, other), result in dict.fromkeys(owners):
            rate = 0.0
            if all(code == 0 for code, owner in zip(codes, owners, strict=True) if owner[1] == result):
                with contextlib.suppress(OSError, ValueError):
                    sizes = json.loads(result.read_text())["sizes"]
                    rate = sizes[-1]["gb_per_s"] if all(row["right"] for row in sizes) else 0.0
            for node, partner in ((one, other), (other, one)):
                nodes[node].figures.setdefault(PAIR, {})[partner] = rate


def on(launcher: Sequence[str], node: str) -> list[str]:
    """Return the words that start a program on `node`."""
    return [word.replace("{node}", node) for word in launcher]


def nodes_and_launcher(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of the nodes and the words of the launcher, none for this machine alone."""
    launcher = options.launcher or (SRUN if "SLURM_JOB_NODELIST" in environ else "")
    try:
        words = shlex.split(launcher)
    except ValueError as error:
        raise mistake("--launcher", launcher, problem=f"cannot be read ({error})", fix="ssh {node}") from None
    own = environ.get("SLURM_JOB_NODELIST", socket.gethostname())
    nodes = own if options.nodes is True else options.nodes  # True: --nodes without names
    try:
        names = sorted(set(node_names(nodes)))
    except ValueError as error:
        raise mistake("--nodes", nodes, problem=f"cannot be read ({error})", allowed="n[1-3,08],m1") from None
    for name in names:
        if NODE_NAME.fullmatch(name) is None:
            raise mistake("--nodes", name, problem="not a valid node name", allowed="letters, digits, - _ and .")
    if len(names) > 1 and not words:
        raise mistake(
            "--launcher",
            problem="is required for several nodes outside of SLURM",
            allowed="words with {node}",
            fix="--launcher 'ssh {node}'",
        )
    if options.launcher is not None and ("{node}" not in launcher or shutil.which(words[0]) is None):
        raise mistake(
            "--launcher",
            launcher,
            problem=f"no such program: {words[0]}" if "{node}" in launcher else "must name {node}",
            allowed="a program of this machine and {node}",
            fix="'ssh {node}'",
        )
    return names, words


def threshold(word: str) -> tuple[str, float]:
    """Return the figure and the value of FIGURE=VALUE, as a type for argparse."""
    name, _, value = word.partition("=")
    if name not in FIGURES:
        raise argparse.ArgumentTypeError(f"{name!r} is not a figure: {', '.join(FIGURES)}")
    return name, real_number(0, MOST_AMOUNT)(value)


def judge(nodes: Sequence[Node], least: Mapping[str, float], slower: float) -> None:
    """Add the failures that follow from thresholds and from the other nodes."""
    names = sorted((set().union(*(node.figures for node in nodes)) | {*least}) - {PAIR})
    rates = [rate for node in nodes for rate in node.figures.get(PAIR, {}).values() if rate]
    limit = max((1 - slower) * statistics.median(rates), least.get(PAIR, 0.0)) if rates else 0.0
    for node in nodes:
        floors = next((floor for name, floor in FLOORS.items() if name in node.machine), {}) | least
        for name in names:
            peers = [value for other in nodes if other is not node for value in other.figures.get(name, {}).values()]
            middle = statistics.median(peers) if peers else 0.0
            values = node.figures.get(name, {})
            share = max(STORAGE_SLOWER, slower) if name == "storage_mb_per_s" else slower
            if not values and node.figures:
                node.fail(f"{name} was not measured")
            for device, value in sorted(values.items()):
                figure = f"{name} of {device}" if device else name
                if value < floors.get(name, 0.0):
                    node.fail(f"{figure} is {value:.4g}, the threshold {floors[name]:.4g}")
                elif value < middle if name == "rails" else value < (1 - share) * middle:
                    below = f"{1 - value / middle:.0%} below the others' median {middle:.4g}"
                    node.fail(f"{figure} is {value:.4g}, {below}")
        pairs = node.figures.get(PAIR, {})
        if pairs and all(not rate or rate < limit for rate in pairs.values()):
            text = ", ".join(f"{name} {f'{rate:.3g}' if rate else 'failed'}" for name, rate in pairs.items())
            node.fail(f"the all-reduce is slow or fails with each partner (GB/s: {text})")


def table(nodes: Sequence[Node]) -> str:
    """Return a line a node with the worst value of each figure, and the reasons below."""
    names = sorted({name for node in nodes for name in node.figures})
    rows = [("node", "", *names)]
    for node in nodes:
        cells = [f"{min(values.values()):.4g}" if (values := node.figures.get(name)) else "-" for name in names]
        rows.append((node.node, "fail" if node.failures else "pass", *cells))
    lines = aligned(rows).splitlines()
    for node in nodes:
        lines += [f"{node.node}: {reason}" + f" [AMD code {code}]" * bool(code) for code, reason in node.failures]
        lines += [f"{node.node}: note: {text}" for text in node.notes]
    return "\n".join(lines)

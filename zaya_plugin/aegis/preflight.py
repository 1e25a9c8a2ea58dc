# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis preflight`: examines each node before a start, and compares it with thresholds and with its peers.

This process starts one program a node (by srun, by the user's launcher, or here), which runs `zaya verify` and looks at
the node's links, counters and storage; then pairs of nodes run an all-reduce. The programs answer by files in the
folder of --output, which all nodes share.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from zaya_plugin.aegis.preflight_node import Node
from zaya_plugin.aegis.preflight_verdict import SLOWER, judge, table
from zaya_plugin.aegis.slurm import write_failing
from zaya_plugin.config.run_directory import check_creatable
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.node_list import node_names
from zaya_plugin.ground.option_numbers import DAY, MOST_AMOUNT, real_number
from zaya_plugin.ground.parent_death import die_with_parent
from zaya_plugin.ground.whole_file import write_whole

WHAT = """\
Runs `zaya verify` (environment, matrix products, memory bandwidth, an all-reduce) on every node, reads the state of its
network and PCIe links and its error counters, and writes to the storage; then pairs of nodes run an all-reduce. A node
fails if a result is wrong, a link is down, a figure is below --min, or a figure is more than --slower below the median
of the other nodes. Writes passing_nodes.txt and failing_nodes.txt (one name a line) and preflight.json."""
EXAMPLES = """\
examples:
  zaya aegis preflight --output runs/mine/preflight                in a SLURM job: all of its nodes, by srun; else here
  zaya aegis preflight --output /shared/p --nodes n1,n2,n3 --launcher 'ssh {node}'              without SLURM
  zaya aegis preflight --output /shared/p --min gemm_tflops=600 --min copy_tb_per_s=3 --dry-run what would be started
  zaya aegis run --exclude "$(paste -sd, runs/mine/preflight/failing_nodes.txt)" -- zaya train ...

Figures for --min: gemm_tflops and copy_tb_per_s (each device), all_reduce_gb_per_s (within the node), pair_gb_per_s
(between two nodes), rails, rail_gb_per_s, storage_mb_per_s. Defaults on an MI300X, from AMD's Primus node_smoke:
gemm_tflops=600, copy_tb_per_s=2, all_reduce_gb_per_s=100.

Exit codes: 0 all nodes pass, 1 at least one fails, 2 a mistake on the command line."""
SRUN = "srun --overlap --nodes=1 --ntasks=1 --nodelist={node}"
RANK = (sys.executable, "-m", "zaya_plugin.verify.collective_rank", "all_reduce")
FIGURES = (
    *("gemm_tflops", "copy_tb_per_s", "all_reduce_gb_per_s", "pair_gb_per_s"),
    *("rails", "rail_gb_per_s", "storage_mb_per_s"),
)
SECONDS, PAIR_SECONDS = 900.0, 240.0
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of a node; never an option of the launcher


def start_all(commands: Mapping[str, list[list[str]]], logs: Path, seconds: float) -> dict[str, list[int | None]]:
    """Run the commands of each node at the same time; return their exit codes, None for those that were killed."""
    started: dict[str, list[subprocess.Popen]] = {node: [] for node in commands}
    deadline = time.monotonic() + seconds
    try:
        for node, words in commands.items():
            with open(logs / f"{node}.log", "ab") as log:
                pipes = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for command in words:
                    process = subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=die_with_parent)
                    started[node].append(process)
        for process in (process for of_node in started.values() for process in of_node):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return {node: [process.poll() for process in of_node] for node, of_node in started.items()}
    finally:
        for process in (process for of_node in started.values() for process in of_node):
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Return rounds of pairs in which every node gets two partners where there are three nodes or more: a node that is
    slow with one partner alone may not be the cause.
    """
    names = list(nodes)
    if len(names) < 3:
        return [[(names[0], names[1])]] if len(names) == 2 else []
    ring = list(zip(names, names[1:] + names[:1], strict=True))
    even = [pair for number, pair in enumerate(ring) if number % 2 == 0 and number < len(names) - len(names) % 2]
    odd = [pair for number, pair in enumerate(ring) if number % 2 == 1]
    return [even, odd, *([[ring[-1]]] if len(names) % 2 else [])]


def run_pairs(nodes: Mapping[str, Node], launcher: Sequence[str], folder: Path, device: str) -> None:
    """Run an all-reduce over the devices of two nodes, for each pair."""
    for number, pairs in enumerate(rounds(sorted(nodes))):
        commands, places = {}, {}
        for pair in pairs:
            place = folder / f"pair{number}.{pair[0]}.{pair[1]}"
            place.mkdir(exist_ok=True)
            for file in place.iterdir():  # of an earlier start
                file.unlink()
            kind = "cpu" if device == "cpu" or nodes[pair[0]].name.startswith("CPU") else "cuda"
            devices = len(nodes[pair[0]].figures.get("gemm_tflops", ())) or 1
            places[pair] = place / "result.json"
            for side, name in enumerate(pair):
                words = [
                    [*RANK, kind, str(side * devices + local), str(2 * devices), str(place), str(local)]
                    for local in range(devices)
                ]
                commands[name] = [on(launcher, name) + row for row in words]
        codes = start_all(commands, folder, PAIR_SECONDS)
        for (one, other), result in places.items():
            rate = None
            if not any(codes[one] + codes[other]) and None not in codes[one] + codes[other]:
                with contextlib.suppress(OSError, ValueError):
                    sizes = json.loads(result.read_text())["sizes"]
                    rate = sizes[-1]["gb_per_s"] if all(row["right"] for row in sizes) else None
            nodes[one].pairs[other] = nodes[other].pairs[one] = rate


def on(launcher: Sequence[str], node: str) -> list[str]:
    """Return the words that start a program on `node`."""
    return [word.replace("{node}", node) for word in launcher]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(
        "zaya aegis preflight",
        description=WHAT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = out.add_argument
    add("--output", type=Path, required=True, metavar="DIR", help="a folder that all nodes share")
    add("--nodes", metavar="A,B", help="default: those of the SLURM job, else this machine")
    add("--launcher", metavar="COMMAND", help=f"starts a program on {{node}} (default in a SLURM job: {SRUN})")
    add("--storage", type=Path, metavar="DIR", help="a folder where data or checkpoints are (default: --output)")
    add("--device", choices=("auto", "cpu"), default="auto", help="as in `zaya verify`")
    add("--min", action="append", default=[], metavar="FIGURE=VALUE", help="a threshold, such as gemm_tflops=600")
    add(
        "--slower",
        type=real_number(0, 100),
        default=SLOWER,
        metavar="SHARE",
        help=f"below the peers' median (default: {SLOWER})",
    )
    add(
        "--seconds",
        type=real_number(1, DAY),
        default=SECONDS,
        metavar="S",
        help=f"for one node's checks (default: {SECONDS:.0f})",
    )
    add("--dry-run", action="store_true", help="print what would be started, and stop")
    return out


def main(argv: Sequence[str]) -> int:
    """Run `zaya aegis preflight` with the words `argv`."""
    options = parser().parse_args(argv)
    names, launcher = _nodes(options, os.environ)
    least = _thresholds(options.min)
    if not 0 < options.slower < 1:
        raise mistake("--slower", options.slower, problem="is no share", allowed="between 0 and 1", fix="--slower 0.1")
    output = options.output.absolute()
    folder, storage = output / "nodes", (options.storage or output).absolute()
    check_creatable(output, "--output")
    words = [str(folder), options.device, str(storage)]
    if launcher and any(shlex.quote(word) != word for word in words):
        allowed = "folders without blanks and quotes, because ssh and its like give them to a shell"
        raise mistake("--output", options.output, problem="cannot be passed to another node", allowed=allowed)
    program = [sys.executable, "-m", "zaya_plugin.aegis.preflight_node"]
    commands = {name: [on(launcher, name) + [*program, name, *words]] for name in names}
    if options.dry_run:
        print("\n".join(shlex.join(command[0]) for command in commands.values()))
        for number, pairs in enumerate(rounds(sorted(names)), 1):
            print(f"pairs, round {number}: " + ", ".join(f"{one} with {other}" for one, other in pairs))
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.json").unlink(missing_ok=True)
    codes = start_all(commands, folder, options.seconds)
    nodes = {name: _report(folder, name, codes[name][0]) for name in names}
    answered = {name: node for name, node in nodes.items() if node.figures and not node.doing}
    run_pairs(answered, launcher, folder, options.device)
    ordered = [nodes[name] for name in sorted(nodes)]
    judge(ordered, least, options.slower)
    failing = [node.node for node in ordered if node.failures]
    write_whole(output / "passing_nodes.txt", "".join(f"{node.node}\n" for node in ordered if not node.failures))
    write_failing(output, failing)
    write_whole(output / "preflight.json", json.dumps([asdict(node) for node in ordered], indent=1) + "\n")
    print(f"{table(ordered)}\n{len(ordered) - len(failing)} of {len(ordered)} nodes pass; written to {output}")
    return int(bool(failing))


def _report(folder: Path, name: str, code: int | None) -> Node:
    """Return what a node has written, or why there is nothing."""
    try:
        return Node(**json.loads((folder / f"{name}.json").read_text()))
    except (OSError, ValueError, TypeError):
        node = Node(name)
        node.fail("no report" + (" in time" if code is None else f", exit code {code}") + f"; see nodes/{name}.log")
        return node


def _nodes(options: argparse.Namespace, environ: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the names of the nodes and the words of the launcher, none for this machine alone."""
    listed = options.nodes if options.nodes is not None else environ.get("SLURM_JOB_NODELIST", socket.gethostname())
    launcher = options.launcher or (SRUN if "SLURM_JOB_NODELIST" in environ else "")
    try:
        names, words = sorted(set(node_names(listed))), shlex.split(launcher)
    except ValueError as error:
        key, value = ("--launcher", launcher) if "quotation" in str(error) else ("--nodes", listed)
        raise mistake(key, value, problem=f"is not clear ({error})", allowed="n[1-3,08],m1") from None
    for name in names:
        if NAME.fullmatch(name) is None:
            raise mistake("--nodes", name, problem="is no name", allowed="letters, digits, - _ and .")
    if len(names) > 1 and not words:
        problem = "is needed: several nodes, and no SLURM job"
        raise mistake("--launcher", problem=problem, allowed="words with {node}", fix="--launcher 'ssh {node}'")
    if options.launcher is not None and ("{node}" not in launcher or shutil.which(words[0]) is None):
        problem = f"there is no program {words[0]}" if "{node}" in launcher else "does not name {node}"
        raise mistake("--launcher", launcher, problem=problem, allowed="a program here and {node}", fix="'ssh {node}'")
    return names, words


def _thresholds(words: Sequence[str]) -> dict[str, float]:
    thresholds = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            thresholds[name] = real_number(0, MOST_AMOUNT)(value)
        except argparse.ArgumentTypeError as error:
            problem = f"is no threshold: {error}"
            raise mistake("--min", word, problem=problem, fix="--min gemm_tflops=600") from None
        if name not in FIGURES:
            raise mistake("--min", word, problem="there is no such figure", allowed=", ".join(FIGURES))
    return thresholds

# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis preflight`: examines each node before a start, and compares it with thresholds and with its peers.

This process starts one program a node (by srun, by the user's launcher, or here), which runs `zaya verify` and looks at
the node's links, counters and storage; then pairs of nodes run an all-reduce. The programs answer by files in the
folder of --output, which all nodes share.

    python -m zaya_plugin.aegis.preflight NODE OUTPUT DEVICE STORAGE       measures, on the node
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
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.evidence import printable
from zaya_plugin.aegis.slurm import write_failing
from zaya_plugin.config.option_numbers import DAY, MOST_AMOUNT, MOST_RANKS, real_number
from zaya_plugin.config.run_directory import check_can_be_made
from zaya_plugin.config.whole_file import write_whole
from zaya_plugin.errors import mistake
from zaya_plugin.parent_death import die_with_parent

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
VERIFY = (sys.executable, "-m", "zaya_plugin.cli", "verify", "--only", "environment,rates,all_reduce")
RANK = (sys.executable, "-m", "zaya_plugin.verify.collective_rank", "all_reduce")
FLOORS = {"MI300X": {"gemm_tflops": 600.0, "copy_tb_per_s": 2.0, "all_reduce_gb_per_s": 100.0}}
FIGURES = (
    *("gemm_tflops", "copy_tb_per_s", "all_reduce_gb_per_s", "pair_gb_per_s"),
    *("rails", "rail_gb_per_s", "storage_mb_per_s"),
)
SLOWER = 0.1  # Megatron's gpu_sniff_test.py calls a GPU an outlier from 10 % on
STORAGE_SLOWER = 0.5  # a shared file system answers nodes at different moments
STORAGE_MIB, SECONDS, PAIR_SECONDS = 64, 900.0, 240.0
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")  # of a node; never an option of the launcher
# AMD's codes in Primus-SaFE
CODES = {"devices": "004", "ras": "008", "pcie": "308", "port": "201", "ethernet": "202", "rails": "210"}


@dataclass
class Node:
    """What one node has found. doing: what it had not ended. failures: [AMD's code or "", reason].

    name: of its devices. figures: name -> device or "" -> value. pairs: partner -> GB/s, None: it failed.
    """

    node: str
    doing: str = ""
    name: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, float | None] = field(default_factory=dict)

    def fail(self, reason: str, code: str = "") -> None:
        self.failures.append([CODES.get(code, ""), printable(reason)])

    def keep(self, name: str, value: Any, device: str = "") -> None:
        if isinstance(value, (int, float)):
            self.figures.setdefault(name, {})[device] = float(value)

    def write(self, folder: Path, doing: str = "") -> None:
        """Write the report; it stays if what comes next hangs."""
        self.doing = doing
        write_whole(folder / f"{self.node}.json", json.dumps(asdict(self)))


# What a node measures


def measure(node: Node, folder: Path, device: str, storage: Path, root: Path = Path("/")) -> None:
    """Examine this node, and write its report after each part."""
    node.write(folder, "zaya verify")
    out = folder / f"{node.node}.verify.json"
    out.unlink(missing_ok=True)
    code = subprocess.run([*VERIFY, "--device", device, "--out", str(out)], preexec_fn=die_with_parent).returncode
    try:
        take_verify(node, json.loads(out.read_text()))
    except (OSError, ValueError, KeyError) as error:
        node.fail(f"zaya verify left no record (exit code {code}, {type(error).__name__}); see {node.node}.log")
    node.write(folder, "links")
    rails = look_at_links(node, root)
    node.write(folder, f"writing {STORAGE_MIB} MiB to {storage}")
    look_at_storage(node, storage, rails, root)
    node.write(folder)


def take_verify(node: Node, record: Mapping[str, Any]) -> None:
    """Take over a verify.json."""
    node.name = str(record["machine"].get("name", ""))
    if not record["complete"]:
        node.fail("zaya verify did not come to its end")
    for line in record["lines"]:
        name, reason, found = line["line"], line["reason"], line["figures"]
        if line["state"] == "wrong":
            missing = name == "environment" and re.search(r"\d+ of \d+ devices|finds no device", reason)
            node.fail(f"{name}: {reason}", "devices" if missing else "")
        elif line["state"] == "slow":  # the expected rates of some devices are predictions
            node.notes.append(printable(f"{name}: {reason}"))
        if name == "rates":
            for device, rates in found.items():
                for figure in ("gemm_tflops", "copy_tb_per_s"):
                    node.keep(figure, rates.get(figure), device)
        elif name == "all_reduce" and found.get("sizes"):
            node.keep("all_reduce_gb_per_s", found["sizes"][-1]["gb_per_s"])


def read(path: Path) -> str:
    """Return a file of /sys or /proc, "" where it is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def look_at_links(node: Node, root: Path) -> set[str]:
    """Read the state of rails, PCIe links and error counters; return the interfaces of the training network."""
    rails = set()
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    node.keep("rails", len(ports))
    for port in ports:
        name, state, rate = f"{port.parts[-3]}/{port.name}", read(port / "state"), read(port / "rate")
        interface = read(port / "gid_attrs/ndevs/0")
        node.links[name] = f"{state} {rate} {interface}".strip()
        if "ACTIVE" not in state:
            node.fail(f"port {name} is {state or 'in no known state'}", "port")
        elif gbit := re.match(r"[\d.]+", rate):
            node.keep("rail_gb_per_s", float(gbit[0]) / 8, name)
        if interface:
            rails.add(interface)
            carrier = read(root / "sys/class/net" / interface / "operstate")
            node.links[interface] = carrier
            if carrier != "up":
                node.fail(f"rail {interface} is {carrier or 'absent'}", "ethernet")
    for device in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        width, most = read(device / "current_link_width"), read(device / "max_link_width")
        if width.isdecimal() and most.isdecimal() and 0 < int(width) < int(most):
            node.fail(f"{device.parent.name}: PCIe link of width {width} of {most}", "pcie")
        for counter in sorted((device / "ras").glob("*_err_count")):
            if (found := re.search(r"ue: *(\d+)", read(counter))) and int(found[1]):
                block = counter.name.removesuffix("_err_count")
                node.fail(f"{device.parent.name}: {found[1]} uncorrectable errors in {block}", "ras")
    return rails


def look_at_storage(node: Node, folder: Path, rails: set[str], root: Path) -> None:
    """Measure a synced write, and say whether the storage's traffic goes over a rail of the training network."""
    path = folder / f".preflight.{node.node}"
    try:
        block, begun = os.urandom(2**20), time.monotonic()
        with open(path, "wb") as file:
            for _ in range(STORAGE_MIB):
                file.write(block)
            os.fsync(file.fileno())
        node.keep("storage_mb_per_s", STORAGE_MIB * 2**20 / 1e6 / (time.monotonic() - begun))
    except OSError as error:
        node.fail(f"{folder} cannot be written: {error}")
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    kind, source, options = mount_of(folder, root)
    address = re.search(r"\baddr=([\d.]+)", options) or re.match(r"([\d.]+)[@:]", source)
    if "@o2ib" in source:
        node.notes.append(f"storage {folder}: {kind} over InfiniBand (o2ib), as the collectives")
    elif address is not None and (interface := interface_of(address[1], root)) is not None:
        shared = ", a rail of the training network" if interface in rails else ""
        node.notes.append(f"storage {folder}: {kind} of {address[1]} over {interface}{shared}")


def mount_of(path: Path, root: Path) -> tuple[str, str, str]:
    """Return type, source and options of the mount that holds `path`."""
    found = ("", "", "")
    best = -1
    for line in read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point, after = left.split()[4].replace("\\040", " "), right.split()
        if len(after) == 3 and path.is_relative_to(point) and len(point) >= best:
            best, found = len(point), (after[0], after[1], after[2])
    return found


def interface_of(address: str, root: Path) -> str | None:
    """Return the interface of the route to an IPv4 address."""
    try:
        wanted = int.from_bytes(socket.inet_aton(address), "little")
    except OSError:
        return None
    routes = [line.split() for line in read(root / "proc/net/route").splitlines()[1:]]
    fitting = [(int(words[7], 16), words[0]) for words in routes if wanted & int(words[7], 16) == int(words[1], 16)]
    return max(fitting, key=lambda each: each[0].bit_count(), default=(0, None))[1]


# All nodes


def start_all(commands: Mapping[str, list[list[str]]], logs: Path, seconds: float) -> dict[str, list[int | None]]:
    """Run the commands of each node at the same time; return their exit codes, None for those that were killed."""
    started: dict[str, list[subprocess.Popen]] = {node: [] for node in commands}
    deadline = time.monotonic() + seconds
    try:
        for node, words in commands.items():
            with open(logs / f"{node}.log", "ab") as log:
                pipes = dict(stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                for each in words:
                    process = subprocess.Popen(each, **pipes, start_new_session=True, preexec_fn=die_with_parent)
                    started[node].append(process)
        for process in (process for each in started.values() for process in each):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        return {node: [process.poll() for process in each] for node, each in started.items()}
    finally:
        for process in (process for each in started.values() for process in each):
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
            here = len(nodes[pair[0]].figures.get("gemm_tflops", ())) or 1
            places[pair] = place / "result.json"
            for side, name in enumerate(pair):
                words = [
                    [*RANK, kind, str(side * here + local), str(2 * here), str(place), str(local)]
                    for local in range(here)
                ]
                commands[name] = [on(launcher, name) + each for each in words]
        codes = start_all(commands, folder, PAIR_SECONDS)
        for (one, other), result in places.items():
            rate = None
            if not any(codes[one] + codes[other]) and None not in codes[one] + codes[other]:
                with contextlib.suppress(OSError, ValueError):
                    sizes = json.loads(result.read_text())["sizes"]
                    rate = sizes[-1]["gb_per_s"] if all(each["right"] for each in sizes) else None
            nodes[one].pairs[other] = nodes[other].pairs[one] = rate


def judge(nodes: Sequence[Node], least: Mapping[str, float], slower: float) -> None:
    """Add the failures that follow from thresholds and from the other nodes."""
    for node in nodes:
        if node.doing:
            node.fail(f"it did not end: {node.doing}")
        floors = next((each for name, each in FLOORS.items() if name in node.name), {}) | least
        for name in sorted(set().union(*(each.figures for each in nodes)) | (set(least) - {"pair_gb_per_s"})):
            peers = [value for each in nodes if each is not node for value in each.figures.get(name, {}).values()]
            middle = statistics.median(peers) if peers else 0.0
            own, share = node.figures.get(name, {}), STORAGE_SLOWER if name == "storage_mb_per_s" else slower
            if not own and node.figures:
                node.fail(f"{name} was not measured")
            for device, value in sorted(own.items()):
                where = f"{name} of {device}" if device else name
                if value < floors.get(name, 0.0):
                    node.fail(f"{where} is {value:.4g}, the threshold {floors[name]:.4g}")
                elif value < middle if name == "rails" else value < (1 - share) * middle:
                    text = f"{where} is {value:.4g}, {1 - value / middle:.0%} below the others' median {middle:.4g}"
                    node.fail(text, name)
    rates = [rate for node in nodes for rate in node.pairs.values() if rate is not None]
    limit = max((1 - slower) * statistics.median(rates), least.get("pair_gb_per_s", 0.0)) if rates else 0.0

    def bad(node: Node) -> bool:
        return bool(node.pairs) and all(rate is None or rate < limit for rate in node.pairs.values())

    for node in [each for each in nodes if bad(each)]:
        told = ", ".join(f"{name} {'failed' if rate is None else f'{rate:.3g}'}" for name, rate in node.pairs.items())
        node.fail(f"the all-reduce is slow or fails with each partner (GB/s: {told})")


def table(nodes: Sequence[Node]) -> str:
    """Return a line a node with the worst value of each figure, and the reasons below."""
    names = sorted({name for node in nodes for name in node.figures})
    rows = [("node", "", *names, "pair_gb_per_s")]
    for node in nodes:
        cells = [f"{min(values.values()):.4g}" if (values := node.figures.get(name)) else "-" for name in names]
        known = [rate for rate in node.pairs.values() if rate is not None]
        rows.append((node.node, "fail" if node.failures else "pass", *cells, f"{min(known):.3g}" if known else "-"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for node in nodes:
        lines += [f"{node.node}: {reason}" + f" [AMD code {code}]" * bool(code) for code, reason in node.failures]
        lines += [f"{node.node}: note: {text}" for text in node.notes]
    return "\n".join(lines)


# The command


_ONE_HOST = r"(?:[^,\[\]]|\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\])+"


def expand(hosts: str) -> list[str]:
    """Return the names of a SLURM node list such as n[1-3,08],m1; raises ValueError for other text."""
    if not re.fullmatch(rf"{_ONE_HOST}(,{_ONE_HOST})*", hosts):
        raise ValueError("no node list such as n[1-3,08],m1")
    found = []
    for name in re.findall(_ONE_HOST, hosts):
        if (inner := re.search(r"\[([^\]]*)\]", name)) is None:
            found.append(name)
            continue
        for part in inner[1].split(","):
            low, _, high = part.partition("-")
            if not 0 <= int(high or low) - int(low) < MOST_RANKS:
                raise ValueError(f"{part}: a range of 1 to {MOST_RANKS:,} nodes")
            for number in range(int(low), int(high or low) + 1):
                found += expand(f"{name[: inner.start()]}{number:0{len(low)}d}{name[inner.end() :]}")
    return found


def on(launcher: Sequence[str], node: str) -> list[str]:
    """Return the words that start a program on `node`."""
    return [word.replace("{node}", node) for word in launcher]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "zaya aegis preflight",
        description=WHAT,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
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
    return made


def main(argv: Sequence[str]) -> int:
    """Run `zaya aegis preflight` with the words `argv`."""
    options = parser().parse_args(argv)
    names, launcher = _nodes(options, os.environ)
    least = _thresholds(options.min)
    if not 0 < options.slower < 1:
        raise mistake("--slower", options.slower, problem="is no share", allowed="between 0 and 1", fix="--slower 0.1")
    output = options.output.absolute()
    folder, storage = output / "nodes", (options.storage or output).absolute()
    check_can_be_made(output, "--output")
    words = [str(folder), options.device, str(storage)]
    if launcher and any(shlex.quote(word) != word for word in words):
        allowed = "folders without blanks and quotes, because ssh and its like give them to a shell"
        raise mistake("--output", options.output, problem="cannot be passed to another node", allowed=allowed)
    program = [sys.executable, "-m", "zaya_plugin.aegis.preflight"]
    commands = {name: [on(launcher, name) + [*program, name, *words]] for name in names}
    if options.dry_run:
        print("\n".join(shlex.join(each[0]) for each in commands.values()))
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
    given = options.nodes if options.nodes is not None else environ.get("SLURM_JOB_NODELIST", socket.gethostname())
    launcher = options.launcher or (SRUN if "SLURM_JOB_NODELIST" in environ else "")
    try:
        names, words = sorted(set(expand(given))), shlex.split(launcher)
    except ValueError as error:
        key, value = ("--launcher", launcher) if "quotation" in str(error) else ("--nodes", given)
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


def _thresholds(given: Sequence[str]) -> dict[str, float]:
    found = {}
    for each in given:
        name, _, value = each.partition("=")
        try:
            found[name] = real_number(0, MOST_AMOUNT)(value)
        except argparse.ArgumentTypeError as error:
            problem = f"is no threshold: {error}"
            raise mistake("--min", each, problem=problem, fix="--min gemm_tflops=600") from None
        if name not in FIGURES:
            raise mistake("--min", each, problem="there is no such figure", allowed=", ".join(FIGURES))
    return found


if __name__ == "__main__":
    measure(Node(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

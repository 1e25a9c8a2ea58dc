# SPDX-License-Identifier: Apache-2.0
"""Training in the lab: a tiny data set, a tiny recipe of two ranks, a supervised run, and the comparison of its losses
with those of the undisturbed run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.aegis.journals import lines
from tests.lab.hooks import SITE, VARIABLE
from tests.lab.stand import LINK, Stand

PROJECT = str(Path(__file__).resolve().parents[2])
STEPS, SAVE = 40, 8
TRAINING_NODES = 2  # all other nodes of a stand are spares
PATIENCE = 600.0  # seconds to wait for a step; the times that are judged are in the journal
PORT = 29400
RECIPE = (
    "experiment=cpu_demo",
    "nproc=1",  # a rank a node
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.kv_channels=8",
    "model.moe_ffn_hidden_size=48",
    "model.router_hidden_size=16",
    "stage.seq_length=128",
    "stage.micro_batch_size=2",
    "stage.global_batch_size=16",
    "stage.eval_interval=100000",
    "stage.eval_iters=1",
    "optim.lr_warmup_iters=2",
    "checkpoint.keep_last=0",
    "logger.wandb=false",
    "logger.tensorboard=false",
    "cluster.distributed_timeout_minutes=2",
    "data.num_workers=1",  # a process of its own, as in the recipes for GPUs
)
COMPARED_KEYS = ("loss", "grad_norm", "lr", "consumed_samples")


def make_data(folder: Path) -> Path:
    """Make the data set, 600 documents of random words, and return its folder."""
    if (folder / "data" / "manifest.json").exists():
        return folder / "data"
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(300)]
    texts = [" ".join(rng.choices(words, k=rng.randint(30, 60))) for _ in range(600)]
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = ["--train-bpe", "512", "--valid-fraction", "0.1", "--workers", "1", "--quiet"]
    subprocess.run(zaya("data", "prepare", "--input", corpus, "--output", folder / "data", *options), check=True)
    return folder / "data"


def zaya(*words: object) -> list[str]:
    """Return the command `zaya` of this Python."""
    return [sys.executable, "-m", "zaya_plugin.cli", *map(str, words)]


def python_path(*folders: str) -> str:
    """Return PYTHONPATH with these folders and the project before those of this process."""
    return os.pathsep.join([*folders, PROJECT, *filter(None, [os.environ.get("PYTHONPATH")])])


class Run:
    """One supervised run on the nodes of a stand.

    Args:
        stand: its nodes.
        folder: of this run.
        data: the data set.
        words: further words of the recipe.
        kernel_log: the kernel's messages; None: a file a node, which `kernel` feeds.
        hook: a fault inside a rank (hooks.py), without its `marker`.
    """

    def __init__(
        self,
        stand: Stand,
        folder: Path,
        data: Path,
        words: Sequence[str] = (),
        kernel_log: Path | None = None,
        hook: Mapping[str, Any] | None = None,
        steps: int = STEPS,
        save: int = SAVE,
    ):
        self.stand, self.folder, self.run_dir = stand, folder, folder / "run"
        self.kernel_log = kernel_log
        sizes = (f"stage.train_iters={steps}", f"checkpoint.save_interval={save}")
        self.command = ["zaya", "train", *RECIPE, *sizes, f"data.path={data}", f"run_dir={self.run_dir}", *words]
        self.agents: dict[str, subprocess.Popen] = {}
        self.environments: dict[str, dict[str, str]] = {}
        self.start_time = 0.0
        self.marker = folder / "fault"
        self.hook = {**hook, "marker": str(self.marker)} if hook is not None else None

    def start(self, environments: Mapping[str, Mapping[str, str]] | None = None) -> None:
        """Start the agents. environments: of a node, in addition to the common one."""
        site = self.folder / "site"
        site.mkdir(parents=True)
        (site / "sitecustomize.py").write_text(SITE)
        paths = {"PYTHONPATH": python_path(str(site)), "OMP_NUM_THREADS": "1"}
        common = {**os.environ, **self.stand.environment(), **paths}
        if self.hook is not None:
            common[VARIABLE] = json.dumps(self.hook)
        self.start_time = time.time()
        self.environments = {node: common | dict((environments or {}).get(node, {})) for node in self.stand.names}
        for node in self.stand.names[:TRAINING_NODES]:
            self.start_agent(node)
        # The spares join later, so that the attempt is of the first nodes.
        self.wait(lambda: any(row["kind"] in ("attempt", "end") for row in self.journal()), PATIENCE, "attempt")
        for node in self.stand.names[TRAINING_NODES:]:
            self.start_agent(node)

    def start_agent(self, node: str) -> None:
        """Start the agent of a node, for the first time or again."""
        log = self.kernel_log or self._kernel(node)
        if self.kernel_log is None:
            log.touch()
        with open(self.folder / f"{node}.log", "ab") as out:
            words = [*self.stand.words(node), *zaya("aegis", "run", "--node", node, *self._options(log), "--")]
            self.agents[node] = subprocess.Popen(
                [*words, *self.command],
                env=self.environments[node],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _options(self, kernel_log: Path) -> list[str]:
        spares = len(self.stand.names) - TRAINING_NODES
        first = self.stand.address(self.stand.names[0])
        links = ["--links", LINK] if self.stand.network else []
        words = [
            "--nodes",
            TRAINING_NODES,
            "--spares",
            spares,
            "--decider",
            f"{first}:{PORT}",
            "--kernel-log",
            kernel_log,
        ]
        return [*map(str, words), *links]

    def _kernel(self, node: str) -> Path:
        return self.folder / f"kernel_{node}"

    def kernel(self, node: str, *lines: str) -> None:
        """Append lines to the kernel's messages of a node."""
        with open(self._kernel(node), "a") as file:
            for line in lines:
                file.write(f"[{time.monotonic():12.6f}] {line}\n")

    def journal(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the lines of the journal from a time on."""
        path = self.run_dir / "aegis" / "journal.jsonl"
        return [row for row in lines(path) if row["time"] >= since] if path.exists() else []

    def step(self) -> int:
        """Return the last step in metrics.jsonl."""
        return max(rows(self.run_dir), default=0)

    def checkpoint(self) -> Path | None:
        """Return the newest complete checkpoint."""
        return max((path.parent for path in self.run_dir.glob("checkpoints/iter_*/manifest.json")), default=None)

    def wait(self, condition: Callable[[], Any], seconds: float, event: str) -> Any:
        """Wait until `condition` is true and return its value. Raises TimeoutError, also if the run ends before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = self.agents and all(agent.poll() is not None for agent in self.agents.values())
            if value := condition():
                return value
            if ended:
                raise TimeoutError(f"the run ended before {event}")
            time.sleep(0.05)
        raise TimeoutError(f"no {event} within {seconds:.0f} s")

    def wait_step(self, step: int, seconds: float = PATIENCE) -> None:
        """Wait for a step of the run."""
        self.wait(lambda: self.step() >= step, seconds, f"step {step}")

    def rank_pid(self, node: str) -> int:
        """Return the process of a node's rank."""
        for path in self.stand.temporary.glob(f"zaya_aegis_*_{node}/rank*.json"):
            if path.name.count(".") == 1:
                return int(json.loads(path.read_text())["pid"])
        raise TimeoutError(f"no rank on {node}")

    def loader_pid(self, node: str) -> int:
        """Return the process that reads the data of a node's rank, a fork of it."""
        return self._below(self.rank_pid(node), "zaya_plugin.cli")

    def agent_pid(self, node: str) -> int:
        """Return the process of a node's agent."""
        return self._below(self.agents[node].pid, "zaya_plugin.aegis.agent")

    def decider_pid(self) -> int:
        """Return the process of the decider."""
        return self._below(self.agents[self.stand.names[0]].pid, "zaya_plugin.aegis.decider")

    def _below(self, parent: int, module: str) -> int:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                is_child = int((path / "stat").read_text().rpartition(")")[2].split()[1]) == parent
                if is_child and module.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                    return int(path.name)
            except (OSError, IndexError):
                continue
        raise TimeoutError(f"no process of {module}")

    def kill_node(self, node: str) -> None:
        """Kill everything of a node at once."""
        pids = [self.agents[node].pid, self.agent_pid(node), *self.ranks_of(node)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def ranks_of(self, node: str) -> list[int]:
        """Return the ranks of a node."""
        try:
            return [self.rank_pid(node)]
        except TimeoutError:
            return []

    def finish(self, seconds: float) -> int | None:
        """Wait for the end of the run; return its exit code, None if it did not end in time."""
        first = self.agents[self.stand.names[0]]
        try:
            return first.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            deadline = time.monotonic() + 8
            while any(agent.poll() is None for agent in self.agents.values()) and time.monotonic() < deadline:
                time.sleep(0.05)
            self.stand.kill()
            for agent in self.agents.values():
                agent.wait(10)


def rows(run_dir: Path) -> dict[int, dict[str, Any]]:
    """Return the training steps in metrics.jsonl; of two rows of one step the later one."""
    steps = {}
    try:
        lines = (run_dir / "metrics.jsonl").read_text(errors="replace").splitlines()
    except OSError:
        return {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # being written
            continue
        if "loss" in row:
            steps[row["step"]] = row
    return steps


def seconds_to_first_step(journal: Sequence[Mapping[str, Any]]) -> float:
    """Return the seconds from the first attempt of a journal to its first step."""
    times = {row["kind"]: row["time"] for row in reversed(journal)}
    return times["first_step"] - times["attempt"]


@dataclass(frozen=True)
class Reference:
    """The undisturbed run: its data set, its training steps by number, and the seconds from start to first step."""

    data: Path
    steps: Mapping[int, Mapping[str, Any]]
    start: float

    def difference(self, steps: Mapping[int, Mapping[str, Any]]) -> str | None:
        """Return the first difference of a run's steps from the undisturbed ones, to the bit; None if all agree."""
        if missing := sorted(self.steps.keys() - steps.keys()):
            return f"step {missing[0]} is missing"
        for number, expected in sorted(self.steps.items()):
            for name in COMPARED_KEYS:
                if steps[number].get(name) != expected.get(name):
                    return f"step {number}: {name} is {steps[number].get(name)}, undisturbed {expected.get(name)}"
        return None

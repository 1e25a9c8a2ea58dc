# SPDX-License-Identifier: Apache-2.0
"""The actions of the decision maker on nodes: it waits for them, starts an attempt on them, ends it, leaves nodes out,
and gives the job back to SLURM.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from zaya_plugin.aegis import slurm
from zaya_plugin.aegis.cluster import OUT
from zaya_plugin.aegis.decide import Decision
from zaya_plugin.aegis.evidence import say
from zaya_plugin.aegis.nodes import Nodes
from zaya_plugin.aegis.peers import Peers
from zaya_plugin.aegis.placement import available, in_order, quarantined
from zaya_plugin.aegis.record import Record
from zaya_plugin.aegis.settings import Settings, resumed
from zaya_plugin.aegis.sightings import Sightings
from zaya_plugin.aegis.steps import Steps
from zaya_plugin.ground.errors import ENDED_EARLY

STOP_SECONDS = 9.0  # the agents' 5 s and the way, after the grace
JOIN_SECONDS = 600.0  # until the nodes of the first attempt must be there
BETTER_SECONDS = 30.0  # for nodes of the first attempt that have failed less often in earlier runs
REJOIN_SECONDS = 30.0  # until the nodes of a later attempt must be there, before it starts with fewer
REQUEUED = 0  # the exit code of processes of a job that SLURM starts again


class Phase:
    """The phase of the decision maker: adopt, wait, port, run, settle, stop or delay."""

    def __init__(self) -> None:
        self.to("wait")

    def to(self, name: str) -> None:
        """Enter a phase."""
        self.name, self.since = name, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds in this phase."""
        return time.monotonic() - self.since


class Launcher:
    """Its `in_` methods are called again and again in the phase of that name.

    finish: called with the exit code and the reason when the run has ended. patience: seconds to wait for nodes.
    order: the nodes of the attempt that starts. stopping: nodes whose ranks are being ended; survivors: of SIGKILL.
    """

    def __init__(
        self,
        settings: Settings,
        record: Record,
        peers: Peers,
        sightings: Sightings,
        steps: Steps,
        finish: Callable[[int, str, bool], None],
    ):
        self.settings, self.record, self.cluster, self.peers = settings, record, record.cluster, peers
        self.sightings, self.steps, self.finish = sightings, steps, finish
        self.phase = Phase()
        self.history = Nodes()
        self.drains = slurm.Drains()
        self.patience = JOIN_SECONDS
        self.order: tuple[str, ...] = ()
        self.stopping: set[str] = set()
        self.survivors: list[str] = []
        self._next_words = 0.0

    def available(self) -> list[str]:
        return available(self.peers.connected(), self.cluster, self.history)

    def note_spares(self, used: tuple[str, ...]) -> None:
        self.cluster.spares = tuple(node for node in self.available() if node not in used)

    def in_wait(self) -> None:
        """Wait for enough nodes, then ask the first one for a port."""
        available, required = self.available(), self.settings.nodes
        enough = len(available) >= required
        all_joined = len(self.peers.by_node) >= required + self.settings.spares
        if enough and not all_joined and self.phase.seconds < BETTER_SECONDS:
            if worse := quarantined(available, required, self.cluster, self.history):
                return self._say(f"waits for other nodes than {', '.join(worse)}: they failed in earlier runs")
        if not enough and self.phase.seconds > self.patience:
            size = next((size for size in self.cluster.sizes if size <= len(available)), None)
            if size is None and self.settings.requeue and self.patience < JOIN_SECONDS:  # an attempt went before
                reason = f"{len(available)} nodes have come back, too few; SLURM starts the job again"
                decision = Decision("requeue", reason).to_json()
                self.record.note("decision", **decision, start=slurm.start_of_job())
                return self._requeue()
            if size is None and self.phase.seconds > JOIN_SECONDS:
                return self.finish(
                    1, f"{len(available)} of {required} nodes are there after {JOIN_SECONDS:.0f} s", True
                )
            enough = size is not None
        if not enough:
            if self.phase.seconds > 5:
                self._say(f"waits for nodes: {len(available)} of {required} ({', '.join(available[:20])})")
            return None
        size = next(size for size in (required, *self.cluster.sizes) if size <= len(available))
        self.order = in_order(available, size, self.cluster)
        self.peers.tell(self.peers.by_node[self.order[0]], "port", generation=self.cluster.generation + 1)
        return self.phase.to("port")

    def _say(self, text: str) -> None:
        if time.monotonic() > self._next_words:
            self._next_words = time.monotonic() + 30
            say(text)

    def in_port(self) -> None:
        if self.order[0] not in self.peers.by_node or self.phase.seconds > 5:
            self.phase.to("wait")

    def start(self, port: int) -> None:
        """Start an attempt on the nodes of `order`."""
        local_ranks = self.settings.ranks_per_node
        self.record.look_for_checkpoints(not self.sightings.rides())
        restarts = self.cluster.trained
        resume = self.cluster.before(None) if restarts else None
        self.cluster.generation += 1
        self.sightings.begin_attempt()
        self.note_spares(self.order)
        self.record.note(
            "attempt", nodes=list(self.order), world_size=len(self.order) * local_ranks, resume_step=resume
        )
        first = self.peers.by_node[self.order[0]]
        command = resumed(self.settings, self.cluster.skips) if restarts else list(self.settings.command)
        for position, peer in enumerate(self.peers.of(self.order)):
            ranks = range(position * local_ranks, position * local_ranks + local_ranks)
            peer.ranks, peer.codes = {}, {}
            peer.running = set(ranks) if self.settings.each == "rank" else {position}
            self.peers.tell(
                peer,
                "start",
                generation=self.cluster.generation,
                first_rank=position * local_ranks,
                node_rank=position,
                nodes=len(self.order),
                address=first.address,
                port=port,
                command=command,
                turn=self.cluster.turns if len(self.order) == 1 else 0,
            )
        self.steps.begin_attempt()
        say(f"attempt {self.cluster.generation} on {', '.join(self.order[:8])}" + " ..." * (len(self.order) > 8))
        self.phase.to("run")

    def leave_out(self, node: str, cause: str, broken: bool) -> None:
        """Use a node no more, and tell it to the runs that follow. broken: its hardware, so that nobody should use it."""
        self.record.note("node", node=node, state=OUT, reason=cause)
        self.remember(node, cause)
        with contextlib.suppress(OSError):
            slurm.write_failing(self.settings.folder, self.cluster.out)
        if broken and slurm.job() is not None:
            self.drains.start(node, f"zaya aegis: {cause}")

    def remember(self, node: str, cause: str) -> None:
        """Write a failure into the history of nodes."""
        self.history.add(node, cause, str(self.settings.folder))

    def begin_stop(self) -> None:
        """End the ranks of the attempt."""
        active = self.peers.of(self.cluster.nodes)
        self.stopping, self.survivors = {peer.node for peer in active}, []
        for peer in active:
            self.peers.tell(peer, "stop", generation=self.cluster.generation, grace=self.grace())
        self.phase.to("stop")

    def grace(self) -> float:
        """Return the seconds that ranks have to save. Those of a broken attempt cannot: they wait for each other."""
        return self.settings.grace if (self.cluster.pending or {}).get("action") == "done" else 0.0

    def ended(self, node: str, survivors: list[int]) -> None:
        """Take note that the ranks of a node have ended, but for processes that have survived SIGKILL."""
        self.stopping.discard(node)
        self.survivors += [f"{node}: {pid}" for pid in survivors]

    def in_stop(self) -> None:
        """Wait for the ends of all ranks; a node that does not end them cannot be used."""
        if self.stopping and self.phase.seconds < STOP_SECONDS + self.grace():
            return
        for node in (self.stopping | self.sightings.unkillable()) - set(self.cluster.out):
            self.leave_out(node, "unkillable", False)
        self.stopping = set()
        self.record.note("stopped", seconds=round(self.phase.seconds, 3), survivors=self.survivors)
        self.phase.to("delay")

    def in_delay(self) -> None:
        """Carry out what was decided, after its delay."""
        decision: dict[str, Any] = self.cluster.pending or Decision("restart", "").to_json()
        if decision["action"] == "stop":
            return self.finish(self.sightings.failed_code(), decision["reason"], True)
        if decision["action"] == "done":
            return self.finish(ENDED_EARLY, decision["reason"], True)
        if self.phase.seconds < decision["delay"]:
            return None
        if decision["action"] == "requeue":
            return self._requeue()
        if decision["action"] == "rollback" and decision["to_step"] is not None:
            self.record.put_aside(decision["to_step"])
            self.record.look_for_checkpoints(not self.sightings.rides())
        self.patience = 0.0 if decision["action"] == "shrink" else REJOIN_SECONDS
        self.history.read()
        return self.phase.to("wait")

    def _requeue(self) -> None:
        """Give the job back to SLURM. The journal stays open, so that the next start of the job knows what was."""
        taken, answer = slurm.requeue(str(slurm.job()), self.cluster.out)
        say(f"the job was requeued {answer}" if taken else f"SLURM refuses to requeue the job: {answer}")
        if taken:
            return self.finish(REQUEUED, "", False)
        return self.finish(1, f"too few nodes are left, and SLURM refuses to requeue the job: {answer}", True)

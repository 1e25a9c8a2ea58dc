# SPDX-License-Identifier: Apache-2.0
"""The phases of an attempt in which no rank trains: wait for nodes, start the ranks, end them, carry out the decision.
The decider has the others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum, auto

from zaya_plugin.aegis import slurm
from zaya_plugin.aegis.diagnose.diagnosis import Observations
from zaya_plugin.aegis.diagnose.evidence import print_line
from zaya_plugin.aegis.node_history import NodeHistory, available, in_order, quarantined
from zaya_plugin.aegis.peers import Peers
from zaya_plugin.aegis.protocol import OUT, AttemptStart, Decision, FindPort, NodeChange, Start, Stop, Stopped
from zaya_plugin.aegis.run_record import Record, Steps
from zaya_plugin.aegis.settings import Settings, resumed
from zaya_plugin.ground.exit_codes import ENDED_EARLY

STOP_SECONDS = 9.0  # the agents' 5 s and the way, after the grace
JOIN_SECONDS = 600.0  # for the nodes of the first attempt to join
BETTER_SECONDS = 30.0  # for nodes of the first attempt that have failed less often in earlier runs
REJOIN_SECONDS = 30.0  # for the nodes of a later attempt to join, before it starts with fewer
PORT_SECONDS = 5.0  # for the answer to FindPort
NOTICE_SECONDS = 30.0  # between two lines about nodes that are waited for
REQUEUED = 0  # the exit code of processes of a job that SLURM starts again


class Phase(Enum):
    """The phases of the decider; each waits for something."""

    ADOPT = auto()  # after its own crash: the agents, whose ranks train on
    WAIT = auto()  # enough nodes for an attempt
    PORT = auto()  # the first node's free port
    RUN = auto()  # the end of the ranks, or a symptom
    SETTLE = auto()  # more evidence of a failure
    STOP = auto()  # the end of the ranks that are killed
    DELAY = auto()  # the pause before the next attempt


class Clock:
    """The phase of the decider, and since when."""

    def __init__(self) -> None:
        self.enter(Phase.WAIT)

    def enter(self, phase: Phase) -> None:
        self.phase, self.since = phase, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds in this phase."""
        return time.monotonic() - self.since


class AttemptPhases:
    """The method of a phase is called again and again until it enters another one.

    finish: `Decider.finish`. patience: seconds to wait for nodes.
    order: the nodes of the attempt that starts. stopping: nodes whose ranks are being ended; survivors: of SIGKILL.
    """

    def __init__(
        self,
        settings: Settings,
        record: Record,
        peers: Peers,
        observations: Observations,
        steps: Steps,
        finish: Callable[..., None],
    ):
        self.settings, self.record, self.cluster, self.peers = settings, record, record.cluster, peers
        self.observations, self.steps, self.finish = observations, steps, finish
        self.clock = Clock()
        self.history = NodeHistory()
        self.drains = slurm.Drains()
        self.patience = JOIN_SECONDS
        self.order: tuple[str, ...] = ()
        self.stopping: set[str] = set()
        self.survivors: list[str] = []
        self._next_notice = 0.0

    def available(self) -> list[str]:
        return available(self.peers.connected(), self.cluster, self.history)

    def update_spares(self, used: tuple[str, ...]) -> None:
        self.cluster.spares = tuple(node for node in self.available() if node not in used)

    def wait_for_nodes(self) -> None:
        """Wait for enough nodes, then ask the first one for a port."""
        available, required = self.available(), self.settings.nodes
        size = next((size for size in self.cluster.sizes if size <= len(available)), None)
        all_joined = len(self.peers.by_node) >= required + self.settings.spares
        if size == required and not all_joined and self.clock.seconds < BETTER_SECONDS:
            if worse := quarantined(available, required, self.cluster, self.history):
                return self._notify(f"waits for other nodes than {', '.join(worse)}: they failed in earlier runs")
        is_late = self.clock.seconds > self.patience
        if size is None and is_late:
            if self.settings.requeue and self.patience < JOIN_SECONDS:  # an attempt went before
                reason = f"{len(available)} nodes have come back, too few; SLURM starts the job again"
                self.record.write(Decision("requeue", reason, start=slurm.start_of_job()))
                return self._requeue()
            if self.clock.seconds > JOIN_SECONDS:
                reason = f"{len(available)} of {required} nodes have joined within {JOIN_SECONDS:.0f} s"
                return self.finish(1, reason)
        if size is None or size < required and not is_late:
            if self.clock.seconds > 5:
                self._notify(f"waits for nodes: {len(available)} of {required} ({', '.join(available[:20])})")
            return None
        self.order = in_order(available, size, self.cluster)
        self.peers.send(self.peers.by_node[self.order[0]], FindPort(self.cluster.generation + 1))
        return self.clock.enter(Phase.PORT)

    def _notify(self, text: str) -> None:
        if time.monotonic() > self._next_notice:
            self._next_notice = time.monotonic() + NOTICE_SECONDS
            print_line(text)

    def wait_for_port(self) -> None:
        if self.order[0] not in self.peers.by_node or self.clock.seconds > PORT_SECONDS:
            self.clock.enter(Phase.WAIT)

    def start(self, port: int) -> None:
        """Start an attempt on the nodes of `order`."""
        local_ranks, size = self.settings.ranks_per_node, len(self.order)
        self.record.write_checkpoints(not self.observations.rides())
        restarts = self.cluster.trained
        resume = self.cluster.before(None) if restarts else None
        self.cluster.generation += 1
        self.observations.begin_attempt()
        self.update_spares(self.order)
        self.record.write(AttemptStart(list(self.order), size * local_ranks, resume))
        address = self.peers.by_node[self.order[0]].address
        command = resumed(self.settings, self.cluster.skips) if restarts else list(self.settings.command)
        turn = self.cluster.turns if size == 1 else 0
        for position, peer in enumerate(self.peers.of(self.order)):
            first = position * local_ranks
            peer.ranks, peer.codes = {}, {}
            per_rank = self.settings.start_per == "rank"
            peer.running = {*range(first, first + local_ranks)} if per_rank else {position}
            message = Start(self.cluster.generation, size, position, first, address, port, command, turn)
            self.peers.send(peer, message)
        self.steps.begin_attempt()
        print_line(f"attempt {self.cluster.generation} on {', '.join(self.order[:8])}" + " ..." * (size > 8))
        self.clock.enter(Phase.RUN)

    def leave_out(self, node: str, cause: str, broken: bool) -> None:
        """Remove a node from the run and record it for later runs. broken: hardware fault; also drain it in SLURM."""
        self.record.write(NodeChange(node, OUT, cause))
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
            self.peers.send(peer, Stop(self.cluster.generation, self.grace()))
        self.clock.enter(Phase.STOP)

    def grace(self) -> float:
        """Return the seconds that ranks have to save. Those of a broken attempt cannot: they wait for each other."""
        pending = self.cluster.pending
        return self.settings.grace if pending is not None and pending.action == "done" else 0.0

    def ended(self, node: str, survivors: list[int]) -> None:
        """The ranks of a node have ended, but for processes that have survived SIGKILL."""
        self.stopping.discard(node)
        self.survivors += [f"{node}: {pid}" for pid in survivors]

    def wait_for_ends(self) -> None:
        """Wait for the ends of all ranks; a node that does not end them cannot be used."""
        if self.stopping and self.clock.seconds < STOP_SECONDS + self.grace():
            return
        for node in (self.stopping | self.observations.unkillable()) - set(self.cluster.out):
            self.leave_out(node, "unkillable", False)
        self.stopping = set()
        self.record.write(Stopped(round(self.clock.seconds, 3), self.survivors))
        self.clock.enter(Phase.DELAY)

    def carry_out(self) -> None:
        """Carry out the pending decision after its delay."""
        decision = self.cluster.pending or Decision("restart")
        if decision.action == "stop":
            return self.finish(self.observations.failed_code(), decision.reason)
        if decision.action == "done":
            return self.finish(ENDED_EARLY, decision.reason)
        if self.clock.seconds < decision.delay:
            return None
        if decision.action == "requeue":
            return self._requeue()
        if decision.action == "rollback" and decision.to_step is not None:
            self.record.put_aside(decision.to_step)
            self.record.write_checkpoints(not self.observations.rides())
        self.patience = 0.0 if decision.action == "shrink" else REJOIN_SECONDS
        self.history.read()
        return self.clock.enter(Phase.WAIT)

    def _requeue(self) -> None:
        """Give the job back to SLURM. The journal stays open, so that the next start of the job continues it."""
        accepted, answer = slurm.requeue(str(slurm.job()), self.cluster.out)
        print_line(f"the job was requeued {answer}" if accepted else f"SLURM refuses to requeue the job: {answer}")
        if accepted:
            return self.finish(REQUEUED, "", ended=False)
        return self.finish(1, f"too few nodes are left, and SLURM refuses to requeue the job: {answer}")

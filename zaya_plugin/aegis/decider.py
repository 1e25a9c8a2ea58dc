# SPDX-License-Identifier: Apache-2.0
"""The decider: one process that agents connect to. It collects their evidence, waits for the first sign of a failure,
names the cause, decides, writes the reason into the journal, and starts or ends attempts.

All of its memory is in the journal. After its own crash it reads the journal, waits for the agents, whose ranks have
trained on, and continues.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
import time
from dataclasses import replace
from typing import Any

from zaya_plugin.aegis import link, slurm
from zaya_plugin.aegis.alerts import Alerts
from zaya_plugin.aegis.attempt_phases import AttemptPhases, Phase
from zaya_plugin.aegis.collectors.rank_files import valid_beat
from zaya_plugin.aegis.diagnose.diagnosis import DECIDE, DIAGNOSE, RECORD, UNKNOWN, Observations, diagnose
from zaya_plugin.aegis.diagnose.evidence import Evidence, print_line
from zaya_plugin.aegis.diagnose.policy import agent_is_back, decide
from zaya_plugin.aegis.diagnose.rules import Rules
from zaya_plugin.aegis.peers import LOST_SECONDS, Peer, Peers
from zaya_plugin.aegis.protocol import (
    BACK,
    JOINED,
    LOST,
    Beat,
    BeatAnswer,
    BeatRequest,
    Checkpoint,
    Decision,
    Diagnosis,
    Dump,
    Dumped,
    End,
    Ended,
    EndSignal,
    EvidenceBatch,
    FreePort,
    Join,
    NodeChange,
    RankExit,
    Save,
    Started,
    Stop,
    SurvivorsEnded,
    Symptom,
    to_json,
)
from zaya_plugin.aegis.run_record import Record, Steps
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.ground.exit_codes import ENDED_EARLY
from zaya_plugin.ground.parent_death import die_with_parent, on_end_signals

SETTLE_SECONDS = 0.5  # evidence of the same failure arrives from other nodes
EXPLAIN_SECONDS = 8.0  # ranks that lost their peer are explained by a node whose loss is detected later
DUMP_SECONDS = 3.0  # the agents' 2 s and the way
SAVE_SECONDS = 600.0  # for the other ranks, once one has saved and left
LEAVE_SECONDS = 2.0  # for the agents, at the end
ATTEMPT_RUNS = (Phase.RUN, Phase.ADOPT, Phase.SETTLE)
ALERT_FACTS = (
    *("cause", "node", "rank", "severity", "confidence", "evidence"),
    *("action", "nodes_out", "delay", "to_step", "skip", "reason"),
)


class Decider:
    """The loop; `run` returns the exit code of the run."""

    def __init__(self, settings: Settings, secret: bytes, listening: socket.socket | None):
        self.settings = settings
        self.rules = Rules.load(settings.rules)
        self.record = Record(settings)
        self.cluster, self.write = self.record.cluster, self.record.write
        self.peers = Peers(secret, listening)
        self.observations = Observations(self.rules, self.cluster)
        self.steps = Steps(self.record)
        self.attempt = AttemptPhases(settings, self.record, self.peers, self.observations, self.steps, self.finish)
        self.clock = self.attempt.clock
        self.alerts = Alerts(settings.hook, settings.folder.parent)
        self.dumping: set[str] = set()  # nodes whose ranks write stacks and flight recorders
        self.code: int | None = None
        self.phases = {
            Phase.ADOPT: self.adopt,
            Phase.WAIT: self.attempt.wait_for_nodes,
            Phase.PORT: self.attempt.wait_for_port,
            Phase.RUN: self.watch,
            Phase.SETTLE: self.settle,
            Phase.STOP: self.attempt.wait_for_ends,
            Phase.DELAY: self.attempt.carry_out,
        }
        self.handlers = {
            Beat: self.on_beat,
            EvidenceBatch: self.on_evidence,
            Started: self.on_started,
            RankExit: self.on_exit,
            FreePort: self.on_port,
            Dumped: self.on_dumped,
            Ended: self.on_ended,
            SurvivorsEnded: self.on_survivors_ended,
            EndSignal: self.on_end_signal,
        }
        if self.record.has_unfinished_attempt:
            self.clock.enter(Phase.ADOPT)

    def run(self) -> int:
        """Work until the run has ended."""
        while self.code is None:
            self.tick()
        self.peers.leave(self.code, LEAVE_SECONDS)
        self.record.write_alerts(self.alerts.close())
        self.record.journal.close()
        return self.code

    def tick(self) -> None:
        """Handle messages, then act by the phase."""
        # Heartbeats that arrive while this process is held, as by a file server, are read in the next tick.
        begun = time.monotonic()
        self.peers.exchange(0.1, self.handle)
        self.attempt.drains.poll()
        self.record.flush_if_due()
        self.record.write_alerts(self.alerts.poll())
        for node in self.peers.silent(begun):
            self.lose(node, f"silent for {LOST_SECONDS:.0f} s")
        self.phases[self.clock.phase]()

    # Messages

    def handle(self, connection: link.Link, message: Any) -> None:
        """Handle one message of an agent."""
        peer = self.peers.by_link.get(connection)
        if isinstance(message, Join):
            self.on_join(connection, message)
        elif peer is None:
            raise link.LinkError("sends before it has joined")
        else:
            peer.beat = time.monotonic()
            self.handlers[type(message)](peer, message)

    def on_join(self, connection: link.Link, message: Join) -> None:
        is_new, phase = message.node not in self.peers.by_node, self.clock.phase
        peer = self.peers.join(connection, message)
        node = peer.node
        if is_new:
            history = f", failed {count} times in 30 days" if (count := self.attempt.history.failures[node]) else ""
            self.write(NodeChange(node, JOINED, peer.address + history))
            if self._may_return(node) and not peer.running:
                self.write(NodeChange(node, BACK, "its agent answers again, and runs nothing"))
        if phase is Phase.STOP and node in self.attempt.stopping:  # it was killed, or the message was lost
            self.peers.send(peer, Stop(self.cluster.generation, self.attempt.grace()))
        if node not in self.cluster.nodes or not self.cluster.running:
            if peer.running and phase not in (Phase.ADOPT, Phase.STOP):
                self.peers.send(peer, Stop(peer.generation, 0))
        elif peer.generation == self.cluster.generation or phase in ATTEMPT_RUNS:
            self.adopt_agent(peer)

    def adopt_agent(self, peer: Peer) -> None:
        """Handle the exits of ranks while an agent of the attempt was not connected, or the loss of its ranks."""
        if peer.generation == self.cluster.generation:
            for rank, code in sorted(peer.codes.items()):
                self.rank_has_ended(peer, rank, code, time.time())
        else:
            text = "the agent was killed, its ranks have ended, and it has started again"
            self.add(Evidence(time.time(), peer.node, "agent", text, rule="agent_lost", values={"back": True}))

    def on_beat(self, peer: Peer, message: Beat) -> None:
        self.peers.send(peer, BeatAnswer(message.time, time.time()))
        if message.generation != self.cluster.generation or not self.cluster.running:
            return
        peer.ranks = {int(rank): valid_beat(beat) for rank, beat in message.ranks.items()}
        beats = {rank: beat for peer in self.active() for rank, beat in peer.ranks.items()}
        if self.steps.follow(list(beats.values())):
            self.observations.held_hang = None
        training = {rank: beat for rank, beat in beats.items() if beat["phase"] == "train"}
        for evidence in self.steps.slow(training, self.settings.ranks_per_node):
            self.add(evidence)

    def on_survivors_ended(self, peer: Peer, message: SurvivorsEnded) -> None:
        if self._affects_node(self.cluster.out.get(peer.node)):  # and not for broken hardware as well
            self.write(NodeChange(peer.node, BACK, "the processes that survived SIGKILL have ended"))

    def on_port(self, peer: Peer, message: FreePort) -> None:
        first = self.clock.phase is Phase.PORT and peer.node == self.attempt.order[0]
        if first and message.generation == self.cluster.generation + 1:
            self.attempt.start(message.port)

    def on_started(self, peer: Peer, message: Started) -> None:
        peer.generation = message.generation

    def on_exit(self, peer: Peer, message: RankExit) -> None:
        if message.generation == self.cluster.generation:
            self.rank_has_ended(peer, message.rank, message.code, message.time)

    def rank_has_ended(self, peer: Peer, rank: int, code: int, at: float) -> None:
        peer.running.discard(rank)
        peer.codes[rank] = code
        if code and self.clock.phase in ATTEMPT_RUNS:
            evidence = self.rules.exit_evidence(code, at, peer.node, rank)
            if not self.observations.has_exit(peer.node, rank):
                self.observations.evidence.append(evidence)
            self.begin_diagnosis(evidence)

    def on_evidence(self, peer: Peer, message: EvidenceBatch) -> None:
        for row in message.rows:
            evidence = Evidence.from_json(row)
            if evidence.rule != "checkpoint_saved":
                self.add(evidence, message.generation)
            elif (step := int(evidence.values["step"])) not in self.cluster.checkpoints:
                self.write(Checkpoint(step))

    def on_dumped(self, peer: Peer, message: Dumped) -> None:
        self.dumping.discard(peer.node)

    def on_ended(self, peer: Peer, message: Ended) -> None:
        if message.generation == self.cluster.generation and peer.node in self.attempt.stopping:
            self.attempt.ended(peer.node, message.survivors)
        elif not message.survivors and self._may_return(peer.node):
            self.write(NodeChange(peer.node, BACK, "its agent answers again, and its ranks have ended"))

    def on_end_signal(self, peer: Peer, message: EndSignal) -> None:
        number = int(signal.Signals(message.number))
        if not self.cluster.asked:
            self.cluster.asked = True
            text = f"asked to end by signal {number}"
            self.write(Symptom(Evidence(time.time(), peer.node, "agent", text)))
        if self.cluster.pending is not None and self.cluster.pending.action == "requeue":
            return  # SLURM ends the job's processes
        starts = self.clock.phase in (Phase.WAIT, Phase.PORT, Phase.DELAY)
        if not self.cluster.running or starts or message.times > 1:
            self.finish(128 + number, "ended by a signal")
            return
        for other in self.active():  # a signal to one node is for the run
            if other is not peer:
                self.peers.send(other, Save(self.cluster.generation))

    def _affects_node(self, cause: str | None) -> bool:
        rule = self.rules.get(cause)
        return rule is not None and rule.affects == "node"

    def _may_return(self, node: str) -> bool:
        """Whether a node that is out can be used again when its agent answers: it was lost,
        and nothing survives there.
        """
        cause = self.cluster.out.get(node)
        return self._affects_node(cause) and cause != "unkillable"

    # From evidence to a decision

    def active(self) -> list[Peer]:
        """Return the agents of the attempt that are connected or may connect again."""
        return self.peers.of(self.cluster.nodes)

    def add(self, evidence: Evidence, generation: int | None = None) -> None:
        """Keep evidence, and react to it."""
        reaction = self.observations.add(evidence, generation)
        if reaction == DECIDE:
            self.decide(evidence, alive=True)
        elif reaction == DIAGNOSE:
            self.begin_diagnosis(evidence)
        elif reaction == RECORD:
            self.write(Symptom(evidence))

    def begin_diagnosis(self, evidence: Evidence) -> None:
        """Wait a moment for more evidence, then name the cause."""
        if self.clock.phase not in (Phase.RUN, Phase.ADOPT):
            return
        self.observations.symptom = evidence
        self.write(Symptom(evidence))
        for peer in self.active():
            self.peers.send(peer, BeatRequest(self.cluster.generation))
            peer.asked = time.monotonic()
        if evidence.rule == "hang":
            self.dumping = {peer.node for peer in self.active()}
            for peer in self.active():
                self.peers.send(peer, Dump(self.cluster.generation))
        self.clock.enter(Phase.SETTLE)

    def lose(self, node: str, reason: str) -> None:
        """A node does not answer any more."""
        self.peers.remove(node)
        self.write(NodeChange(node, LOST, reason))
        self.attempt.stopping.discard(node)
        self.dumping.discard(node)
        if self.cluster.running and node in self.cluster.nodes:
            self.add(Evidence(time.time(), node, "agent", f"the agent is {reason}", rule="node_lost"))

    def adopt(self) -> None:
        """After a crash of this process: wait for the agents, whose ranks train on."""
        active = self.active()
        if len(active) < len(self.cluster.nodes) and self.clock.seconds < LOST_SECONDS:
            return
        if self.cluster.pending is not None:
            self.attempt.begin_stop()
        elif any(peer.generation == self.cluster.generation for peer in active):
            self.steps.stepped = time.time()
            self.clock.enter(Phase.RUN)
            for node in [node for node in self.cluster.nodes if node not in self.peers.by_node]:
                self.add(Evidence(time.time(), node, "agent", "the agent has not come back", rule="node_lost"))
            for peer in active:
                self.adopt_agent(peer)
        else:
            self.cluster.running = False  # all nodes are new: a job that SLURM has started again
            self.clock.enter(Phase.WAIT)

    def watch(self) -> None:
        """Diagnose evidence that was held back, and end the run after its last step."""
        self.attempt.update_spares(self.cluster.nodes)
        if (evidence := self.observations.due()) is not None:
            return self.begin_diagnosis(evidence)
        active = self.active()
        if len(active) == len(self.cluster.nodes) and not any(peer.running for peer in active):
            if {code for peer in active for code in peer.codes.values()} == {0}:
                self.finish(0, "all ranks have ended with exit code 0")
        return None

    def settle(self) -> None:
        """Wait for more evidence, then name the cause. Consequences alone wait for the loss of a node."""
        seconds, symptom, active = self.clock.seconds, self.observations.symptom, self.active()
        if seconds < SETTLE_SECONDS or self.dumping and seconds < DUMP_SECONDS:
            return
        leaving = symptom.values.get("exit_code") == ENDED_EARLY and any(peer.running for peer in active)
        if self.cluster.asked and leaving and seconds < SAVE_SECONDS:
            return
        if symptom.rule == "hang":
            world = [rank for peer in active for rank in peer.ranks]
            self.observations.name_missing(world, self.settings.ranks_per_node)
        result = self.observations.diagnose(self.steps.stepped)
        explained = result.cause != UNKNOWN and result.role == "root" and result.confidence != "weak"
        if any(peer.beat < peer.asked for peer in active) and not explained and seconds < EXPLAIN_SECONDS:
            return
        self.decide(symptom, alive=False, result=result)

    def decide(self, symptom: Evidence, alive: bool, result: Diagnosis | None = None) -> None:
        """Write the diagnosis and the decision, and begin to carry it out. alive: whether all ranks run."""
        result = result or diagnose([symptom], self.rules)
        if not alive:
            self.steps.write_last()
        self.record.write_checkpoints(not self.observations.rides())
        decision = decide(result, self.cluster, self.rules, alive)
        if not alive and self.cluster.asked and decision.action not in ("done", "stop"):
            decision = replace(decision, action="stop", nodes_out=(), reason=f"{decision.reason}; asked to end")
        if decision.action == "requeue":
            decision.start = slurm.start_of_job()
        self.write(result)
        self.write(decision)
        place = f" on {result.node}" if result.node else ""
        rank = f", rank {result.rank}" if result.rank is not None else ""
        text = f"{result.cause}{place}{rank}: {decision.action}. {decision.reason}"
        print_line(text)
        if decision.action != "watch":
            self.alert(text, result, decision)
        if decision.action in ("ride", "watch"):
            return
        for node in decision.nodes_out:
            self.attempt.leave_out(node, result.cause, result.severity == "fatal" and result.confidence == "sure")
        if decision.action == "restart" and result.node and not decision.nodes_out and self.is_nodes_fault(result):
            self.attempt.remember(result.node, result.cause)  # no other node was available
        self.attempt.begin_stop()

    def is_nodes_fault(self, result: Diagnosis) -> bool:
        """Whether a diagnosis is a reason to take another node."""
        rule = self.rules.get(result.cause)
        if rule is None or rule.affects == "node":
            return rule is not None and not agent_is_back(result)
        return rule.action == "exchange" and result.confidence != "weak"

    def alert(self, text: str, result: Diagnosis, decision: Decision) -> None:
        """Send a decision to the user's hook and to W&B."""
        run = {"generation": self.cluster.generation, "step": self.cluster.step, "run": str(self.settings.folder)}
        facts = to_json(result) | to_json(decision)
        rule = self.rules.get(result.cause)
        safe_code = rule.safe_code if rule else ""
        self.alerts.send(text, **run, **{name: facts[name] for name in ALERT_FACTS}, safe_code=safe_code)

    def finish(self, code: int, reason: str, ended: bool = True) -> None:
        """Leave. ended: the run has; else another start of the job continues it."""
        if self.code is not None:
            return
        self.code = code
        if not ended:
            return
        self.steps.write_last()
        self.record.write_checkpoints(not self.observations.rides())
        self.write(End(code, reason))
        print_line(f"end, exit code {code}: {reason}")
        level = "info" if code in (0, ENDED_EARLY) else "error"
        self.alerts.send(f"end, exit code {code}: {reason}", level, action="end", code=code, step=self.cluster.step)


def main() -> int:
    """Run the decider with the settings on stdin."""
    die_with_parent(signal.SIGKILL)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection a node: 1,024 files are too few
    on_end_signals(signal.SIG_IGN)  # the agent reports that the run is to end
    settings = Settings.from_json(sys.stdin.read())
    listening = socket.socket(fileno=int(sys.argv[1]))
    Decider(settings, link.read_secret(settings.secret_file), listening).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())

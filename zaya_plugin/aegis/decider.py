# SPDX-License-Identifier: Apache-2.0
"""The decision maker: one process that agents connect to. It takes what they tell, waits for the first sign of a failure,
names the cause, decides, writes down why, and has the launcher carry it out.

All that it must remember is in the journal. After its own crash it reads that, waits for the agents, whose ranks have
trained on, and goes on where it was.
"""

from __future__ import annotations

import resource
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin.aegis import link, slurm
from zaya_plugin.aegis.alerts import Alerts
from zaya_plugin.aegis.collectors.progress import sound_beat
from zaya_plugin.aegis.decide import GONE, decide
from zaya_plugin.aegis.diagnose import UNKNOWN, Diagnosis, diagnosis
from zaya_plugin.aegis.evidence import Evidence, say
from zaya_plugin.aegis.exit_codes import meaning
from zaya_plugin.aegis.launcher import Launcher
from zaya_plugin.aegis.peers import LOST_SECONDS, Peer, Peers, of_kind
from zaya_plugin.aegis.record import Record
from zaya_plugin.aegis.rules import Rules
from zaya_plugin.aegis.settings import Settings
from zaya_plugin.aegis.sightings import JUDGE, LOOK, NOTE, Sightings
from zaya_plugin.aegis.steps import Steps
from zaya_plugin.ground.errors import ENDED_EARLY
from zaya_plugin.ground.parent_death import die_with_parent, on_end_signals

SETTLE_SECONDS = 0.5  # evidence of the same failure arrives from other nodes
EXPLAIN_SECONDS = 8.0  # ranks that lost their peer are explained by a node that is found lost later
DUMP_SECONDS = 3.0  # the agents' 2 s and the way
SAVE_SECONDS = 600.0  # for the other ranks, once one has saved and left
LEAVE_SECONDS = 2.0  # for the agents, at the end
RETURN = ("node_lost", "agent_lost")  # causes upon which a node may be used again when it answers


class Decider:
    """The loop; `run` returns the exit code of the run."""

    def __init__(self, settings: Settings, secret: bytes, listening: socket.socket):
        self.settings = settings
        self.rules = Rules.load(settings.rules)
        self.record = Record(settings)
        self.cluster, self.note = self.record.cluster, self.record.note
        self.peers = Peers(secret, listening)
        self.sightings = Sightings(self.rules, self.cluster)
        self.steps = Steps(self.record)
        self.launcher = Launcher(settings, self.record, self.peers, self.sightings, self.steps, self.finish)
        self.phase = self.launcher.phase
        self.alerts = Alerts(settings.hook, settings.folder.parent)
        self.dumping: set[str] = set()  # nodes whose ranks write stacks and flight recorders
        self.code: int | None = None
        self.acts = {
            "adopt": self.in_adopt,
            "wait": self.launcher.in_wait,
            "port": self.launcher.in_port,
            "run": self.in_run,
            "settle": self.in_settle,
            "stop": self.launcher.in_stop,
            "delay": self.launcher.in_delay,
        }
        if self.record.goes_on:
            self.phase.to("adopt")

    def run(self) -> int:
        """Work until the run has ended."""
        while self.code is None:
            self.tick()
        self.peers.leave(self.code, LEAVE_SECONDS)
        self.record.note_alerts(self.alerts.close())
        self.record.journal.close()
        return self.code

    def tick(self) -> None:
        """Take messages, then act by the phase."""
        # Heartbeats that arrive while this process is held, as by a file server, are read in the next tick.
        begun = time.monotonic()
        self.peers.exchange(0.1, self.handle)
        self.launcher.drains.poll()
        self.record.flush_if_due()
        self.record.note_alerts(self.alerts.poll())
        for node in self.peers.silent(begun):
            self.lose(node, f"silent for {LOST_SECONDS:.0f} s")
        self.acts[self.phase.name]()

    # Messages

    def handle(self, connection: link.Link, message: dict[str, Any]) -> None:
        kind, peer = message["kind"], self.peers.by_link.get(connection)
        if kind == "join":
            self.joined(connection, message)
        elif peer is None:
            raise link.LinkError("speaks before it has joined")
        else:
            peer.beat = time.monotonic()
            getattr(self, f"on_{kind}")(peer, message)

    def joined(self, connection: link.Link, message: dict[str, Any]) -> None:
        new = message["node"] not in self.peers.by_node
        peer = self.peers.join(connection, message)
        node = peer.node
        if new:
            before = f", failed {count} times in 30 days" if (count := self.launcher.history.failures[node]) else ""
            self.note("node", node=node, state="joined", reason=peer.address + before)
            if self.cluster.out.get(node) in RETURN and not peer.running:
                self.note("node", node=node, state="back", reason="its agent answers again, and runs nothing")
        if message["asked"]:
            self.on_asked(peer, {"number": message["asked"][0], "times": 1})
        if message["over"] is not None:
            self.on_ended(peer, message["over"])
        if self.phase.name == "stop" and node in self.launcher.stopping:  # it was killed, or what it was told is lost
            self.peers.tell(peer, "stop", generation=self.cluster.generation, grace=self.launcher.grace())
        if node not in self.cluster.nodes or not self.cluster.running:
            if peer.running and self.phase.name not in ("adopt", "stop"):
                self.peers.tell(peer, "stop", generation=peer.generation, grace=0)
        elif peer.generation == self.cluster.generation or self.phase.name in ("run", "settle", "adopt"):
            self.take_over(peer)

    def take_over(self, peer: Peer) -> None:
        """Take what an agent of the attempt has to tell after it was not connected."""
        if peer.generation == self.cluster.generation:
            for rank, code in sorted(peer.codes.items()):
                self.take_exit(peer, rank, code, time.time())
        else:
            text = "the agent was killed, its ranks have ended, and it has started again"
            self.see(Evidence(time.time(), peer.node, "agent", text, rule="agent_lost", values={"back": True}))

    def on_beat(self, peer: Peer, message: dict[str, Any]) -> None:
        self.peers.tell(peer, "beat", echo=message["time"], time=time.time())
        if message["generation"] != self.cluster.generation or not self.cluster.running:
            return
        peer.ranks = {int(rank): sound_beat(beat) for rank, beat in message["ranks"].items()}
        beats = {rank: beat for peer in self.active() for rank, beat in peer.ranks.items()}
        if self.steps.follow(list(beats.values())):
            self.sightings.hanging = None
        training = {rank: beat for rank, beat in beats.items() if beat["phase"] == "train"}
        for evidence in self.steps.slow(training, self.settings.ranks_per_node):
            self.see(evidence)

    def on_free(self, peer: Peer, message: dict[str, Any]) -> None:
        if self.cluster.out.get(peer.node) in GONE:  # and not for broken hardware beside it
            self.note("node", node=peer.node, state="back", reason="the processes that survived SIGKILL have ended")

    def on_port(self, peer: Peer, message: dict[str, Any]) -> None:
        of_kind(message, generation=int, port=int)
        first = self.phase.name == "port" and peer.node == self.launcher.order[0]
        if first and message["generation"] == self.cluster.generation + 1:
            self.launcher.start(message["port"])

    def on_started(self, peer: Peer, message: dict[str, Any]) -> None:
        of_kind(message, generation=int)
        peer.generation = message["generation"]

    def on_exit(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["generation"] == self.cluster.generation:
            of_kind(message, rank=int, code=int)
            self.take_exit(peer, message["rank"], message["code"], message["time"] + message["offset"])

    def take_exit(self, peer: Peer, rank: int, code: int, at: float) -> None:
        peer.running.discard(rank)
        peer.codes[rank] = code
        if code and self.phase.name in ("run", "adopt", "settle"):
            text = f"ended with exit code {code}: {meaning(code).text}"
            evidence = Evidence(at, peer.node, "exit", text, rank, None, {"exit_code": code})
            if not self.sightings.has_exit(peer.node, rank):
                self.sightings.evidence.append(evidence)
            self.look(evidence)

    def on_evidence(self, peer: Peer, message: dict[str, Any]) -> None:
        for row in message["rows"]:
            evidence = Evidence.from_json({**row, "time": row["time"] + message["offset"]})
            if evidence.rule != "checkpoint_saved":
                self.see(evidence, message["generation"])
            elif (step := int(evidence.values["step"])) not in self.cluster.checkpoints:
                self.note("checkpoint", step=step)

    def on_dumped(self, peer: Peer, message: dict[str, Any]) -> None:
        self.dumping.discard(peer.node)

    def on_ended(self, peer: Peer, message: dict[str, Any]) -> None:
        of_kind(message, survivors=list)
        if message["generation"] == self.cluster.generation and peer.node in self.launcher.stopping:
            self.launcher.ended(peer.node, message["survivors"])
        elif not message["survivors"] and self.cluster.out.get(peer.node) in RETURN:
            self.note("node", node=peer.node, state="back", reason="its agent answers again, and its ranks have ended")

    def on_asked(self, peer: Peer, message: dict[str, Any]) -> None:
        of_kind(message, times=int)
        number = int(signal.Signals(message["number"]))
        if not self.cluster.asked:
            self.cluster.asked = True
            text = f"asked to end by signal {number}"
            self.note("symptom", evidence=Evidence(time.time(), peer.node, "agent", text).to_json())
        if (self.cluster.pending or {}).get("action") == "requeue":
            return  # SLURM ends the job's processes
        if not self.cluster.running or self.phase.name in ("wait", "port", "delay") or message["times"] > 1:
            self.finish(128 + number, "ended by a signal")
            return
        for other in self.active():  # a signal to one node is for the run
            if other is not peer:
                self.peers.tell(other, "save", generation=self.cluster.generation)

    # From evidence to a decision

    def active(self) -> list[Peer]:
        """Return the agents of the attempt that are connected or may connect again."""
        return self.peers.of(self.cluster.nodes)

    def see(self, evidence: Evidence, generation: int | None = None) -> None:
        """Keep evidence, and do what it calls for."""
        calls_for = self.sightings.add(evidence, generation)
        if calls_for == JUDGE:
            self.judge(evidence, alive=True)
        elif calls_for == LOOK:
            self.look(evidence)
        elif calls_for == NOTE:
            self.note("symptom", evidence=evidence.to_json())

    def look(self, evidence: Evidence) -> None:
        """Wait a moment for more evidence, then name the cause."""
        if self.phase.name not in ("run", "adopt"):
            return
        self.sightings.symptom = evidence
        self.note("symptom", evidence=evidence.to_json())
        for peer in self.active():
            self.peers.tell(peer, "ask")
            peer.asked = time.monotonic()
        if evidence.rule == "hang":
            self.dumping = {peer.node for peer in self.active()}
            for peer in self.active():
                self.peers.tell(peer, "dump", generation=self.cluster.generation)
        self.phase.to("settle")

    def lose(self, node: str, reason: str) -> None:
        """Take note that a node does not answer any more."""
        self.peers.remove(node)
        self.note("node", node=node, state="lost", reason=reason)
        self.launcher.stopping.discard(node)
        self.dumping.discard(node)
        if self.cluster.running and node in self.cluster.nodes:
            self.see(Evidence(time.time(), node, "agent", f"the agent is {reason}", rule="node_lost"))

    def in_adopt(self) -> None:
        """After a crash of this process: wait for the agents, whose ranks go on."""
        active = self.active()
        if len(active) < len(self.cluster.nodes) and self.phase.seconds < LOST_SECONDS:
            return
        if self.cluster.pending is not None:
            self.launcher.begin_stop()
        elif any(peer.generation == self.cluster.generation for peer in active):
            self.steps.stepped = time.time()
            self.phase.to("run")
            for node in [node for node in self.cluster.nodes if node not in self.peers.by_node]:
                self.see(Evidence(time.time(), node, "agent", "the agent has not come back", rule="node_lost"))
            for peer in active:
                self.take_over(peer)
        else:
            self.cluster.running = False  # all nodes are new: a job that SLURM has started again
            self.phase.to("wait")

    def in_run(self) -> None:
        self.launcher.note_spares(self.cluster.nodes)
        if (evidence := self.sightings.due()) is not None:
            return self.look(evidence)
        active = self.active()
        if len(active) == len(self.cluster.nodes) and not any(peer.running for peer in active):
            if {code for peer in active for code in peer.codes.values()} == {0}:
                self.finish(0, "all ranks have ended with exit code 0")
        return None

    def in_settle(self) -> None:
        """More evidence may come; then name the cause. Consequences alone wait for a node that is found lost."""
        seconds, symptom, active = self.phase.seconds, self.sightings.symptom, self.active()
        if seconds < SETTLE_SECONDS or self.dumping and seconds < DUMP_SECONDS:
            return
        leaving = symptom.values.get("exit_code") == ENDED_EARLY and any(peer.running for peer in active)
        if self.cluster.asked and leaving and seconds < SAVE_SECONDS:
            return
        if symptom.rule == "hang":
            world = [rank for peer in active for rank in peer.ranks]
            self.sightings.name_missing(world, self.settings.ranks_per_node)
        said = self.sightings.diagnose(self.steps.stepped)
        explained = said.cause != UNKNOWN and said.role == "root" and said.confidence != "weak"
        if any(peer.beat < peer.asked for peer in active) and not explained and seconds < EXPLAIN_SECONDS:
            return
        self.judge(symptom, alive=False, said=said)

    def judge(self, symptom: Evidence, alive: bool, said: Diagnosis | None = None) -> None:
        """Diagnose, decide, write it down, and begin to carry it out."""
        if said is None:
            said = diagnosis([symptom], self.rules)
        rule = self.rules[said.cause] if said.cause in self.rules else None
        if not alive:
            self.steps.note_last()
        self.record.look_for_checkpoints(not self.sightings.rides())
        decision = decide(said, self.cluster, rule, alive)
        if not alive and self.cluster.asked and decision.action not in ("done", "stop"):
            decision = replace(decision, action="stop", nodes_out=(), reason=f"{decision.reason}; asked to end")
        self.note("diagnosis", **said.to_json())
        where = f" on {said.node}" if said.node else ""
        who = f", rank {said.rank}" if said.rank is not None else ""
        text = f"{said.cause}{where}{who}: {decision.action}. {decision.reason}"
        say(text)
        of_start = {"start": slurm.start_of_job()} if decision.action == "requeue" else {}
        self.note("decision", **decision.to_json(), **of_start)
        if decision.action != "watch":
            self.alert(text, "warn", said, decision.to_json())
        if decision.action in ("ride", "watch"):
            return
        for node in decision.nodes_out:
            self.launcher.leave_out(node, said.cause, said.severity == "fatal" and said.confidence == "sure")
        if decision.action == "restart" and said.node and not decision.nodes_out and self.is_nodes_fault(said):
            self.launcher.remember(said.node, said.cause)  # no other node was there to take over
        self.launcher.begin_stop()

    def is_nodes_fault(self, diagnosis: Diagnosis) -> bool:
        """Whether a diagnosis is a reason to take another node."""
        if diagnosis.cause in GONE:
            return not (diagnosis.evidence and diagnosis.evidence[0].values.get("back"))
        return (
            diagnosis.cause in self.rules
            and self.rules[diagnosis.cause].action == "exchange"
            and diagnosis.confidence != "weak"
        )

    def alert(self, text: str, level: str, said: Diagnosis, decision: dict[str, Any]) -> None:
        """Tell a decision to the user's hook and to W&B."""
        values = said.to_json()
        facts = {name: values.get(name) for name in ("cause", "node", "rank", "severity", "confidence", "evidence")}
        where = {"generation": self.cluster.generation, "step": self.cluster.step, "run": str(self.settings.folder)}
        safe_code = self.rules[said.cause].safe_code if said.cause in self.rules else ""
        self.alerts.send(text, level, **where, **facts, **decision, safe_code=safe_code)

    def finish(self, code: int, reason: str, ended: bool = True) -> None:
        """Leave. ended: the run has; else another start of the job goes on with it."""
        if self.code is not None:
            return
        self.code = code
        if not ended:
            return
        self.steps.note_last()
        self.record.look_for_checkpoints(not self.sightings.rides())
        self.note("end", code=code, reason=reason)
        say(f"end, exit code {code}: {reason}")
        level = "info" if code in (0, ENDED_EARLY) else "error"
        self.alerts.send(f"end, exit code {code}: {reason}", level, action="end", code=code, step=self.cluster.step)


def main(argv: list[str]) -> int:
    """Run the decision maker: settings, the file of the secret, and the number of the listening socket."""
    die_with_parent(signal.SIGKILL)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection a node: 1,024 files are too few
    on_end_signals(signal.SIG_IGN)  # the agent says that the run is to end
    settings = Settings.from_word(argv[0])
    listening = socket.socket(fileno=int(argv[2]))
    Decider(settings, link.read_secret(Path(argv[1])), listening).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

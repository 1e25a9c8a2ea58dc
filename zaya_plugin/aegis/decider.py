# SPDX-License-Identifier: Apache-2.0
"""The decision maker: one process that agents connect to. It starts each attempt, waits for the first sign of a failure,
names the cause, decides, writes down why, and has the agents carry it out.

All that it must remember is in the journal. After its own crash it reads that, waits for the agents, whose ranks have
trained on, and goes on where it was.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin import __version__
from zaya_plugin.aegis import link, slurm
from zaya_plugin.aegis.alerts import Alerts
from zaya_plugin.aegis.cluster import OUT, Cluster
from zaya_plugin.aegis.collectors.flight_recorder import missing
from zaya_plugin.aegis.collectors.progress import slow_ranks
from zaya_plugin.aegis.decide import GONE, Decision, decide
from zaya_plugin.aegis.diagnose import LOOKBACK, UNKNOWN, Diagnosis, diagnosis
from zaya_plugin.aegis.evidence import Evidence, say
from zaya_plugin.aegis.exit_codes import HANG, meaning
from zaya_plugin.aegis.journal import Journal, read, without_secrets_in
from zaya_plugin.aegis.nodes import Nodes
from zaya_plugin.aegis.rules import Rules
from zaya_plugin.aegis.settings import Settings, is_train
from zaya_plugin.config.run_directory import COMPLETE
from zaya_plugin.errors import ENDED_EARLY
from zaya_plugin.parent_death import die_with_parent

LOST_SECONDS = 6.0  # three heartbeats
SETTLE_SECONDS = 0.5  # evidence of the same failure arrives from other nodes
EXPLAIN_SECONDS = 8.0  # ranks that lost their peer are explained by a node that is found lost later
DUMP_SECONDS = 3.0  # the agents' 2 s and the way
STOP_SECONDS = 9.0  # the agents' 5 s and the way, after the grace
JOIN_SECONDS = 600.0  # until the nodes of the first attempt must be there
BETTER_SECONDS = 30.0  # for nodes of the first attempt that have failed less often in earlier runs
REJOIN_SECONDS = 30.0  # until those of a later one must, before it starts with fewer
PROGRESS_SECONDS = 60.0  # between two lines of progress in the journal
SAVE_SECONDS = 600.0  # for the other ranks, once one has saved and left
RETURN = ("node_lost", "agent_lost")  # causes upon which a node may be used again when it answers
FLUSH_SECONDS = 2.0  # between two tries to write lines of the journal for which the disk had no room
PROBE_SECONDS = 3.0  # in which the storage probes of other nodes tell a broken disk or mount from a broken file server
# A rank is slow if it is slower than its peers in each comparison of so many steps and seconds; heartbeats come every 2 s.
SLOW_STEPS, SLOW_SECONDS = 5, 6.0
TOLD = ("slow_rank", "packets_lost")  # watched, and worth a line of the journal
REQUEUED = 0  # the exit code of processes of a job that SLURM starts again
PEERS = 4096  # connections that have not proved yet that they hold the secret count too
KEPT = 20_000  # pieces of evidence


class Peer:
    """A connected agent. beat: when it was heard last (monotonic). ranks: their heartbeats."""

    def __init__(self, connection: link.Link):
        self.link, self.node, self.address = connection, "", ""
        self.beat, self.generation = time.monotonic(), 0
        self.ranks: dict[int, dict[str, Any]] = {}
        self.running: set[int] = set()
        self.codes: dict[int, int] = {}


class Decider:
    """The loop; `run` returns the exit code of the run."""

    def __init__(self, settings: Settings, secret: bytes, listening: socket.socket):
        self.settings, self.secret, self.listening = settings, secret, listening
        self.rules = Rules.load(settings.rules)
        stages = not is_train(settings.command)
        self.cluster = Cluster(
            settings.nodes, settings.sizes, settings.group, settings.restarts, settings.requeue, stages
        )
        before = list(read(settings.journal)) if settings.journal.exists() else []
        self.cluster.replay(before)
        self.journal = Journal(settings.journal)
        self.history = Nodes()
        self.drains = slurm.Drains()
        self.alerts = Alerts(settings.hook, settings.folder.parent)
        self.links: set[link.Link] = set()
        self.peers: dict[str, Peer] = {}  # by node
        self.by_link: dict[link.Link, Peer] = {}
        self.evidence: deque[Evidence] = deque(maxlen=KEPT)
        self.phase, self.since = "wait", time.monotonic()
        self.patience = JOIN_SECONDS
        self.symptom: Evidence | None = None
        self.dumping: set[str] = set()
        self.stopping: set[str] = set()
        self.survivors: list[str] = []
        self.order: tuple[str, ...] = ()
        self.slowest = 0.0
        self.origin: int | None = None  # the step that ranks without a step of their own continue from
        self.stepped = time.time()  # when the last step was seen
        self.hanging: Evidence | None = None  # of a hang while something is waited for
        self._next_progress = self._next_words = self._next_flush = 0.0
        self._ridden: set[tuple[str, str | None]] = set()
        self._slow: dict[int, tuple[int, float]] = {}  # rank -> the step and the time from which on it is slow
        self._told: set[tuple[str, str, int | None]] = set()  # in this attempt
        self.doubted: Evidence | None = None  # of storage: of one node, or of all
        self.code: int | None = None
        command = without_secrets_in({"command": list(settings.command)})["command"]  # as the journal has it
        continued = self.cluster.begun and not self.cluster.ended and self.cluster.command == command
        if not continued:
            self.note(
                "begin",
                command=list(settings.command),
                nodes=settings.nodes,
                spares=settings.spares,
                ranks_per_node=settings.ranks_per_node,
                version=__version__,
            )
        for node in settings.exclude:
            self.note("node", node=node, state=OUT, reason="--exclude")
        self.note("decider", pid=os.getpid(), reason="started again from the journal" if continued else "start")
        pending = self.cluster.pending or {}
        if pending.get("action") == "requeue" and pending.get("start") != slurm.start_of_job():
            self.cluster.pending = None  # SLURM has carried it out
        if continued and self.cluster.generation and (self.cluster.running or self.cluster.pending):
            self.to("adopt")

    # The loop

    def run(self) -> int:
        """Work until the run has ended."""
        while self.code is None:
            self.tick()
        deadline = time.monotonic() + 2.0
        for peer in self.peers.values():
            self.tell(peer, "end", code=self.code)
        while self.peers and time.monotonic() < deadline:
            self.exchange_messages(0.05)
        self.note_alerts(self.alerts.close())
        self.journal.close()
        return self.code

    def tick(self) -> None:
        """Take messages, then act by the phase."""
        # Heartbeats that arrive while this process is held, as by a file server, are read in the next tick.
        begun = time.monotonic()
        self.exchange_messages(0.1)
        self.drains.poll()
        if self.journal.left and time.monotonic() > self._next_flush:
            self._next_flush = time.monotonic() + FLUSH_SECONDS
            self.journal.flush()
        self.note_alerts(self.alerts.poll())
        for node, peer in list(self.peers.items()):
            if begun - peer.beat > LOST_SECONDS:
                self.lose(node, f"silent for {LOST_SECONDS:.0f} s")
        getattr(self, f"in_{self.phase}")()

    def to(self, phase: str) -> None:
        """Enter a phase."""
        self.phase, self.since = phase, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds in this phase."""
        return time.monotonic() - self.since

    def note(self, kind: str, **values: Any) -> None:
        """Write a line into the journal and apply it."""
        self.cluster.apply(self.journal.write(kind, self.cluster.generation, **values))

    def note_alerts(self, done: list[tuple[str, dict[str, str]]]) -> None:
        """Write down how alerts were delivered; one that had nowhere to go is no news."""
        for text, delivered in done:
            if delivered:
                self.note("alert", text=text, delivered=delivered)

    def exchange_messages(self, timeout: float) -> None:
        """Wait for messages and handle all that have arrived."""
        writes = [each for each in self.links if each.wants_write]
        poll = select.poll()  # select() ends at 1,024 files
        files = {each.fileno(): each for each in self.links}
        poll.register(self.listening, select.POLLIN)
        for number, each in files.items():
            poll.register(number, select.POLLIN | (select.POLLOUT if each in writes else 0))
        for number, _ in poll.poll(timeout * 1000):
            if number == self.listening.fileno():
                self.accept()
                continue
            each = files[number]
            if each not in self.links:
                continue
            try:
                each.flush()
                for message in each.receive():
                    self.handle(each, message)
            except link.LinkError as error:
                self.drop(each, str(error))
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self.drop(each, f"a message of another version ({type(error).__name__}: {error})")
        for each in [each for each in self.links if each.late]:
            self.drop(each, "no proof that it holds the secret")

    def accept(self) -> None:
        while len(self.links) < PEERS:
            try:
                sock, _ = self.listening.accept()
            except OSError:
                return
            with contextlib.suppress(link.LinkError, OSError):
                self.links.add(link.Link(sock, self.secret, server=True))

    def drop(self, connection: link.Link, reason: str) -> None:
        """Close a connection. Its node has until LOST_SECONDS to connect again."""
        self.links.discard(connection)
        peer = self.by_link.pop(connection, None)
        if not reason.startswith("closed"):
            say(f"refused {peer.node if peer else connection.peer}: {reason}")
            connection.refuse(reason)
        connection.close()
        if self.code is not None and peer is not None and self.peers.get(peer.node) is peer:
            del self.peers[peer.node]

    def tell(self, peer: Peer, kind: str, **values: Any) -> None:
        with contextlib.suppress(link.LinkError, OSError):  # a lost agent is found by its silence
            peer.link.send({"kind": kind, **values})

    # Messages

    def handle(self, connection: link.Link, message: dict[str, Any]) -> None:
        kind, peer = message["kind"], self.by_link.get(connection)
        if kind == "join":
            self.joined(connection, message)
        elif peer is None:
            raise link.LinkError("speaks before it has joined")
        else:
            peer.beat = time.monotonic()
            getattr(self, f"on_{kind}")(peer, message)

    def joined(self, connection: link.Link, message: dict[str, Any]) -> None:
        node = message["node"]
        known = self.peers.get(node)
        if known is not None and known.link in self.links and known.link is not connection:
            if time.monotonic() - known.beat < LOST_SECONDS and known.pid != message["pid"]:
                self.tell_pid_alive(connection, known, message)
            self.links.discard(known.link)
            self.by_link.pop(known.link, None)
            known.link.close()
        peer = Peer(connection)
        peer.node, peer.address, peer.pid = node, message["address"], message["pid"]
        peer.generation = message["generation"]
        peer.running = set(message["running"])
        peer.codes = {int(rank): code for rank, code in message["codes"].items()}
        self.by_link[connection] = self.peers[node] = peer
        if known is None:
            before = f", failed {count} times in 30 days" if (count := self.history.failures[node]) else ""
            self.note("node", node=node, state="joined", reason=peer.address + before)
            if self.cluster.out.get(node) in RETURN and not message["running"]:
                self.note("node", node=node, state="back", reason="its agent answers again, and runs nothing")
        if message["asked"]:
            self.on_asked(peer, {"number": message["asked"][0], "times": 1})
        if message["over"] is not None:
            self.on_ended(peer, message["over"])
        if self.phase == "stop" and node in self.stopping:  # it was killed, or what it was told is lost
            self.tell(peer, "stop", generation=self.cluster.generation, grace=self.grace())
        if node not in self.cluster.nodes or not self.cluster.running:
            if peer.running and self.phase not in ("adopt", "stop"):
                self.tell(peer, "stop", generation=peer.generation, grace=0)
            return
        if peer.generation == self.cluster.generation:
            for rank, code in sorted(peer.codes.items()):
                self.take_exit(peer, rank, code, time.time())
        elif self.phase in ("run", "settle", "adopt"):
            text = "the agent was killed, its ranks have ended, and it has started again"
            self.see(Evidence(time.time(), node, "agent", text, rule="agent_lost", values={"back": True}))

    def tell_pid_alive(self, connection: link.Link, known: Peer, message: dict[str, Any]) -> None:
        """Refuse a second agent of a name while the first one answers from another host."""
        if known.address != message["address"]:
            raise link.LinkError(f"another node is named {known.node}; --node names this one")

    def on_beat(self, peer: Peer, message: dict[str, Any]) -> None:
        self.tell(peer, "beat", echo=message["time"], time=time.time())
        if message["generation"] == self.cluster.generation and self.cluster.running:
            peer.ranks = {int(rank): beat for rank, beat in message["ranks"].items() if isinstance(beat, dict)}
            self.follow_progress()
            self.compare_ranks()

    def on_free(self, peer: Peer, message: dict[str, Any]) -> None:
        if self.cluster.out.get(peer.node) in GONE:  # and not for broken hardware beside it
            self.note("node", node=peer.node, state="back", reason="the processes that survived SIGKILL have ended")

    def on_port(self, peer: Peer, message: dict[str, Any]) -> None:
        if self.phase == "port" and peer.node == self.order[0] and message["generation"] == self.cluster.generation + 1:
            self.start(message["port"])

    def on_started(self, peer: Peer, message: dict[str, Any]) -> None:
        peer.generation = message["generation"]

    def on_exit(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["generation"] == self.cluster.generation:
            self.take_exit(peer, message["rank"], message["code"], message["time"] + message["offset"])

    def take_exit(self, peer: Peer, rank: int, code: int, at: float) -> None:
        peer.running.discard(rank)
        peer.codes[rank] = code
        if code and self.phase in ("run", "adopt", "settle"):
            given = any(e.source == "exit" and e.node == peer.node and e.rank == rank for e in self.evidence)
            text = f"ended with exit code {code}: {meaning(code).text}"
            evidence = Evidence(at, peer.node, "exit", text, rank, None, {"exit_code": code})
            if not given:
                self.evidence.append(evidence)
            self.look(evidence)

    def on_evidence(self, peer: Peer, message: dict[str, Any]) -> None:
        for row in message["rows"]:
            each = Evidence.from_json({**row, "time": row["time"] + message["offset"]})
            if each.rule == "checkpoint_saved":
                if each.values["step"] not in self.cluster.checkpoints:
                    self.note("checkpoint", step=each.values["step"])
                continue
            self.see(each, message["generation"])

    def on_dumped(self, peer: Peer, message: dict[str, Any]) -> None:
        self.dumping.discard(peer.node)

    def on_ended(self, peer: Peer, message: dict[str, Any]) -> None:
        if message["generation"] == self.cluster.generation and peer.node in self.stopping:
            self.stopping.discard(peer.node)
            self.survivors += [f"{peer.node}: {pid}" for pid in message["survivors"]]
        elif not message["survivors"] and self.cluster.out.get(peer.node) in RETURN:
            self.note("node", node=peer.node, state="back", reason="its agent answers again, and its ranks have ended")

    def on_asked(self, peer: Peer, message: dict[str, Any]) -> None:
        if not self.cluster.asked:
            self.cluster.asked = True
            self.note("symptom", evidence=self.agent_says(peer.node, f"asked to end by signal {message['number']}"))
        if (self.cluster.pending or {}).get("action") == "requeue":
            return  # SLURM ends the job's processes
        if not self.cluster.running or self.phase in ("wait", "port", "delay") or message["times"] > 1:
            self.finish(128 + message["number"], "ended by a signal")
            return
        for other in self.active():  # a signal to one node is for the run
            if other is not peer:
                self.tell(other, "save", generation=self.cluster.generation)

    def agent_says(self, node: str, text: str) -> dict[str, Any]:
        return Evidence(time.time(), node, "agent", text).to_json()

    # Evidence

    def active(self) -> list[Peer]:
        """Return the agents of the attempt that are connected or may connect again."""
        return [self.peers[node] for node in self.cluster.nodes if node in self.peers]

    def see(self, evidence: Evidence, generation: int | None = None) -> None:
        """Keep evidence, and look for the cause if it is a sign of a failure."""
        self.evidence.append(evidence)
        rule = self.rules[evidence.rule] if evidence.rule in self.rules else None
        if generation is not None and generation != self.cluster.generation and evidence.source == "rank":
            return
        if rule is None or evidence.node not in self.cluster.nodes or not self.cluster.running:
            return
        if rule.name in TOLD and (key := (rule.name, evidence.node, evidence.rank)) not in self._told:
            self._told.add(key)
            self.judge(evidence, alive=True)
        if rule.role != "root":
            return
        if evidence.values.get("recovered"):
            self._ridden.discard((rule.name, evidence.node))
        elif rule.name == "hang" and self.rides():
            self.hanging = evidence
        elif self.ends_now(evidence):
            self.look(evidence)
        elif rule.action == "ride" and (rule.name, evidence.node) not in self._ridden:
            self._ridden.add((rule.name, evidence.node))
            self.judge(evidence, alive=True)
        elif rule.severity in ("fatal", "high") and (rule.name, evidence.node) not in self._ridden:
            self._ridden.add((rule.name, evidence.node))  # kept: it may explain a failure that follows
            self.note("symptom", evidence=evidence.to_json())
            if rule.action == "exchange" and evidence.source == "storage":
                self.doubted = evidence

    def ends_now(self, evidence: Evidence) -> bool:
        """Whether this alone ends the attempt, though all ranks live: it is sure, or it comes from the agents."""
        rule = self.rules[evidence.rule]
        return rule.name in (*GONE, "hang") or (rule.confidence == "sure" and rule.action in ("exchange", "rollback"))

    def look(self, evidence: Evidence) -> None:
        """Wait a moment for more evidence, then name the cause."""
        if self.phase in ("run", "adopt"):
            self.symptom = evidence
            self.note("symptom", evidence=evidence.to_json())
            for peer in self.active():
                self.tell(peer, "ask")
                peer.asked = time.monotonic()
            if evidence.rule == "hang":
                self.dumping = {peer.node for peer in self.active()}
                for peer in self.active():
                    self.tell(peer, "dump", generation=self.cluster.generation)
            self.to("settle")

    def lose(self, node: str, reason: str) -> None:
        """Take note that a node does not answer any more."""
        peer = self.peers.pop(node)
        self.links.discard(peer.link)
        self.by_link.pop(peer.link, None)
        peer.link.close()
        self.note("node", node=node, state="lost", reason=reason)
        self.stopping.discard(node)
        self.dumping.discard(node)
        if self.cluster.running and node in self.cluster.nodes:
            self.see(Evidence(time.time(), node, "agent", f"the agent is {reason}", rule="node_lost"))

    # Phases

    def available(self) -> list[str]:
        """Return the nodes that an attempt may use, those of the last one first, then the ones with the best history."""
        there = [node for node in self.peers if node not in self.cluster.out and self.peers[node].link in self.links]
        exchanged = (self.cluster.pending or {}).get("nodes_out") or ()  # such a node may be back already
        known = [node for node in self.cluster.nodes if node in there and node not in exchanged]
        others = sorted((node for node in there if node not in known), key=self.badness)
        if self.cluster.generation == 0 or not known:
            good = [node for node in others if not self.history.quarantined(node)]
            others = good + [node for node in others if node not in good]
        return known + others

    def badness(self, node: str) -> tuple[int, str]:
        """How late a spare is taken: by its failures in all runs of the user."""
        return self.history.failures[node], node

    def in_adopt(self) -> None:
        """After a crash of this process: wait for the agents, whose ranks go on."""
        there = self.active()
        if len(there) < len(self.cluster.nodes) and self.seconds < LOST_SECONDS:
            return
        if self.cluster.pending is not None:
            self.begin_stop()
        elif any(peer.generation == self.cluster.generation for peer in there):
            self.stepped = time.time()
            self.to("run")
            missing = [node for node in self.cluster.nodes if node not in self.peers]
            for node in missing:
                self.see(Evidence(time.time(), node, "agent", "the agent has not come back", rule="node_lost"))
            for peer in there:
                if peer.generation == self.cluster.generation:
                    for rank, code in sorted(peer.codes.items()):
                        self.take_exit(peer, rank, code, time.time())
                else:
                    text = "the agent was killed, its ranks have ended, and it has started again"
                    values = {"back": True}
                    self.see(Evidence(time.time(), peer.node, "agent", text, rule="agent_lost", values=values))
        else:
            self.cluster.running = False  # all nodes are new: a job that SLURM has started again
            self.to("wait")

    def in_wait(self) -> None:
        there = self.available()
        enough = len(there) >= self.settings.nodes
        if enough and self.seconds < BETTER_SECONDS and (worse := self.worse(there)):
            return self.say_now_and_then(f"waits for other nodes than {', '.join(worse)}: they failed in earlier runs")
        if not enough and self.seconds > self.patience:
            size = next((size for size in self.cluster.sizes if size <= len(there)), None)
            if size is None and self.settings.requeue and self.patience < JOIN_SECONDS:  # an attempt went before
                reason = f"{len(there)} nodes have come back, too few; SLURM starts the job again"
                self.note("decision", **Decision("requeue", reason).to_json(), start=slurm.start_of_job())
                return self.requeue()
            if size is None and self.seconds > JOIN_SECONDS:
                return self.finish(
                    1, f"{len(there)} of {self.settings.nodes} nodes are there after {JOIN_SECONDS:.0f} s"
                )
            enough = size is not None
        if not enough:
            if self.seconds > 5:
                self.say_now_and_then(
                    f"waits for nodes: {len(there)} of {self.settings.nodes} ({', '.join(there[:20])})"
                )
            return None
        size = next(size for size in (self.settings.nodes, *self.cluster.sizes) if size <= len(there))
        self.order = self.in_order(there, size)
        self.tell(self.peers[self.order[0]], "port", generation=self.cluster.generation + 1)
        self.to("port")
        return None

    def worse(self, there: list[str]) -> list[str]:
        """Return the quarantined nodes that a first attempt would take because others have not joined yet."""
        all_joined = len(self.peers) >= self.settings.nodes + self.settings.spares
        if all_joined or any(node in there for node in self.cluster.nodes):
            return []
        return [node for node in there[: self.settings.nodes] if self.history.quarantined(node)]

    def say_now_and_then(self, text: str) -> None:
        if time.monotonic() > self._next_words:
            self._next_words = time.monotonic() + 30
            say(text)

    def in_order(self, there: list[str], size: int) -> tuple[str, ...]:
        """Return the nodes of the next attempt: a spare takes the place of the node that it replaces."""
        there = there[:size]
        kept = [node for node in self.cluster.nodes if node in there]
        spares = [node for node in there if node not in kept]
        if len(self.cluster.nodes) == size:
            order = [node if node in there else spares.pop(0) for node in self.cluster.nodes]
        else:
            order = kept + spares
        turn = self.cluster.turns % size
        return tuple(order[turn:] + order[:turn]) if self.cluster.turns else tuple(order)

    def in_port(self) -> None:
        if self.order[0] not in self.peers or self.seconds > 5:
            self.to("wait")

    def start(self, port: int) -> None:
        """Start an attempt on the nodes of `order`."""
        here = self.settings.ranks_per_node
        self.look_for_checkpoints()
        again = self.cluster.trained
        resume = self.cluster.before(None) if again else None
        self.cluster.generation += 1
        self.evidence = deque(
            (each for each in self.evidence if each.time > time.time() - LOOKBACK and each.source == "kernel"), KEPT
        )
        self._ridden.clear()
        self._slow, self._told, self.doubted = {}, set(), None
        self.cluster.spares = tuple(node for node in self.available() if node not in self.order)
        self.note("attempt", nodes=list(self.order), world_size=len(self.order) * here, resume_step=resume)
        first = self.peers[self.order[0]]
        for position, node in enumerate(self.order):
            peer = self.peers[node]
            peer.ranks, peer.codes = {}, {}
            peer.running = set(
                range(position * here, position * here + here) if self.settings.each == "rank" else [position]
            )
            self.tell(
                peer,
                "start",
                generation=self.cluster.generation,
                first_rank=position * here,
                node_rank=position,
                nodes=len(self.order),
                address=first.address,
                port=port,
                command=resumed(self.settings, self.cluster.skips) if again else list(self.settings.command),
                turn=self.cluster.turns if len(self.order) == 1 else 0,
            )
        self.slowest, self.stepped, self.hanging, self.origin = 0.0, time.time(), None, None
        self.symptom = None
        say(f"attempt {self.cluster.generation} on {', '.join(self.order[:8])}" + " ..." * (len(self.order) > 8))
        self.to("run")

    def in_run(self) -> None:
        self.cluster.spares = tuple(node for node in self.available() if node not in self.cluster.nodes)
        if self.hanging is not None and not self.rides():
            return self.look(self.hanging)
        if self.doubted is not None and time.time() - self.doubted.time > PROBE_SECONDS:
            doubted, self.doubted = self.doubted, None
            if self.cluster.spares and self.is_alone(doubted):
                return self.look(doubted)
        there = self.active()
        if len(there) == len(self.cluster.nodes) and not any(peer.running for peer in there):
            codes = {code for peer in there for code in peer.codes.values()}
            if codes == {0}:
                self.finish(0, "all ranks have ended with exit code 0")
        return None

    def follow_progress(self) -> None:
        """Take note of steps; the collectors of the nodes look for their absence."""
        beats = [beat for peer in self.active() for beat in peer.ranks.values()]
        names = {beat.get("stage") for beat in beats} if self.cluster.stages else {None}
        if len(names) != 1 or not beats:  # the ranks of two stages
            return
        step, stage = min(beat["step"] for beat in beats), next(iter(names))
        if any(beat.get("step_seconds") is None for beat in beats):  # a rank has made no step yet
            if all(beat["phase"] in ("warm_up", "train") for beat in beats):
                self.origin = step
            return
        seconds = max(float(beat["step_seconds"]) for beat in beats)
        begins = self.cluster.begins_stage(stage, step)
        if not begins and step <= (self.cluster.step or self.cluster.resume_step or 0):
            return
        if begins and self.cluster.step is not None:
            self.note_last_step()  # of the stage before
        self.stepped, self.slowest, self.hanging = time.time(), max(0.98 * self.slowest, seconds), None
        told = {"stage": stage} if stage else {}
        if self.cluster.first_step is None:
            self.note("first_step", step=step, **told, **self.continued())
            self.check_resumed(step)
        elif begins:
            self.note("progress", step=step, step_seconds=round(seconds, 4), **told, **self.continued())
        elif time.monotonic() > self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            self.note("progress", step=step, step_seconds=round(seconds, 4), **told)
        else:
            self.cluster.apply({"kind": "progress", "step": step, "step_seconds": seconds, **told})

    def continued(self) -> dict[str, int]:
        """Return the step that the ranks continue from, where they were heard before their first step."""
        origin, self.origin = self.origin, None
        return {} if origin is None else {"after": origin}

    def is_alone(self, evidence: Evidence) -> bool:
        """Whether no other node says the same: then the fault is the node's, not the file server's."""
        return not any(
            each.rule == evidence.rule and each.source == evidence.source and each.node != evidence.node
            for each in self.evidence
        )

    def compare_ranks(self) -> None:
        """Name ranks that compute longer than their peers; a node alone may have no second rank to compare with."""
        beats = {rank: beat for peer in self.active() for rank, beat in peer.ranks.items() if beat["phase"] == "train"}
        slow = slow_ranks({rank: beat["busy_seconds"] for rank, beat in beats.items() if beat.get("busy_seconds")})
        for rank in self._slow.keys() - slow.keys():
            del self._slow[rank]
        for rank, factor in slow.items():
            step, now = beats[rank]["step"], time.monotonic()
            first, since = self._slow.setdefault(rank, (step, now))
            if step - first >= SLOW_STEPS and now - since >= SLOW_SECONDS:
                busy, node = beats[rank]["busy_seconds"], self.cluster.nodes[rank // self.settings.ranks_per_node]
                text = f"rank {rank} computes for {busy:.3g} s a step, {factor:.1f} times its peers' median"
                values = {"factor": round(factor, 2), "busy_seconds": busy}
                self.see(Evidence(time.time(), node, "agent", text, rank, "slow_rank", values))

    def rides(self) -> bool:
        """Whether something is waited for that may end by itself, such as a file server that does not respond."""
        over = {(each.rule, each.node): each.time for each in self.evidence if each.values.get("recovered")}
        return any(
            each.rule in self.rules
            and self.rules[each.rule].action == "ride"
            and self.rules[each.rule].role == "root"
            and not each.values.get("recovered")
            and over.get((each.rule, each.node), 0) < each.time
            and time.time() - each.time < self.rules[each.rule].ride
            for each in self.evidence
        )

    def check_resumed(self, step: int) -> None:
        expected = self.cluster.resume_step
        if expected is not None and not expected < step <= expected + 1 + int(2 * 2.0 / max(self.slowest, 0.01)):
            text = f"training goes on at step {step}, the newest checkpoint is of step {expected}"
            say(f"WARNING: {text}")
            self.note("symptom", evidence=self.agent_says("", text))

    def in_settle(self) -> None:
        """More evidence may come; then name the cause. Consequences alone wait for a node that is found lost."""
        if self.seconds < SETTLE_SECONDS or self.dumping and self.seconds < DUMP_SECONDS:
            return
        leaving = self.symptom.values.get("exit_code") == ENDED_EARLY and any(peer.running for peer in self.active())
        if self.cluster.asked and leaving and self.seconds < SAVE_SECONDS:
            return
        if self.symptom.rule == "hang":
            self.name_missing()
        said = self.diagnose()
        silent = [peer for peer in self.active() if peer.beat < getattr(peer, "asked", 0.0)]
        explained = said.cause != UNKNOWN and said.role == "root" and said.confidence != "weak"
        if silent and not explained and self.seconds < EXPLAIN_SECONDS:
            return
        self.judge(self.symptom, alive=False, said=said)

    def name_missing(self) -> None:
        """Of the flight recorders' dumps after a hang: add the rank that did not arrive."""
        if any(each.rule == "missing_rank" for each in self.evidence):
            return
        dumps = {each.rank: each.values for each in self.evidence if each.rule == "flight_record"}
        world = [rank for peer in self.active() for rank in peer.ranks]
        ranks, why = missing(dumps, world)
        for rank in ranks:
            node = self.cluster.nodes[rank // self.settings.ranks_per_node]
            self.evidence.append(Evidence(self.symptom.time, node, "agent", why, rank, "missing_rank"))

    def diagnose(self) -> Diagnosis:
        progress = []
        if self.cluster.first_step is not None and self.symptom is not None:
            at = min(self.stepped, self.symptom.time)
            progress = [Evidence(at, "", "progress", "made a step", values={"step": self.cluster.step})]
        since = time.time() - LOOKBACK
        here = (*self.cluster.nodes, "")  # what happens on a spare explains nothing
        found = [
            each for each in self.evidence if each is self.symptom or each.time > since and each.node in here
        ]  # the symptom counts whatever its clock says
        return diagnosis(found + progress, self.rules)

    def judge(self, symptom: Evidence, alive: bool, said: Diagnosis | None = None) -> None:
        """Diagnose, decide, write it down, and begin to carry it out."""
        if said is None:
            said = diagnosis([symptom], self.rules)
        rule = self.rules[said.cause] if said.cause in self.rules else None
        if self.cluster.step is not None and not alive:
            self.note_last_step()
        self.look_for_checkpoints()
        decision = decide(said, self.cluster, rule, alive)
        if not alive and self.cluster.asked and decision.action not in ("done", "stop"):
            decision = replace(decision, action="stop", nodes_out=(), reason=f"{decision.reason}; asked to end")
        self.note("diagnosis", **{name: value for name, value in said.to_json().items()})
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
            self.leave_out(node, said.cause, said.severity == "fatal" and said.confidence == "sure")
        if decision.action == "restart" and said.node and not decision.nodes_out and self.is_nodes_fault(said):
            self.history.add(said.node, said.cause, str(self.settings.folder))  # no other node was there to take over
        self.begin_stop()

    def is_nodes_fault(self, said: Diagnosis) -> bool:
        """Whether a diagnosis is a reason to take another node."""
        if said.cause in GONE:
            return not (said.evidence and said.evidence[0].values.get("back"))
        return said.cause in self.rules and self.rules[said.cause].action == "exchange" and said.confidence != "weak"

    def alert(self, text: str, level: str, said: Diagnosis, decision: dict[str, Any]) -> None:
        """Tell a decision to the user's hook and to W&B."""
        found = said.to_json()
        facts = {name: found.get(name) for name in ("cause", "node", "rank", "severity", "confidence", "evidence")}
        where = {"generation": self.cluster.generation, "step": self.cluster.step, "run": str(self.settings.folder)}
        safe_code = self.rules[said.cause].safe_code if said.cause in self.rules else ""
        self.alerts.send(text, level, **where, **facts, **decision, safe_code=safe_code)

    def note_last_step(self) -> None:
        """Write down the last step, and when it was seen: that may be long ago, as in a hang."""
        seconds = round(self.cluster.step_seconds, 4)
        stage = {"stage": self.cluster.stage_name} if self.cluster.stages and self.cluster.stage_name else {}
        self.note("progress", step=self.cluster.step, step_seconds=seconds, at=self.stepped, **stage)

    def leave_out(self, node: str, cause: str, broken: bool) -> None:
        """Use a node no more, and tell it to the runs that follow. broken: its hardware, so that nobody should use it."""
        self.note("node", node=node, state=OUT, reason=cause)
        self.history.add(node, cause, str(self.settings.folder))
        with contextlib.suppress(OSError):
            slurm.write_failing(self.settings.folder, self.cluster.out)
        if broken and slurm.job() is not None:
            self.drains.start(node, f"zaya aegis: {cause}")

    def begin_stop(self) -> None:
        """End the ranks of the attempt."""
        self.stopping = {peer.node for peer in self.active()}
        self.survivors = []
        for peer in self.active():
            self.tell(peer, "stop", generation=self.cluster.generation, grace=self.grace())
        self.to("stop")

    def grace(self) -> float:
        """Return the seconds that ranks have to save. Those of a broken attempt cannot: they wait for each other."""
        return self.settings.grace if (self.cluster.pending or {}).get("action") == "done" else 0.0

    def in_stop(self) -> None:
        if self.stopping and self.seconds < STOP_SECONDS + self.grace():
            return
        for node in self.stopping - set(self.cluster.out):
            self.leave_out(node, "unkillable", False)
        self.stopping = set()
        unusable = {
            each.node for each in self.evidence if each.rule == "unkillable" and each.node in self.cluster.nodes
        }
        for node in unusable - set(self.cluster.out):
            self.leave_out(node, "unkillable", False)
        self.note("stopped", seconds=round(self.seconds, 3), survivors=self.survivors)
        self.to("delay")

    def in_delay(self) -> None:
        """Carry out what was decided, after its delay."""
        decision = self.cluster.pending or {"action": "restart", "delay": 0.0, "reason": "", "to_step": None}
        if decision["action"] == "stop":
            return self.finish(self.failed_code(), decision["reason"])
        if decision["action"] == "done":
            return self.finish(ENDED_EARLY, decision["reason"])
        if self.seconds < decision["delay"]:
            return None
        if decision["action"] == "requeue":
            return self.requeue()
        if decision["action"] == "rollback" and decision["to_step"] is not None:
            self.put_aside(decision["to_step"])
        self.patience = 0.0 if decision["action"] == "shrink" else REJOIN_SECONDS
        self.history.read()
        return self.to("wait")

    def requeue(self) -> None:
        """Give the job back to SLURM. The journal stays open, so that the next start of the job knows what was."""
        taken, said = slurm.requeue(str(slurm.job()), self.cluster.out)
        say(f"the job was requeued {said}" if taken else f"SLURM refuses to requeue the job: {said}")
        if not taken:
            return self.finish(1, f"too few nodes are left, and SLURM refuses to requeue the job: {said}")
        self.code = REQUEUED
        return None

    def failed_code(self) -> int:
        """Return the exit code of the first rank that failed, as a shell shows it."""
        exits = sorted((each for each in self.evidence if each.source == "exit"), key=lambda each: each.time)
        told = [int(each.values.get("exit_code", 1)) for each in exits]
        last = self.cluster.failures[-1].cause if self.cluster.failures else ""
        code = next((code for code in told if code == 2), told[0] if told else HANG if last == "hang" else 1)
        return 128 - code if code < 0 else code or 1

    def look_for_checkpoints(self) -> None:
        """Write down checkpoints that are new. A folder that has its name and a manifest is complete."""
        folder = self.settings.checkpoints
        if folder is None or self.rides():  # a file server that does not respond would hold this process too
            return
        with contextlib.suppress(OSError):
            there = {
                int(found[1]): entry
                for entry in os.scandir(folder)
                if (found := COMPLETE.fullmatch(entry.name))
                and os.path.exists(os.path.join(entry.path, "manifest.json"))
            }
            self.cluster.checkpoints = [step for step in self.cluster.checkpoints if step in there]
            for step in sorted(set(there) - set(self.cluster.checkpoints)):
                self.note("checkpoint", step=step)

    def put_aside(self, to_step: int) -> None:
        """Give the checkpoints after `to_step` names that no load finds; nothing is deleted."""
        from zaya_plugin.checkpoint import on_disk

        for aside in on_disk.put_aside_from(Path(self.settings.checkpoints), to_step + 1):
            say(f"a checkpoint after step {to_step} is put aside: {aside.name}")
        self.look_for_checkpoints()

    def finish(self, code: int, reason: str) -> None:
        """End the run."""
        if self.code is None:
            self.code = code
            if self.cluster.step is not None:
                self.note_last_step()
            self.look_for_checkpoints()
            self.note("end", code=code, reason=reason)
            say(f"end, exit code {code}: {reason}")
            level = "info" if code in (0, ENDED_EARLY) else "error"
            self.alerts.send(f"end, exit code {code}: {reason}", level, action="end", code=code, step=self.cluster.step)


def resumed(settings: Settings, skips: Sequence[tuple[int, int]] = ()) -> list[str]:
    """Return the command of a later attempt: `zaya train` continues from its newest checkpoint, and leaves out the data
    of `skips`, first and last steps, beside what the recipe leaves out.
    """
    if not is_train(settings.command):
        return list(settings.command)
    added = {"resume": "auto"}
    if skips:
        steps = [*settings.skip_steps, *(f"{first}-{last}" for first, last in skips)]
        added["data.skip_steps"] = f"[{','.join(steps)}]"
    kept = [word for word in settings.command if word.lstrip("+").partition("=")[0] not in added]
    return kept + [f"{name}={value}" for name, value in added.items()]


def main(argv: list[str]) -> int:
    """Run the decision maker: settings, the file of the secret, and the number of the listening socket."""
    die_with_parent(signal.SIGKILL)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection a node: 1,024 files are too few
    for number in (signal.SIGTERM, signal.SIGINT):  # the agent says that the run is to end
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.from_word(argv[0])
    listening = socket.socket(fileno=int(argv[2]))
    Decider(settings, link.read_secret(Path(argv[1])), listening).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

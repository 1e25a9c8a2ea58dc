# SPDX-License-Identifier: Apache-2.0
"""The agents that are connected to the decider, and the messages from and to them."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from zaya_plugin.aegis import link
from zaya_plugin.aegis.diagnose.evidence import print_line
from zaya_plugin.aegis.protocol import BEAT_SECONDS, Join, Leave, message_of, to_json

LOST_SECONDS = 3 * BEAT_SECONDS
MAX_CONNECTIONS = 4096  # those that have not proved yet that they hold the secret count too


class Peer:
    """A connected agent. beat: the time of its last message; asked: of the last BeatRequest (monotonic).

    ranks: their heartbeats. running, codes: its ranks that run, and the exit codes of the others.
    """

    def __init__(self, connection: link.Link, message: Join):
        self.link, self.node, self.address, self.pid = connection, message.node, message.address, message.pid
        self.beat, self.asked, self.generation = time.monotonic(), 0.0, message.generation
        self.ranks: dict[int, dict[str, Any]] = {}
        self.running: set[int] = set(message.running)
        self.codes = {int(rank): int(code) for rank, code in message.codes.items()}


class Peers:
    """The agents by node, also those whose connection has just ended: they have LOST_SECONDS to connect again."""

    def __init__(self, secret: bytes, listening: socket.socket):
        self.secret, self.listening = secret, listening
        self.by_node: dict[str, Peer] = {}
        self.by_link: dict[link.Link, Peer | None] = {}  # open connections; None: it has not joined yet

    def of(self, nodes: Iterable[str]) -> list[Peer]:
        """Return the agents of `nodes` that are connected or may connect again."""
        return [self.by_node[node] for node in nodes if node in self.by_node]

    def connected(self) -> list[str]:
        """Return the nodes whose agents are connected now."""
        return [node for node, peer in self.by_node.items() if peer.link in self.by_link]

    def silent(self, now: float) -> list[str]:
        """Return the nodes without a message for too long."""
        return [node for node, peer in self.by_node.items() if now - peer.beat > LOST_SECONDS]

    def join(self, connection: link.Link, message: Join) -> Peer:
        """Add the agent that has joined, in place of one of the same node. Raises LinkError if its name is that of
        another host which answers.
        """
        peer = Peer(connection, message)
        known = self.by_node.get(peer.node)
        answers = known is not None and known.link in self.by_link and time.monotonic() - known.beat < LOST_SECONDS
        if answers and known.pid != peer.pid and known.address != peer.address:
            raise link.LinkError(f"another node is named {known.node}; --node names this one")
        if known is not None and known.link is not peer.link:
            self.forget_link(known)
        self.by_link[peer.link] = self.by_node[peer.node] = peer
        return peer

    def remove(self, node: str) -> None:
        """Forget a node that is lost."""
        self.forget_link(self.by_node.pop(node))

    def forget_link(self, peer: Peer) -> None:
        self.by_link.pop(peer.link, None)
        peer.link.close()

    def send(self, peer: Peer, message: Any) -> None:
        with contextlib.suppress(link.LinkError, OSError):  # a lost agent is known by its silence
            peer.link.send(to_json(message))

    def exchange(self, timeout: float, handle: Callable[[link.Link, Any], None]) -> None:
        """Wait for messages and handle all that have arrived."""
        poll = select.poll()  # select() ends at 1,024 files
        files = {connection.fileno(): connection for connection in self.by_link}
        poll.register(self.listening, select.POLLIN)
        for number, connection in files.items():
            poll.register(number, select.POLLIN | (select.POLLOUT if connection.wants_write else 0))
        for number, _ in poll.poll(timeout * 1000):
            if number == self.listening.fileno():
                self._accept()
            elif (connection := files[number]) in self.by_link:
                self._receive(connection, handle)
        for connection in [connection for connection in self.by_link if connection.late]:
            self._drop(connection, "no proof that it holds the secret")

    def _receive(self, connection: link.Link, handle: Callable[[link.Link, Any], None]) -> None:
        try:
            connection.flush()
            for body in connection.receive():
                handle(connection, message_of(body))
        except link.LinkError as error:
            self._drop(connection, str(error))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            self._drop(connection, f"a message of another version ({type(error).__name__}: {error})")

    def _accept(self) -> None:
        while len(self.by_link) < MAX_CONNECTIONS:
            try:
                sock, _ = self.listening.accept()
            except OSError:
                return
            with contextlib.suppress(link.LinkError, OSError):
                self.by_link[link.Link(sock, self.secret, server=True)] = None

    def _drop(self, connection: link.Link, reason: str) -> None:
        peer = self.by_link.pop(connection, None)
        if not reason.startswith("closed"):
            print_line(f"refused {peer.node if peer else connection.peer}: {reason}")
            connection.refuse(reason)
        connection.close()

    def leave(self, code: int, seconds: float) -> None:
        """Send the end of the run to all agents, and wait until they have left."""
        for peer in self.by_node.values():
            self.send(peer, Leave(code))
        deadline = time.monotonic() + seconds
        while any(peer.link in self.by_link for peer in self.by_node.values()) and time.monotonic() < deadline:
            self.exchange(0.05, lambda connection, message: None)

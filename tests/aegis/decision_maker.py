# SPDX-License-Identifier: Apache-2.0
"""A decider without processes: its agents are stand-ins, whose messages a test sends."""

from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.protocol import message_of


class Wire:
    """The connection of an agent."""

    def __init__(self):
        self.sent = []

    def send(self, body):
        self.sent.append(message_of(body))

    def close(self):
        pass


def peer_of(maker, node):
    return maker.peers.by_node[node]


def rows(maker, kind):
    return [row for row in read(maker.settings.journal) if row["kind"] == kind]


def settle(maker):
    """Let the time pass in which more evidence could arrive."""
    maker.clock.since -= 60.0
    maker.settle()

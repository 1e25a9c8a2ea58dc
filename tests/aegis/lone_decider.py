# SPDX-License-Identifier: Apache-2.0
"""A decider without processes: its agents are stand-ins, whose messages a test sends."""

from tests.aegis.journals import lines
from zaya_plugin.aegis.protocol import message_of


class Wire:
    """The connection of an agent."""

    def __init__(self):
        self.sent = []

    def send(self, body):
        self.sent.append(message_of(body))

    def close(self):
        pass


def peer_of(decider, node):
    return decider.peers.by_node[node]


def rows(decider, kind):
    return lines(decider.settings.journal, kind)


def settle(decider):
    """Let the time pass in which more evidence could arrive."""
    decider.clock.since -= 60.0
    decider.settle()

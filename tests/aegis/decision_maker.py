# SPDX-License-Identifier: Apache-2.0
"""A decision maker without processes: its agents are made here, and say what a test lets them say."""

from zaya_plugin.aegis.journal import read


class Wire:
    """The connection of an agent."""

    def __init__(self):
        self.sent = []

    def send(self, body):
        self.sent.append(body)

    def close(self):
        pass


def peer_of(maker, node):
    return maker.peers.by_node[node]


def rows(maker, kind):
    return [row for row in read(maker.settings.journal) if row["kind"] == kind]


def settle(maker):
    """Let the time pass in which more evidence could come."""
    maker.phase.since -= 60.0
    maker.in_settle()

# SPDX-License-Identifier: Apache-2.0
"""Batch systems' signals in a host: the one that Megatron handles, or what they do without the plugin."""

import argparse
import signal

import pytest

from zaya_plugin.ground.parent_death import BATCH_SIGNALS
from zaya_plugin.hosts.guest import relay_batch_signals


@pytest.mark.parametrize("known", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("handles", [True, False])
def test_a_batch_signal_is_megatrons_signal_where_megatron_handles_one(handles, known):
    received = []
    before = {number: signal.getsignal(number) for number in (*BATCH_SIGNALS, known)}
    try:
        for number in before:  # as Megatron does for one of them
            signal.signal(number, lambda number, frame: received.append(number))
        relay_batch_signals(argparse.Namespace(exit_signal_handler=handles, exit_signal=known))
        for number in BATCH_SIGNALS:
            signal.raise_signal(number)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == (3 * [known] if handles else list(BATCH_SIGNALS))

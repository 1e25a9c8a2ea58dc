# SPDX-License-Identifier: Apache-2.0
"""The heartbeat of a guest's rank in the host's training loop, where `zaya aegis run` asks for it."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from zaya_plugin.hosts.measured_steps import graph_warm_up
from zaya_plugin.patches.hooks import TRAINING
from zaya_plugin.training import heartbeat


class GuestHeartbeat:
    """Tells phases and steps of Megatron's loop.

    Args:
        args: the host's namespace.
        resumed_at: the step that the host's loop continues from.
    """

    def __init__(self, args: argparse.Namespace, resumed_at: int):
        self.args, self.resumed_at, self.step = args, resumed_at, resumed_at
        self.before: float | None = None  # the end of the last step, unless something else came after it
        heartbeat.start(args.rank)
        heartbeat.phase("build", resumed_at)

    def hooks(self) -> list[tuple[str, Callable]]:
        """Return the replaced symbols with our functions; none without a supervisor."""
        if not heartbeat.is_on():
            return []
        return [
            (TRAINING + "train", self.train),
            (TRAINING + "train_step", self.train_step),
            (TRAINING + "evaluate_and_print_results", self.evaluate),
        ]

    def train(self, train, *positional, **named):
        """Run Megatron's loop between the phases warm_up and end."""
        heartbeat.phase("warm_up", self.step)
        found = train(*positional, **named)
        heartbeat.phase("end")
        return found

    def train_step(self, train_step, *positional, **named):
        """Run Megatron's step and tell that it has finished on the host: the device may still work on it."""
        begun = time.monotonic() if self.before is None else self.before
        found = train_step(*positional, **named)
        done = getattr(self.args, "curr_iteration", None)  # before this step; counts steps that are skipped
        self.step = self.step + 1 if done is None else done + 1
        self.before = time.monotonic()
        warm = self.step > self.resumed_at + graph_warm_up(self.args)
        heartbeat.step(self.step, self.before - begun, warm=warm)
        return found

    @heartbeat.during("validate")
    def evaluate(self, evaluate_and_print_results, *positional, **named):
        """Run Megatron's validation."""
        self.before = None
        return evaluate_and_print_results(*positional, **named)

# SPDX-License-Identifier: Apache-2.0
"""The rates that a device is expected to reach: those of the cluster recipes (`machine.*`), by the device's name."""

from zaya_plugin.config.schema import MachineConfig
from zaya_plugin.plan.known_machine import CPU

SLOW_BELOW = 0.8  # of the expected rate
# This project has run on these; the rates of every other machine are predictions.
RUN_ON = ("H100", "H200")


def described(machine: MachineConfig | None, **rates: float) -> dict:
    """Return `rates` for the record, with their kind and sources."""
    if machine is None:
        return {"kind": "none: no recipe under recipes/cluster/ names this device"}
    kind = "floor" if machine is CPU else "measured" if machine.name in RUN_ON else "PREDICTION, not measured"
    return {**rates, "kind": kind, "slow_below": SLOW_BELOW, "sources": machine.sources}

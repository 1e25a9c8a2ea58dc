# SPDX-License-Identifier: Apache-2.0
"""The meaning of exit codes of ranks and launchers, and the row of rules.yaml that each is evidence of."""

from __future__ import annotations

import signal
from dataclasses import dataclass


@dataclass(frozen=True)
class Meaning:
    """text: one sentence for a person. rule: the row of rules.yaml; None for 0."""

    text: str
    rule: str | None


HANG = 100  # of Primus-SaFE; `zaya aegis run` ends with it too, if it gives up on a run that hangs
CODES = {
    0: Meaning("It is done.", None),
    1: Meaning("It failed; its log says why.", "rank_failed"),
    2: Meaning("A setting, the command or the data are wrong; its message says what is allowed.", "user_error"),
    16: Meaning("Megatron saved a checkpoint and asks that the step is repeated on another GPU.", "rerun_other_gpu"),
    17: Meaning("Megatron ended the run because a result was wrong; the log has its verdict.", "validation_failed"),
    75: Meaning("It was asked to end by a signal, saved, and left before its last step.", "ended_early"),
    76: Meaning("A guard inside the run asks to go back to an earlier checkpoint.", "roll_back_asked"),
    93: Meaning("A launcher of NVRx says that restarts do not help.", "no_requeue"),
    HANG: Meaning("A supervisor of Primus-SaFE found that the run hangs.", "hang"),
    124: Meaning("The program `timeout` ended it.", "command_timeout"),
    126: Meaning("The command may not be executed.", "wrong_command"),
    127: Meaning("The command was not found.", "wrong_command"),
}
SIGNALS = {
    signal.SIGKILL: Meaning("It was killed (SIGKILL), as the kernel does when memory runs out.", "sigkill"),
    signal.SIGSEGV: Meaning("It used memory of the host that it does not own (SIGSEGV).", "segfault"),
    signal.SIGBUS: Meaning("Memory that was mapped from a file is gone (SIGBUS).", "bus_error"),
    signal.SIGABRT: Meaning("A library ended it (SIGABRT); the lines before say why.", "abort"),
    signal.SIGILL: Meaning("The processor does not know an instruction (SIGILL).", "illegal_instruction"),
    signal.SIGTERM: Meaning(
        "It was asked to end (SIGTERM), as a launcher does when another rank has failed.", "terminated"
    ),
    signal.SIGINT: Meaning("It was interrupted (SIGINT, Ctrl-C).", "interrupted"),
}


def meaning(code: int) -> Meaning:
    """Return what an exit code means, as Python shows it (-9) or as a shell does (137)."""
    if code in CODES:
        return CODES[code]
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number)
    except ValueError:
        return Meaning(f"It failed with exit code {code}; its log says why.", "rank_failed")
    return SIGNALS.get(name) or Meaning(f"It was ended by a signal ({name.name}).", "signal")

# SPDX-License-Identifier: Apache-2.0
"""Opcode name -> builder. A builder takes a decoded Instruction once and returns the function that executes it on a
Machine.
"""

import re
from collections.abc import Callable

from tests.gfx942.emulator.faults import UnknownInstruction

Run = Callable[[object], None]
_BUILDERS: dict[str, Callable[..., Run]] = {}
_PATTERNS: list[tuple[re.Pattern, Callable[..., Run]]] = []


def opcode(*names: str):
    """Register a builder `build(instruction) -> run(machine)` for these opcodes (without _e32, _e64, _sdwa, _dpp)."""

    def register(build):
        for name in names:
            assert name not in _BUILDERS, f"opcode {name} registered twice"
            _BUILDERS[name] = build
        return build

    return register


def opcode_pattern(pattern: str):
    """Register `build(instruction, match) -> run(machine)` for opcodes that the pattern matches in full."""

    def register(build):
        _PATTERNS.append((re.compile(pattern), build))
        return build

    return register


def build(instruction) -> Run:
    """The executing function of an instruction; UnknownInstruction names what is missing."""
    found = _BUILDERS.get(instruction.opcode)
    if found is not None:
        return found(instruction)
    for pattern, pattern_build in _PATTERNS:
        match = pattern.fullmatch(instruction.opcode)
        if match:
            return pattern_build(instruction, match)
    raise UnknownInstruction(f"no semantics for opcode {instruction.name}")


def known_opcodes() -> list[str]:
    return sorted(_BUILDERS)

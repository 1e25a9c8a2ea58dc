# SPDX-License-Identifier: Apache-2.0
"""A line of `zaya verify`'s page: what it examines, and what it found. No torch import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATES = ("pass", "slow", "wrong", "skipped")


@dataclass
class Outcome:
    """The result of a line.

    Attributes:
        state: one of STATES. reason: one sentence for the page. figures: what was measured.
        expected: what it was compared with, and where that comes from. overrides: recipe keys that follow from it.
        traceback: of an exception, or the end of the log of a process that ended.
    """

    state: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    traceback: str = ""

    def __post_init__(self):
        assert self.state in STATES, self.state


@dataclass(frozen=True)
class Line:
    """A line of the page.

    Attributes:
        does: what it examines. on_cpu, on_gpu: its size on each. function: "module:function"; it takes a Setting and
            returns an Outcome. limit_s: seconds after which its process is killed. argument: passed after the Setting.
    """

    name: str
    does: str
    on_cpu: str
    on_gpu: str
    function: str
    limit_s: int
    argument: str | None = None


@dataclass(frozen=True)
class Setting:
    """The machine that is examined.

    Attributes:
        device: "cuda" (ROCm too) or "cpu". devices: their number, 0 on a CPU. name: of the first device, in torch.
        folder: for files of the examination. say: shows what a line is doing. chosen: the command's --device.
    """

    device: str
    devices: int
    name: str
    folder: Path
    say: Callable[[str], None] = lambda text: None
    chosen: str = "auto"

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

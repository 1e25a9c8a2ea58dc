# SPDX-License-Identifier: Apache-2.0
"""The checks of `zaya doctor`, `zaya verify` and `zaya verify --nodes`, in the order in which they run.
No torch import.

A command (commands/machines.py) takes its rows of CHECKS; each runs in a process of its own (check_process.py), which
calls the row's function and returns its Outcome; examination.py prints and writes them.
A new check is a row and its function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hip_ops.versions import VERSIONS

STATES = ("pass", "slow", "wrong", "unsupported", "skipped")
DOCTOR, DOCTOR_ALL, VERIFY, NODES = "doctor", "doctor --all", "verify", "verify --nodes"
PACKAGE = "zaya_plugin.machines."
LOG_LINES = 30  # of a failed check, for the record


@dataclass
class Outcome:
    """The result of a check.

    Attributes:
        state: one of STATES; unsupported: it fails, and the machine's recipe does not use it. reason: one sentence for
            the page. figures: the measurements, for the record.
        expected: what they were compared with, and the source of that. overrides: recipe keys that follow.
        traceback: of an exception, or the end of the log of a process that ended.
        details: further lines for the page. compared: figure -> device or "" -> value, which `--nodes` compares
            between nodes.
    """

    state: str
    reason: str
    figures: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    traceback: str = ""
    details: list[str] = field(default_factory=list)
    compared: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self):
        assert self.state in STATES, self.state


@dataclass(frozen=True)
class Setting:
    """The machine that is examined.

    Attributes:
        device: "cuda" (ROCm too) or "cpu". devices: their number, 0 on a CPU. name: of the first device, in torch.
        folder: for files of the examination. say: shows the progress of a check. chosen: the command's --device.
        storage: the folder whose file system the check `storage` measures.
    """

    device: str
    devices: int
    name: str
    folder: Path
    say: Callable[[str], None] = lambda text: None
    chosen: str = "auto"
    storage: Path = Path(".")

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        measures: what it reads or measures. function: "module:function" of this folder; it takes a Setting and returns
            an Outcome. verdict: when it is slow or wrong. on_cpu, on_gpu: its size on each; empty: none.
        commands: those that run it. limit_s: seconds after which its process is killed. argument: passed after the
            Setting. needs: a key of NEEDS; without that the check is skipped.
    """

    name: str
    measures: str
    function: str
    verdict: str = ""
    on_cpu: str = ""
    on_gpu: str = ""
    commands: tuple[str, ...] = (VERIFY,)
    limit_s: int = 240
    argument: str | None = None
    needs: str = ""


def _megatron_loop(setting: Setting) -> str | None:
    from zaya_plugin import compat

    version = compat.core_version()
    return None if compat.zaya_train_fits() else f"megatron.core {version} without the loop that `zaya train` calls"


# What a check can need -> the reason why this machine lacks it, or None.
NEEDS: dict[str, Callable[[Setting], str | None]] = {
    "megatron.training of 0.19 or 0.20": _megatron_loop,
    "two devices, or a CPU": lambda setting: "one device" if setting.devices == 1 else None,
}
LOOP, TWO_DEVICES = NEEDS

ROWS = (
    Check(
        "known_problems",
        "the rules of known problems, and missing packages",
        "known_problems:known_problems",
        "wrong: training cannot start",
        commands=(DOCTOR, VERIFY),
        limit_s=120,
    ),
    Check("packages", "the packages that training needs", "installed:packages", commands=(DOCTOR,), argument="needed"),
    Check("hosts", "the hosts that this environment can be", "installed:hosts", commands=(DOCTOR,)),
    Check("devices", "the devices of torch", "installed:devices", "wrong: no import of torch", commands=(DOCTOR,)),
    Check(
        "verified_code",
        "the share of a step that runs in code whose bytes ship verified (predicted)",
        "verified_code:verified_code",
        commands=(DOCTOR,),
    ),
    Check(
        "optional_packages",
        "the packages that some options need",
        "installed:packages",
        commands=(DOCTOR_ALL,),
        argument="optional",
    ),
    Check("kernels", "the version of each operator of hip_ops", "installed:kernels", commands=(DOCTOR_ALL,)),
    Check("host_changes", "every change of a host, with its reason", "installed:host_changes", commands=(DOCTOR_ALL,)),
    Check(
        "environment",
        "versions, firmware, number of devices, mapped HIP runtimes, and the hash of the kernels' library",
        "software:environment",
        "wrong: missing devices, two HIP runtimes, a damaged library",
        commands=(VERIFY, NODES),
        limit_s=120,
    ),
    Check(
        "rates",
        "a copy and a large matrix product on every device",
        "hardware:rates",
        "slow: below 80 % of the recipe's rates; wrong: wrong numbers",
        "32 MiB, 512 x 512 in fp32",
        "1 GiB, 8192 x 8192 in bf16",
        commands=(VERIFY, NODES),
        limit_s=120,
    ),
    *(
        Check(
            folder,
            f"every version of the kernels of {folder}: error in ULP against fp64, and speed compared with a copy or a "
            "matrix product",
            "operators:operators",
            "slow: another version is faster, or a small share of the copy or product; wrong: a large error",
            "the reference, small shapes",
            "shapes of ZAYA1-base, 16,384 tokens",
            argument=folder,
        )
        for folder in VERSIONS
    ),
    Check(
        "conditions",
        "the kernels that run, on two streams, in a captured graph and on a full device, twice with equal bits",
        "operators:conditions",
        "wrong: a difference from the reference; unsupported: an error in the capture of a version that no step calls",
        "a plain call of the versions that a CPU has",
        "the self-check's examples on the first device",
        limit_s=420,
    ),
    Check(
        "all_reduce",
        "a sweep of all-reduces",
        "collectives:all_reduce",
        "slow: below 80 % of the links' rate; wrong: wrong sums",
        "two processes over gloo, 1 KiB to 4 MiB",
        "all devices, 4 KiB to 1 GiB",
        commands=(VERIFY, NODES),
        needs=TWO_DEVICES,
    ),
    Check(
        "graph_capture",
        "a graph with a collective in it, captured and replayed",
        "collectives:graph_capture",
        "wrong: it fails; unsupported: it is refused with an error, and the machine's recipe has cluster.graphs=none",
        "two processes, without a graph",
        "one or two devices, 30 s",
        limit_s=120,
    ),
    Check(
        "demo_losses",
        "10 steps of the demo in fp32",
        "short_training:losses",
        "wrong: more than 1e-5 from the stored losses",
        "one process",
        "the same numbers, on one device",
        needs=LOOP,
    ),
    Check(
        "zaya1_base",
        "a short step by `zaya bench step`",
        "short_training:step",
        "slow: a small share of the matrix-product rate; wrong: losses unlike those of random tokens",
        "a small ZAYA, one process",
        "as many of the 40 layers as fit, all devices, 16,384 random tokens on each",
        limit_s=420,
        needs=LOOP,
    ),
    Check(
        "hazards",
        "missing wait states in the shipped library and objects and in those of Triton's caches, torch.compile's too",
        "software:hazards",
        "wrong: a hazard, with the override that avoids the kernel, or an unreadable file; skipped: on ROCm no kernel of "
        "torch.compile to read",
    ),
    Check(
        "links",
        "ports of the training network, PCIe links and error counters",
        "hardware:links",
        "wrong: a port or link is down or narrow, or an uncorrectable error was counted",
        commands=(NODES,),
        limit_s=60,
    ),
    Check(
        "storage",
        "a synced write of 64 MiB to the folder of --storage",
        "hardware:storage",
        "wrong: no write, or none in time",
        commands=(NODES,),
        limit_s=120,
    ),
)
CHECKS = {check.name: check for check in ROWS}


def checks_of(*commands: str) -> list[Check]:
    """Return the checks that these commands run."""
    return [check for check in CHECKS.values() if set(commands) & set(check.commands)]


def end_of(text: str) -> str:
    """Return the last lines of a log."""
    return "\n".join(text.splitlines()[-LOG_LINES:])


def last_line(text: str) -> str:
    """Return the last line of a log that is not empty, without the launcher's line that names its file."""
    lines = (line.strip() for line in text.splitlines()[::-1])
    return next((line for line in lines if line and not line.startswith("zaya: complete log")), "no message")

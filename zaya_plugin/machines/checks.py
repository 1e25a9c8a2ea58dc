# SPDX-License-Identifier: Apache-2.0
"""The checks of `zaya doctor`, `zaya verify` and `zaya verify --nodes`, in the order in which they run.
No torch import.

A command (commands/machines.py) takes its rows of CHECKS; each runs in a process of its own (check_process.py), which
calls the row's function and returns its Outcome; examination.py prints and writes them.
A new check is a row and its function.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hip_ops.versions import VERSIONS

STATES = ("pass", "slow", "wrong", "unsupported", "skipped")
DOCTOR, DOCTOR_ALL, VERIFY, NODES = "doctor", "doctor --all", "verify", "verify --nodes"
PACKAGE = "zaya_plugin.machines."
LOG_LINES = 30  # of a failed check, for the record
MI300X_TARGET = "gfx942"  # whose library a machine without AMD's devices reports on


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

    @property
    def on_rocm(self) -> bool:
        import torch

        return not self.on_cpu and torch.version.hip is not None


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        measures: what it reads or measures. function: "module:function" of this folder; it takes a Setting and returns
            an Outcome. verdict: when it is slow or wrong. on_cpu, on_gpu: its size on each; empty: none.
        remedy: what an MI300X is compared with, and what to do otherwise (docs/checks.md). commands: those that run
            it. limit_s: seconds after which its process is killed. argument: passed after the
            Setting. needs: a key of NEEDS; without that the check is skipped.
    """

    name: str
    measures: str
    function: str
    verdict: str = ""
    on_cpu: str = ""
    on_gpu: str = ""
    remedy: str = ""
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
        remedy="No device or fewer than 8: docs/mi300x.md, step 1; under SLURM --gpus-per-node=8. To examine "
        "fewer on purpose: HIP_VISIBLE_DEVICES=0,1, none: --device cpu. Two HIP runtimes: the reason "
        "names the files. A damaged library: reinstall the package. Right is `library gfx942 as shipped, "
        "objects as shipped`",
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
        remedy="600 TFLOP/s and 4.33 TB/s (PREDICTION). Wrong: bad memory, take the node out. One device slow: "
        "amd-smi monitor (clock, temperature, power cap), ECC; take the node out. All slow: the power "
        "cap, another process",
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
            remedy="Wrong: cluster.kernel_overrides.<operator>=<another version>, and send verify.json. Slow: "
            "use the override that is printed",
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
        remedy="Wrong: the reason names the operator; set cluster.kernel_overrides.<operator>=<another version>,"
        " and send verify.json. Unsupported is expected of grouped_mm in a captured graph, where torch's "
        "product waits for the host (read in its source, not run)",
        limit_s=420,
    ),
    Check(
        "all_reduce",
        "a sweep of all-reduces",
        "collectives:all_reduce",
        "slow: below 80 % of the links' rate; wrong: wrong sums",
        "two processes over gloo, 1 KiB to 4 MiB",
        "all devices, 4 KiB to 1 GiB",
        remedy="336 GB/s a device at 1 GiB (PREDICTION). rocm-smi --showtopo: every pair must be XGMI with one "
        "hop. RCCL of ROCm 7.1.1 is slow on Pollara NICs (ROCm/legacy-rocm-build#5717), which concerns "
        "several nodes",
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
        remedy="Unsupported: torch before 2.11, whose watchdog queries events during a capture, which HIP "
        "refuses (pytorch/pytorch#175377, #176942). Nothing to do: the MI300X recipes have "
        "cluster.graphs=none. A hang, another signal and wrong sums are wrong with every recipe: send "
        "verify.json. Where the recipe uses graphs: train with the override that is printed",
        limit_s=120,
    ),
    Check(
        "demo_losses",
        "10 steps of the demo in fp32",
        "short_training:losses",
        "wrong: more than 1e-5 from the stored losses",
        "one process",
        "the same numbers, on one device",
        remedy="The operators' checks and `conditions` name the wrong operator; if all pass, send verify.json",
        needs=LOOP,
    ),
    Check(
        "zaya1_base",
        "a short step by `zaya bench step`",
        "short_training:step",
        "slow: a small share of the matrix-product rate; wrong: losses unlike those of random tokens",
        "a small ZAYA, one process",
        "as many of the 40 layers as fit, all devices, 16,384 random tokens on each",
        remedy="The first loss is 12.887 within 0.1, all of them ln 262,272 = 12.48 within 10 %. Slow: compare "
        "`parts` in the record with those in benchmarks/results/step40-h200.json",
        limit_s=420,
        needs=LOOP,
    ),
    Check(
        "hazards",
        "missing wait states in the shipped library and objects and in those of Triton's caches, torch.compile's too",
        "software:hazards",
        "wrong: a hazard, with the override that avoids the kernel, or an unreadable file; skipped: on ROCm no kernel of "
        "torch.compile to read",
        remedy="Skipped without llvm-objdump: apt-get install rocm-llvm (not looked at in a container); the "
        "shipped library was scanned before it was shipped. A kernel of Triton: train with the override "
        "that is printed, cluster.kernel_overrides.<operator>=<another version>, or "
        "cluster.environment.TORCHDYNAMO_DISABLE=1 for one of torch.compile; the scan reports it as long "
        "as its file exists, so delete that folder (TRITON_CACHE_DIR, ~/.triton/cache, torch.compile's "
        "torchinductor_<user>/triton) before the next scan",
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

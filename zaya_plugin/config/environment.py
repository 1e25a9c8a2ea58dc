# SPDX-License-Identifier: Apache-2.0
"""The environment variables that this project and its launcher read as a number or a choice, and what each allows.

Every start and every dry run compares the environment with this table before anything else, and cluster.environment of
the recipe too. A variable that is set and empty counts as not set. Those that an outer launcher sets depend on each
other: `zaya_plugin.run.rank_plan` checks them. Imports no torch.
"""

import re
from collections.abc import Callable, Iterator, Mapping

from hip_ops.runtime.compilers import AMD_ARCHITECTURES
from hip_ops.versions import KERNELS, read_selection
from zaya_plugin.ground.errors import message


def _matches(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text, re.ASCII) is not None


def _selects_kernels(text: str) -> bool:
    try:
        read_selection(text)
    except ValueError:
        return False
    return True


SWITCH = ("0, 1", _matches("[01]"))
WHOLE = ("a whole number", _matches(r"[0-9]{1,9}"))
# Name -> what is allowed, and whether a value is.
VARIABLES: dict[str, tuple[str, Callable[[str], bool]]] = {
    "OMP_NUM_THREADS": ("a whole number from 1 to 9999", _matches(r"0*[1-9][0-9]{0,3}")),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("a whole number from 1 to 32", _matches(r"[1-9]|[12][0-9]|3[0-2]")),
    "CUBLAS_WORKSPACE_CONFIG": ("such as :4096:8 or :16:8", _matches(r"(:[0-9]{1,9}:[0-9]{1,9})+")),
    "NVIDIA_TF32_OVERRIDE": SWITCH,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": SWITCH,
    "TORCHDYNAMO_DISABLE": SWITCH,
    "TRITON_INTERPRET": SWITCH,
    "TORCH_DISTRIBUTED_DEBUG": ("OFF, INFO, DETAIL", _matches("OFF|INFO|DETAIL")),
    "HIP_OPS_KERNELS": (
        f"{', '.join(KERNELS)}, then overrides as in auto,router_mlp=compiled (docs/kernels.md)",
        _selects_kernels,
    ),
    "HIP_OPS_LIBRARY": ("shipped, source", _matches("shipped|source")),
    "HIP_OPS_ARCH": (", ".join(AMD_ARCHITECTURES), _matches("|".join(AMD_ARCHITECTURES))),
    "ZAYA_CHECK": ("on, off", _matches("on|off")),
    "ZAYA_TRACEBACK": SWITCH,
    # of seconds; else each rank would fail with a traceback
    "ZAYA_GRACE_SECONDS": ("a number of seconds, 0 or more, or inf", _matches(r"inf|[0-9]{1,9}(\.[0-9]*)?")),
    "ZAYA_LAUNCHER_PID": WHOLE,
    "ZAYA_AEGIS_GENERATION": WHOLE,
}


def variable_problems(variables: Mapping[str, str], group: str = "") -> Iterator[str]:
    """Yield a message for each variable whose value is not allowed.

    group: the recipe key that holds the variables; empty: they are the environment's.
    """
    for name, (allowed, holds) in VARIABLES.items():
        text = variables.get(name)
        if not text or holds(text):
            continue
        problem = "this variable does not accept the value"
        problem = problem if group else f"the environment sets it, and {problem}"
        yield message(
            f"{group}{name}",
            text,
            problem=problem,
            allowed=allowed,
            fix=f"{'remove' if group else 'unset'} {group}{name}",
        )

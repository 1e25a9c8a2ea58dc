# SPDX-License-Identifier: Apache-2.0
"""Which Megatron this is, and everything that differs between the releases we run on: 0.16 (Primus) to 0.20.

Asked of the package that an import would find, a wheel or a checkout in front of it, and never of pip: a checkout on
PYTHONPATH has no metadata, or that of the wheel behind it. No Megatron import at the top, so that patches can come first.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
from pathlib import Path

from packaging.version import Version

OLDEST, FIRST_UNSUPPORTED = "0.16.0rc0", "0.21"
SUPPORTED = f">={OLDEST},<{FIRST_UNSUPPORTED}"


@functools.cache
def core_version() -> Version | None:
    """Version of megatron.core, None where there is none."""
    folder = _folder("megatron.core")
    if folder is None:
        return None
    constants = {}
    for node in ast.parse((folder / "package_info.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants[node.targets[0].id] = node.value.value
    numbers = (str(constants[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return Version(".".join(numbers) + (constants.get("PRE_RELEASE") or ""))


def at_least(release: str) -> bool:
    """Whether megatron.core is of `release` or later."""
    found = core_version()
    return found is not None and found >= Version(release)


@functools.cache
def has_module(name: str) -> bool:
    """Whether `name` can be imported, found out without importing it (its parent packages are)."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def has_training() -> bool:
    """Whether megatron.training is here: in wheels from 0.17 on and in every checkout; the wheel of 0.16 is the core alone.

    That of another installation does not count: `megatron` is a namespace that two of them can share.
    """
    core, training = _folder("megatron.core"), _folder("megatron.training")
    return core is not None and training is not None and core.parent == training.parent


def lays_out_buffers() -> bool:
    """Whether DDP takes a layout of its buffers; before, it makes its own, which cuts matrices (zaya_plugin/optim/sharding/layout.py)."""
    folder = _folder("megatron.core")
    return folder is not None and (folder / "optimizer" / "param_layout.py").is_file()


def zaya_train_fits() -> bool:
    """Whether pretrain() is the one that `zaya train` calls: its arguments parsed before, and the model provider by its name.

    0.16 and 0.17 parse arguments inside; 0.18 has another order. From FIRST_UNSUPPORTED on nothing was tried.
    """
    return has_training() and at_least("0.19") and not at_least(FIRST_UNSUPPORTED)


def can_read(checkpoint: Path) -> bool:
    """Whether this release can read a whole torch_dist checkpoint: 0.16 looks for a file that 0.19 writes no more."""
    return at_least("0.19") or (checkpoint / "common.pt").is_file()


def count_experts_in_norm(optimizer) -> None:
    """Makes `optimizer`, one of Megatron's, count its experts in the gradient norm on every tensor-parallel rank.

    0.16 takes whatever tensor parallelism does not cut for a copy of the first rank's. Experts under expert_tensor_parallel_size=1 are no
    copies: each rank holds its own shard of them, and the norm that clips would be too small.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as filtered

    if "expert_tp_group" in inspect.signature(filtered).parameters:  # asks for the right group itself
        return
    groups = optimizer.param_groups if optimizer.optimizer is not None else []
    if groups and all(group["is_expert_parallel"] for group in groups):
        optimizer.tp_group = parallel_state.get_expert_tensor_parallel_group()


def grads_for_norm(optimizer) -> list:
    """The gradients of `optimizer`, one of Megatron's, that its part of the norm is made of; 0.16 has another name for it."""
    ask = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    return ask()


@functools.cache
def _folder(package: str) -> Path | None:
    if not has_module(package):
        return None
    spec = importlib.util.find_spec(package)
    place = spec.origin or next(iter(spec.submodule_search_locations))
    return Path(place).parent if spec.origin else Path(place)

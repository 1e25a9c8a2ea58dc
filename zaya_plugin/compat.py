# SPDX-License-Identifier: Apache-2.0
"""The version of Megatron, and the differences between the supported releases: 0.16 (Primus) to 0.20.

The version is read from the package that an import would find, a wheel or a checkout in front of it, and not from pip:
a checkout on PYTHONPATH has no metadata, or that of the wheel behind it. No Megatron import at the top, since patches
must come first.
"""

import ast
import functools
import importlib.util
import inspect
from importlib import metadata
from pathlib import Path

from packaging.version import Version

OLDEST, OLDEST_TRAINING, FIRST_UNSUPPORTED = "0.16.0rc0", "0.19", "0.21"
SUPPORTED = f">={OLDEST},<{FIRST_UNSUPPORTED}"
TRAINING = f">={OLDEST_TRAINING},<{FIRST_UNSUPPORTED}"  # for `zaya train`
PACKAGE = f"megatron-core[training]>=0.19.2,<{FIRST_UNSUPPORTED}"  # as in pyproject.toml
INSTALL_IN_IMAGE = "python3 docker/install.py FOLDER"  # keeps the image's torch, which pip does not where it is hidden
INSTALL = f"in AMD's image `{INSTALL_IN_IMAGE}`, otherwise `pip install '{PACKAGE}'`"


@functools.cache
def core_version() -> Version | None:
    """Return the version of megatron.core, None if it is not installed."""
    folder = _folder("megatron.core")
    if folder is None:
        return None
    constants = {}
    for node in ast.parse((folder / "package_info.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            constants[node.targets[0].id] = node.value.value
    numbers = (str(constants[name]) for name in ("MAJOR", "MINOR", "PATCH"))
    return Version(".".join(numbers) + (constants.get("PRE_RELEASE") or ""))


def distribution_version(name: str) -> str | None:
    """Return the version of an installed package as pip knows it, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def at_least(release: str) -> bool:
    """Whether megatron.core is of `release` or later."""
    installed = core_version()
    return installed is not None and installed >= Version(release)


@functools.cache
def has_module(name: str) -> bool:
    """Whether `name` can be imported; only its parent packages are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def has_training() -> bool:
    """Whether megatron.training is installed: in wheels from 0.17 on and in every checkout; the wheel of 0.16 has only
    the core.

    megatron.training of another installation does not count: `megatron` is a namespace that two installations can
    share.
    """
    core, training = _folder("megatron.core"), _folder("megatron.training")
    return core is not None and training is not None and core.parent == training.parent


def lays_out_buffers() -> bool:
    """Whether DDP takes a layout of its buffers; earlier releases use their own layout, which cuts matrices
    (zaya_plugin/optim/sharding).
    """
    folder = _folder("megatron.core")
    return folder is not None and (folder / "optimizer" / "param_layout.py").is_file()


def zaya_train_fits() -> bool:
    """Whether pretrain() has the form that `zaya train` calls: arguments parsed before it, and the model provider as a
    keyword.

    0.16 and 0.17 parse arguments inside; 0.18 has another order. FIRST_UNSUPPORTED and later releases were not tried.
    """
    return has_training() and at_least(OLDEST_TRAINING) and not at_least(FIRST_UNSUPPORTED)


def can_read(checkpoint: Path) -> bool:
    """Whether this release can read a complete torch_dist checkpoint: 0.16 needs a file that 0.19 does not write."""
    return at_least("0.19") or (checkpoint / "common.pt").is_file()


def group_of_experts_norm(optimizer):
    """Return the process group with which `optimizer`, one of Megatron's, counts its experts in the gradient norm on
    every tensor-parallel rank; None if it uses the right group itself.

    0.16 regards all parameters that tensor parallelism does not cut as copies of the first rank's. Experts under
    expert_tensor_parallel_size=1 are no copies: each rank holds its own shard of them, and the norm for clipping would
    be too small.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate as filtered

    if "expert_tp_group" in inspect.signature(filtered).parameters:
        return None
    groups = optimizer.param_groups if optimizer.optimizer is not None else []
    if groups and all(group["is_expert_parallel"] for group in groups):
        return parallel_state.get_expert_tensor_parallel_group()
    return None


def grads_for_norm(optimizer) -> list:
    """Return the gradients of `optimizer`, one of Megatron's, that count in its norm; the method has another name in
    0.16.
    """
    ask = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    return ask()


@functools.cache
def _folder(package: str) -> Path | None:
    if not has_module(package):
        return None
    spec = importlib.util.find_spec(package)
    place = spec.origin or next(iter(spec.submodule_search_locations))
    return Path(place).parent if spec.origin else Path(place)

# SPDX-License-Identifier: Apache-2.0
"""megatron.core.datasets.utils.compile_helpers: the wheel has the compiled helpers but no Makefile."""

from zaya_plugin.patches.registry import Patch


def _makefile_is_missing() -> bool:
    import importlib.util
    import os

    spec = importlib.util.find_spec("megatron.core")
    return spec is not None and not os.path.exists(os.path.join(os.path.dirname(spec.origin), "datasets", "Makefile"))


def install() -> None:
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


PATCH = Patch(
    symbol="megatron.core.datasets.utils.compile_helpers",
    scope="always",
    wanted=_makefile_is_missing,
    reason="runs make in the package and exits the process when that fails; the wheel ships helpers_cpp already built",
    install=install,
)

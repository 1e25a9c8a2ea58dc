# SPDX-License-Identifier: Apache-2.0
"""megatron.core.datasets.utils.compile_helpers: does nothing where helpers_cpp is compiled already; the wheel has no
Makefile for it.

In a checkout `make` names its result by the first python3-config in PATH, which may be another Python's. A compiled
module that this Python can import and that is no older than its source is used as it is.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch


def _is_compiled() -> bool:
    import importlib.util
    from pathlib import Path

    compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if compiled is None:
        return False
    library = Path(compiled.origin)
    source = library.with_name("helpers.cpp")
    return (
        not (source.is_file() and library.with_name("Makefile").is_file())
        or library.stat().st_mtime >= source.stat().st_mtime
    )


PATCH = Patch(
    symbol="megatron.core.datasets.utils.compile_helpers",
    make=lambda _: lambda: None,
    scope="always",
    condition=_is_compiled,
    reason=(
        "runs make and exits the process when that fails, also where helpers_cpp is compiled already (the wheel has "
        "no Makefile)"
    ),
    upstream=MEGATRON + "core/datasets/utils.py",
    until="compile_helpers skips a module that is compiled",
)

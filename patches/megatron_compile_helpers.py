# SPDX-License-Identifier: Apache-2.0
"""megatron.core.datasets.utils.compile_helpers: the wheel has the compiled helpers but no Makefile.

In a checkout make names its result by the first python3-config in PATH, which may be another Python's; a compiled module that
this Python can import and that is no older than its source is good as it is.
"""

from zaya_plugin.patches.registry import Patch


def _compiled_already() -> bool:
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


def install() -> None:
    from megatron.core.datasets import utils

    utils.compile_helpers = lambda: None


PATCH = Patch(
    symbol="megatron.core.datasets.utils.compile_helpers",
    scope="always",
    wanted=_compiled_already,
    reason="runs make and exits the process when that fails; here helpers_cpp is compiled already (the wheel has no Makefile)",
    install=install,
)

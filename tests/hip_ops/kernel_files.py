# SPDX-License-Identifier: Apache-2.0
"""Files of hip_ops' kernels by their names."""

from pathlib import Path

from hip_ops.runtime.build import PACKAGE


def kernel_source(name: str) -> Path:
    """The source or header of this name in hip_ops, whichever operator it belongs to. Raises FileNotFoundError."""
    found = list(PACKAGE.rglob(name))
    if len(found) != 1:
        raise FileNotFoundError(f"hip_ops holds {len(found)} files {name}")
    return found[0]

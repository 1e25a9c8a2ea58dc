# SPDX-License-Identifier: Apache-2.0
"""What has to be changed in the host, one symbol a file.

Each module holds one `PATCH`: the symbol, why it is changed, the versions it fits and when it is wanted. Scope `cpu`
is applied where no accelerator is, and never on a GPU; scope `always` mends a defect or a seam that is too narrow on
every machine. `apply_torch()` touches torch alone and belongs at the top of a program's main module, because
processes that write checkpoints are spawned and import it again; `apply()` does everything.
"""

from zaya_plugin.patches.registry import Patch, apply, apply_torch, describe, load

__all__ = ["Patch", "apply", "apply_torch", "describe", "load"]

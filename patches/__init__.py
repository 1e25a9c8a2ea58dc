# SPDX-License-Identifier: Apache-2.0
"""Every change of the host: static replacements, and the hooks of a run (hooks.py).

A patch names its symbol, why it is changed, the versions that it is written for, the upstream code and the condition
under which it can go. `zaya doctor` prints the list. Those of scope `cpu` are the table of cpu.py and are applied only
where no accelerator is present; those of scope `always`, one file each, mend a defect or widen a seam on every machine.
`apply_torch()` changes torch alone and belongs at the top of a program's main module, because processes that write
checkpoints are spawned and import it again; `apply()` applies all patches.
"""

from zaya_plugin.patches.registry import Patch, apply, apply_torch, describe

__all__ = ["Patch", "apply", "apply_torch", "describe"]

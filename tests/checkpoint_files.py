# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as the parts outside the ranks see it."""

from pathlib import Path

from zaya_plugin.checkpoint import manifest


def pretend_checkpoint(run_dir: Path, step: int) -> None:
    """Write a complete checkpoint without tensors to a run directory."""
    folder = Path(run_dir) / "checkpoints" / f"iter_{step:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    manifest.write(folder, step, {})

# SPDX-License-Identifier: Apache-2.0
"""The sinks of metrics besides the console: metrics.jsonl, Weights & Biases, TensorBoard.

A sink that fails reports its first failure and does not end the run.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from zaya_plugin.errors import message


class JsonLines:
    """Writes <run_dir>/metrics.jsonl: one object a step or validation.

    On resume the rows after the checkpoint are removed, because those steps are repeated.
    """

    def __init__(self, path: Path, resumed_at: int):
        if resumed_at and path.is_file():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resumed_at]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in kept))
            temporary.replace(path)
        self.file = open(path, "a" if resumed_at else "w")

    def log(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class WandbRun:
    """Writes one W&B run over all restarts: the id comes from the checkpoint. Without a key or a network the run is
    offline.
    """

    def __init__(
        self, *, project, entity, name, mode, run_id, directory: Path, config: dict[str, Any], group: str | None = None
    ):
        import wandb

        self.wandb = wandb
        if mode == "auto":
            mode = "online" if _has_key() else "offline"
        options = dict(
            project=project,
            entity=entity,
            name=name,
            id=run_id,
            resume="allow",
            dir=str(directory),
            config=config,
            group=group,
        )
        # W&B's console capture would copy our lines, and its own messages go to its log files.
        settings = wandb.Settings(silent=True, console="off")
        try:
            self.run = wandb.init(mode=mode, settings=settings, **options)
        except Exception as failed:
            if mode != "online":
                raise
            problem = f"W&B is not available ({failed}); this run is logged offline"
            print(message("logger.wandb_mode", mode, problem=problem, fix="`wandb sync` uploads it"), file=sys.stderr)
            self.run = wandb.init(mode="offline", settings=settings, **options)

    @property
    def where(self) -> str:
        """The page of an online run, or the command that uploads an offline one."""
        return self.run.url or f"offline, upload with `wandb sync {Path(self.run.dir).parent}`"

    def log(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if isinstance(value, (int, float)) and key != "step"}
        if load := row.get("expert_load"):
            # One row a layer and expert: a W&B heat map takes layer and expert as axes and load as colour.
            rows = [[row["step"], i + 1, j, share] for i, layer in enumerate(load) for j, share in enumerate(layer)]
            values["expert_load"] = self.wandb.Table(columns=["step", "layer", "expert", "load"], data=rows)
        self.run.log(values, step=row["step"])

    def close(self) -> None:
        self.run.finish()


class TensorBoard:
    """Writes to the SummaryWriter that Megatron opened on the reporting rank."""

    def __init__(self, writer):
        self.writer = writer

    def log(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, (int, float)) and key != "step":
                self.writer.add_scalar(key, value, row["step"])
        if load := row.get("expert_load"):
            import numpy

            image = numpy.asarray(load, dtype=numpy.float32)
            self.writer.add_image("expert_load", image / max(float(image.max()), 1e-9), row["step"], dataformats="HW")

    def close(self) -> None:
        self.writer.close()


class Guarded:
    """A sink whose first failure is printed and whose later failures are ignored, so that e.g. a full disk does not end
    the run.
    """

    def __init__(self, name: str, sink):
        self.name, self.sink, self.failed = name, sink, False

    def log(self, row: dict[str, Any]) -> None:
        self._try(lambda: self.sink.log(row))

    def close(self) -> None:
        self._try(self.sink.close)

    def _try(self, action) -> None:
        try:
            action()
        except Exception as failure:
            if not self.failed:
                print(f"metrics: {self.name} failed and is incomplete from here on: {failure!r}", file=sys.stderr)
            self.failed = True


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line cut off by a kill
        return sys.maxsize


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc

    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    try:
        return netrc.netrc().authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False

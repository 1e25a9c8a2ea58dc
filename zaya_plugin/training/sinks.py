# SPDX-License-Identifier: Apache-2.0
"""The sinks of metrics besides the console: metrics.jsonl, Weights & Biases, trackio, TensorBoard.

A sink that fails reports its first failure and does not end the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_plugin.ground.errors import message


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


def unless_set(variable: str, value: Any) -> Any:
    """Return `value`, or None where the environment has `variable`, which W&B then reads."""
    return None if os.environ.get(variable) else value


class Tracker:
    """A run of a tracker with W&B's calls. package: its module. run: what its init() returned."""

    package: Any
    run: Any

    def log(self, row: dict[str, Any]) -> None:
        values = {key: value for key, value in row.items() if isinstance(value, (int, float)) and key != "step"}
        if load := row.get("expert_load"):
            # One row a layer and expert: a W&B heat map takes layer and expert as axes and load as colour.
            rows = [[row["step"], i + 1, j, share] for i, layer in enumerate(load) for j, share in enumerate(layer)]
            values["expert_load"] = self.package.Table(columns=["step", "layer", "expert", "load"], data=rows)
        if samples := row.get("samples"):
            data = [[row["step"], *sample.values()] for sample in samples]
            values["samples"] = self.package.Table(columns=["step", "prompt", "text"], data=data)
        self.run.log(values, step=row["step"])

    def close(self) -> None:
        self.run.finish()


class WandbRun(Tracker):
    """Writes one W&B run over all restarts: the id comes from the checkpoint. Without a key or a network the run is
    offline. WANDB_MODE wins over `mode`.
    """

    INIT_SECONDS, FINISH_SECONDS = 30, 10

    def __init__(
        self, *, project, entity, name, mode, run_id, directory, config: dict[str, Any], group=None, say=print
    ):
        import wandb

        self.package = wandb
        options = dict(project=project, entity=entity, name=name, group=group, dir=directory)
        options |= dict(id=run_id, resume="allow", config=config)
        # W&B's console capture would copy our lines, and its own messages go to its log files.
        limits = dict(init_timeout=self.INIT_SECONDS, finish_timeout=self.FINISH_SECONDS)
        known = getattr(wandb.Settings, "model_fields", {})
        settings = wandb.Settings(silent=True, console="off", **{key: limits[key] for key in limits if key in known})
        mode = os.environ.get("WANDB_MODE") or mode
        try:
            if mode == "auto":
                wandb.setup(settings)
                mode = "online" if wandb.login(verify=False, prompt=False) else "offline"
            self.run = wandb.init(mode=mode, settings=settings, **options)
        except Exception as failed:
            if mode == "offline":
                raise
            problem = f"W&B is not available ({str(failed) or repr(failed)}); this run is logged offline"
            say(message("logger.wandb_mode", mode, problem=problem, fix="`wandb sync` uploads it"))
            wandb.teardown()  # its process still holds the id
            self.run = wandb.init(mode="offline", settings=settings, **options)

    @property
    def where(self) -> str:
        """The page of an online run, or the command that uploads an offline one."""
        return self.run.url or f"offline, upload with `wandb sync {Path(self.run.dir).parent}`"

    def close(self) -> None:
        super().close()
        self.package.teardown()  # else it waits at the end of the process


class TrackioRun(Tracker):
    """Writes one trackio run over all restarts: trackio identifies runs by name, so the name ends with the id of the
    checkpoint. The run is on this machine, without a network, unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.
    """

    def __init__(self, *, project, name, run_id, config: dict[str, Any], group=None):
        import trackio
        from huggingface_hub import constants

        self.package = trackio
        self.place = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self.project, name = project, f"{name}-{run_id}"
        offline = constants.HF_HUB_OFFLINE
        # With a login trackio asks the Hub for the user's name, for a local run too.
        constants.HF_HUB_OFFLINE = offline or not self.place
        try:
            self.run = trackio.init(
                project=project,
                name=name,
                group=group,
                config=config,
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        finally:
            constants.HF_HUB_OFFLINE = offline
        # W&B ignores a step that a resume repeats; trackio would draw it twice.
        self.first_step = getattr(self.run, "_next_step", 0)

    @property
    def where(self) -> str:
        """The Space or server of the run, or the command that shows a local one."""
        return self.place or f"local, `trackio show --project {self.project}` shows it"

    def log(self, row: dict[str, Any]) -> None:
        if row["step"] >= self.first_step:
            super().log(row)


class TensorBoard:
    """Writes event files. Steps that the checkpoint does not hold disappear from the curves."""

    def __init__(self, directory: Path, resumed_at: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(directory, purge_step=resumed_at + 1)

    def log(self, row: dict[str, Any]) -> None:
        for key, value in row.items():
            if isinstance(value, (int, float)) and key != "step":
                self.writer.add_scalar(key, value, row["step"])
        if load := row.get("expert_load"):
            import numpy

            image = numpy.asarray(load, dtype=numpy.float32)
            self.writer.add_image("expert_load", image / max(float(image.max()), 1e-9), row["step"], dataformats="HW")

        if samples := row.get("samples"):
            text = "\n\n".join(f"    {sample['prompt']!r} -> {sample['text']!r}" for sample in samples)
            self.writer.add_text("samples", text, row["step"])

    def close(self) -> None:
        self.writer.close()


class Guarded:
    """A sink that never ends the run: `say` gets its first failure, and later failures are ignored."""

    def __init__(self, name: str, open_sink: Callable[[], Any], say: Callable[[str], None]):
        self.name, self.say, self.sink, self.failed = name, say, None, False
        self._try(lambda: setattr(self, "sink", open_sink()))

    def log(self, row: dict[str, Any]) -> None:
        self._try(lambda: self.sink and self.sink.log(row))

    def close(self) -> None:
        self._try(lambda: self.sink and self.sink.close())

    def _try(self, action) -> None:
        try:
            action()
        except Exception as failure:
            if not self.failed:
                self.failed = True
                self.say(f"metrics: {self.name} failed and is incomplete from this step on: {failure!r}")


class Background:
    """A sink in a thread of its own: where a tracker does not answer, no start, step or end of a run waits for it.

    Attributes:
        opened: is set once the sink is open, or has failed.
    """

    START_SECONDS, END_SECONDS, HELD_ROWS = 10, 12, 10_000  # a batch system kills 30 s after its signal

    def __init__(self, name: str, open_sink: Callable[[], Any], say: Callable[[str], None]):
        self.opened = threading.Event()
        self._rows: queue.Queue = queue.Queue(self.HELD_ROWS)
        self._thread = threading.Thread(target=self._work, args=(name, open_sink, say), name=name, daemon=True)
        self._thread.start()

    def _work(self, name: str, open_sink: Callable[[], Any], say: Callable[[str], None]) -> None:
        sink = Guarded(name, open_sink, say)
        self.opened.set()
        while (row := self._rows.get()) is not None:
            sink.log(row)
        sink.close()

    def log(self, row: dict[str, Any]) -> None:
        self._rows.put_nowait(row)

    def close(self) -> None:
        end = time.monotonic() + self.END_SECONDS
        with contextlib.suppress(queue.Full):
            self._rows.put(None, timeout=self.END_SECONDS)
        self._thread.join(max(end - time.monotonic(), 0))
        if self._thread.is_alive():
            raise TimeoutError(f"no answer within {self.END_SECONDS} s")


def _step_of(line: str) -> int:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):  # a line cut off by a kill
        return sys.maxsize

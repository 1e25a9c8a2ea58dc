# SPDX-License-Identifier: Apache-2.0
"""The collectors that an agent runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from zaya_plugin.aegis.collectors.gpu import AmdSmi, GpuSysfs
from zaya_plugin.aegis.collectors.host import Host
from zaya_plugin.aegis.collectors.kernel_log import DEVICE, KernelLog
from zaya_plugin.aegis.collectors.network import Links, Packets, Rdma
from zaya_plugin.aegis.collectors.rank_files import FlightRecorder, Guards, Progress
from zaya_plugin.aegis.collectors.runner import Collectors
from zaya_plugin.aegis.collectors.storage import Checkpoints, Storage


class NodeCollectors(Collectors):
    """All collectors of one node. `watch` points those of the ranks at a new attempt.

    Args:
        node: its name.
        storage: directories of the run that are probed.
        checkpoints: directory to look for manifests in; None: another agent does that.
        kernel: the kernel's log, or a file or pipe in its place.
        interfaces: links to watch; () for all with a device.
        root: of the system, or of a recorded one.
    """

    def __init__(
        self,
        node: str,
        *,
        storage: Collection[Path] = (),
        checkpoints: Path | None = None,
        kernel: Path = DEVICE,
        interfaces: Collection[str] = (),
        root: Path = Path("/"),
    ):
        self.kernel = KernelLog(node, kernel)
        self.storage = [Storage(node, path) for path in storage]
        self.progress = Progress(node, stalled=self.stalled)
        self.guards, self.flight_recorder = Guards(node), FlightRecorder(node)
        others = [Host(node, root), GpuSysfs(node, root), AmdSmi(node), Links(node, interfaces, root), Rdma(node, root)]
        others.append(Packets(node, root))
        if checkpoints is not None:
            others.append(Checkpoints(node, checkpoints, self.stalled))
        of_ranks = [self.progress, self.guards, self.flight_recorder]
        super().__init__([self.kernel, *self.storage, *of_ranks, *others])

    def stalled(self) -> bool:
        """Whether storage does not answer at present, by the kernel or by the probes."""
        return self.kernel.stalled or any(storage.hanging for storage in self.storage)

    def watch(self, folder: Path, expected: Collection[int] = ()) -> None:
        """Follow the ranks of a new attempt.

        folder: its ZAYA_AEGIS_DIR. expected: ranks that must have heartbeats.
        """
        self.progress.watch(folder, expected)
        self.guards.watch(folder)
        self.flight_recorder.watch(folder)

    def close(self) -> None:
        super().close()
        for storage in self.storage:
            storage.close()

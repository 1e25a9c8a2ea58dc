# SPDX-License-Identifier: Apache-2.0
"""The collectors that an agent runs."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from zaya_plugin.aegis.collectors.gpu import AmdSmi, GpuSysfs
from zaya_plugin.aegis.collectors.host import Host
from zaya_plugin.aegis.collectors.kernel_log import KernelLog
from zaya_plugin.aegis.collectors.network import Links, Packets, Rdma
from zaya_plugin.aegis.collectors.rank_files import FlightRecorder, Guards, Progress
from zaya_plugin.aegis.collectors.runner import Collectors
from zaya_plugin.aegis.collectors.storage import Checkpoints, Storage
from zaya_plugin.aegis.settings import Settings


class NodeCollectors(Collectors):
    """All collectors of the node of `settings`. `watch` points those of the ranks at a new attempt."""

    def __init__(self, settings: Settings):
        node, checkpoints = settings.node, settings.checkpoints
        self.kernel = KernelLog(node, settings.kernel_log)
        self.storage = [Storage(node, path) for path in (settings.folder, checkpoints) if path is not None]
        self.progress = Progress(node, stalled=self.stalled)
        self.guards, self.flight_recorder = Guards(node), FlightRecorder(node)
        others = [Host(node), GpuSysfs(node), AmdSmi(node), Links(node, settings.links), Rdma(node), Packets(node)]
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

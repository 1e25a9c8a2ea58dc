# SPDX-License-Identifier: Apache-2.0
"""A run on two nodes, each with a disk of its own: two namespaces of this machine, with names and mounts of their own."""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.running import MICRO, command
from zaya_plugin.checkpoint import manifest, on_disk, places
from zaya_plugin.config.run_directory import uploads

pytestmark = pytest.mark.slow
NODE = 'hostname "$0" && mount --bind "$1" "$2" && shift 2 && exec "$@"'
WORDS = (
    "checkpoint.save_interval=2",
    "stage.eval_interval=100",
    "optim.lr_decay_style=constant",
    "optim.lr_warmup_iters=1",
)


class Nodes:
    """Two nodes with one rank each. disks: of each, at `nvme` for its rank."""

    def __init__(self, folder: Path, corpus: Path):
        self.folder, self.corpus, self.nvme = folder, corpus, folder / "nvme"
        self.disks = folder / "disk0", folder / "disk1"
        for path in (self.nvme, *self.disks):
            path.mkdir()
        self.shared = folder / "run" / "checkpoints"
        self.local = [disk / places.local_folder("", self.shared) for disk in self.disks]

    def start(self, steps: int, *words: str) -> list[subprocess.Popen]:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        words = (*MICRO, *WORDS, f"run_dir={self.folder / 'run'}", f"data.path={self.corpus}", *words)
        words = ("train", *words, f"checkpoint.local_path={self.nvme}", f"stage.train_iters={steps}", "resume=auto")
        common = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank, disk in enumerate(self.disks):
            node = ["unshare", "--mount", "--uts", "sh", "-c", NODE, f"node{rank}", str(disk), str(self.nvme)]
            with open(self.folder / f"rank{rank}.log", "w") as log:
                environment = {**os.environ, **common, "RANK": str(rank)}
                ranks.append(
                    subprocess.Popen(
                        [*node, *command(*words)], stdout=log, stderr=log, env=environment, start_new_session=True
                    )
                )
        return ranks

    def run(self, steps: int) -> str:
        """Train, and return the lines of rank 0."""
        assert [rank.wait(250) for rank in self.start(steps)] == [0, 0], self.log()
        return self.log()

    def log(self) -> str:
        return "\n".join((self.folder / f"rank{rank}.log").read_text() for rank in (0, 1))


@pytest.fixture
def nodes(tmp_path, corpus):
    if subprocess.run(["unshare", "--mount", "--uts", "true"], capture_output=True).returncode:
        pytest.skip("namespaces need root")
    return Nodes(tmp_path, corpus)


def test_uploads_of_two_nodes_a_kill_and_a_lost_disk(nodes):
    nodes.run(2)
    assert on_disk.latest(nodes.shared) == (2, []) and not manifest.damaged(on_disk.folder(nodes.shared, 2))
    for rank, local in enumerate(nodes.local):
        assert sorted(path.name for path in on_disk.folder(local, 2).glob("*.distcp")) == [f"__{rank}_0.distcp"]

    ranks = nodes.start(6, "checkpoint.upload_limit=1e-5")  # 10 kB a second: a minute
    end = time.monotonic() + 200
    while not (uploads(nodes.shared) and all(on_disk.folder(local, 4).is_dir() for local in nodes.local)):
        assert time.monotonic() < end and all(rank.poll() is None for rank in ranks), nodes.log()
        time.sleep(0.02)
    for rank in ranks:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
    assert on_disk.latest(nodes.shared) == (2, [])
    said = nodes.run(6)
    assert "the interrupted upload of step 4 was finished" in said and "continuing after step 4" in said
    assert "on 2 of 2 nodes" in said

    shutil.rmtree(nodes.local[1])  # the node was exchanged
    said = nodes.run(8)
    assert "continuing after step 6" in said and "on 1 of 2 nodes" in said
    assert on_disk.latest(nodes.shared) == (8, []) and not manifest.damaged(on_disk.folder(nodes.shared, 8))
    rows = [json.loads(line) for line in (nodes.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 9))

# SPDX-License-Identifier: Apache-2.0
"""Four ranks on two nodes: uploads that a kill has interrupted, damaged copies, and which file is read where."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import xxhash

from tests.checkpoint.storages import Memory
from zaya_plugin.checkpoint import manifest, on_disk, starts

NAMES = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp", ".metadata", "metadata.json")
COMMON = NAMES[4:]


class Ranks:
    """The process of tests.checkpoint.restore_ranks."""

    def __init__(self):
        command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.restore_ranks"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, work: str, places, step: int | None = None, local=(True, True)) -> list:
        """What each of four ranks returned. local: whether the nodes have a local folder."""
        folders = [str(path) if has else None for path, has in zip(places.nodes, local, strict=True) for _ in range(2)]
        job = {"work": work, "directory": str(places.shared), "locals": folders, "step": step}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@pytest.fixture(scope="module")
def ranks():
    started = Ranks()
    yield started
    started.process.stdin.close()
    started.process.wait()


class Places:
    """A shared directory and the local folders of two nodes."""

    def __init__(self, folder: Path):
        self.shared, self.nodes = folder / "shared", (folder / "node0", folder / "node1")
        self.shared.mkdir()

    def save(self, step: int, run_id: str = "ab12", uploaded: bool = True) -> Path:
        """Write a checkpoint as four ranks do, each node's files also to its local folder; return the shared folder.

        uploaded: else the upload was killed when only the metadata and the file of rank 0 had arrived.
        """
        content = {name: f"{name} of step {step} ".encode() * 5000 for name in NAMES}
        shared = on_disk.folder(self.shared, step)
        shared = shared if uploaded else shared.with_name(f"{shared.name}.0123abcd{manifest.UNFINISHED}")
        for place, names in (
            (shared, NAMES if uploaded else (*COMMON, NAMES[0])),
            (on_disk.folder(self.nodes[0], step), (*COMMON, *NAMES[:2])),
            (on_disk.folder(self.nodes[1], step), (*COMMON, *NAMES[2:4])),
        ):
            place.mkdir(parents=True)
            for name in names:
                (place / name).write_bytes(content[name])
            files = {name: {"bytes": len(data), "xxh3_128": _checksum(data)} for name, data in content.items()}
            manifest.write(place, step, files, run_id=run_id, ranks=4)
        return shared


def _checksum(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


@pytest.fixture
def places(tmp_path):
    return Places(tmp_path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_an_interrupted_upload_is_finished_from_the_nodes(ranks, places):
    places.save(10)
    left = places.save(20, uploaded=False)
    (left / "part_0.json").write_text("{}")
    (left / "__1_0.distcp.77.partial").write_bytes(b"half")
    found = ranks.run("finish", places)
    assert found == [["the interrupted upload of step 20 was finished"]] * 4
    folder = on_disk.folder(places.shared, 20)
    assert not left.exists() and sorted(path.name for path in folder.iterdir()) == sorted([*NAMES, manifest.NAME])
    assert on_disk.latest(places.shared) == (20, []) and manifest.damaged(folder) == []


@pytest.mark.slow
def test_a_checkpoint_that_lacks_only_its_name_gets_it_without_local_folders(ranks, places):
    whole = places.save(20)
    left = whole.rename(whole.with_name(f"{whole.name}.0123abcd{manifest.UNFINISHED}"))
    found = ranks.run("finish", places, local=(False, False))
    assert found == [["the checkpoint of step 20 was complete but for its folder's name, which it has now"]] * 4
    assert not left.exists() and on_disk.latest(places.shared) == (20, []) and manifest.damaged(whole) == []


def test_only_rank_0_reads_the_manifest_of_an_interrupted_upload(ranks, places):
    """Else a rank that cannot read it leaves the others in a collective."""
    places.save(10, uploaded=False)
    assert ranks.run("finish_with_a_stale_handle", places) == [["the interrupted upload of step 10 was finished"]] * 4


def test_a_buffer_that_differs_between_ranks_is_named(ranks, places):
    """Balancing biases and their moments are buffers. Those that a checkpoint does not hold may differ."""
    for found in ranks.run("replicas_differ", places):
        assert len(found) == 2
        assert "ranks differ in 1 tensors: balancing_step (rank 3 and rank 0)" in found[0]
        assert "ranks differ in 1 tensors: 0.balancing_step (rank 3 and rank 0)" in found[1]


@pytest.mark.parametrize("harm", ["lost node", "flipped", "other run", "older"])
def test_an_upload_that_cannot_be_finished_leaves_the_checkpoint_before(ranks, places, harm):
    places.save(10)
    left = places.save(8 if harm == "older" else 20, uploaded=False)
    if harm == "lost node":
        shutil.rmtree(places.nodes[1])
        said = "interrupted and cannot be finished: __2_0.distcp, __3_0.distcp is on no node of this start"
    elif harm == "flipped":
        flip(on_disk.folder(places.nodes[1], 20) / "__2_0.distcp")
        said = "__2_0.distcp has"
    else:
        said = None
    if harm == "other run":
        starts.begin(places.shared, run_id="cd34", step=0, recipe="")
    for lines in ranks.run("finish", places):
        assert len(lines) == bool(said) and (said is None or said in lines[0]), lines
    assert left.is_dir() and not [path for path in left.iterdir() if path.suffix == ".partial"]
    if harm != "other run":
        assert on_disk.latest(places.shared) == (10, [])


def test_local_files_are_preferred_and_each_file_is_read_once(ranks, places):
    shared = places.save(10)
    found = ranks.run("compare", places, step=10)
    assert all(rank["damaged"] == [] and rank["notes"] == [] for rank in found)
    read = [Path(path) for rank in found for path in rank["read"]]
    assert len(read) == len(set(read))
    local = [path for path in read if shared not in path.parents]
    assert sorted(path.name for path in local) == sorted([*NAMES[:4], *COMMON * 2])
    # the shared copy of a rank's file is read by the other node alone, that of the metadata by none
    assert sorted(path.name for path in read if shared in path.parents) == sorted(NAMES[:4])
    for rank, result in enumerate(found):
        links = on_disk.folder(Path(result["loads_from"]), 10)
        assert links.is_relative_to(places.nodes[rank // 2]) and on_disk.latest(links.parent) == (10, [])
        own, other = (NAMES[:2], NAMES[2:4]) if rank < 2 else (NAMES[2:4], NAMES[:2])
        assert all((links / name).resolve().parent == on_disk.folder(places.nodes[rank // 2], 10) for name in own)
        assert all((links / name).resolve().parent == shared for name in other)
        assert "6 of 6 files, 0.00 GB, on 2 of 2 nodes" in result["origin"]


def test_without_a_local_folder_each_file_is_read_by_the_rank_that_wrote_it(ranks, places):
    places.save(10)
    found = ranks.run("compare", places, step=10, local=(False, False))
    for rank, result in enumerate(found):
        assert f"__{rank}_0.distcp" in {Path(path).name for path in result["read"]}
        assert result["loads_from"] == str(places.shared) and result["origin"] is None
    assert sorted(Path(path).name for rank in found for path in rank["read"]) == sorted(NAMES)


def test_a_node_without_its_disk_reads_the_shared_files(ranks, places):
    shared = places.save(10)
    shutil.rmtree(places.nodes[1])
    found = ranks.run("compare", places, step=10)
    assert found[2]["loads_from"] == str(places.shared) and found[0]["loads_from"] != str(places.shared)
    assert sorted(Path(path).name for rank in found for path in rank["read"] if str(shared) in path) == sorted(NAMES)
    assert "on 1 of 2 nodes" in found[0]["origin"]


def test_a_flipped_byte_in_a_local_copy_is_named_and_the_shared_file_is_read(ranks, places):
    shared = places.save(10)
    wrong = on_disk.folder(places.nodes[0], 10) / "__1_0.distcp"
    flip(wrong)
    for rank, result in enumerate(ranks.run("compare", places, step=10)):
        assert result["damaged"] == [] and len(result["notes"]) == 1
        assert f"{wrong} has the checksum" in result["notes"][0]
        link = on_disk.folder(Path(result["loads_from"]), 10) / wrong.name
        assert link.resolve().parent == shared, rank


def test_a_flipped_byte_in_the_shared_file_is_named_where_a_node_reads_it(ranks, places):
    shared = places.save(10)
    flip(shared / "__1_0.distcp")
    for result in ranks.run("compare", places, step=10):
        assert len(result["damaged"]) == 1 and f"{shared}/__1_0.distcp has the checksum" in result["damaged"][0]


def test_a_truncated_local_copy_is_not_used(ranks, places):
    shared = places.save(10)
    short = on_disk.folder(places.nodes[0], 10) / "__0_0.distcp"
    short.write_bytes(short.read_bytes()[:-1])
    for result in ranks.run("compare", places, step=10):
        assert result["damaged"] == result["notes"] == []
        assert (on_disk.folder(Path(result["loads_from"]), 10) / short.name).resolve().parent == shared


def test_a_copy_that_fails_on_one_rank_ends_all(ranks, tmp_path, one_rank):
    """Of a storage without paths. The others do not wait in Megatron's collective."""
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    from zaya_plugin.checkpoint.checkpoints import Checkpoints

    memory = Memory(tmp_path)
    checkpoints, weights = Checkpoints(memory.place), torch.arange(4.0)
    for step in (10, 20):
        checkpoints.save(step, {"weights": ShardedTensor.from_rank_offsets("weights", weights)})
    checkpoints.close()
    places = SimpleNamespace(shared=memory.place, nodes=(tmp_path, tmp_path))
    assert ranks.run("load_a_copy", places, step=10) == [[0.0, 1.0, 2.0, 3.0]] * 4
    failures = [result["error"] for result in ranks.run("load_a_copy", places, step=20)]
    assert len({*failures}) == 1 and "iter_0000020: rank 1: [Errno 5] Input/output error: " in failures[0]
    assert failures[0].endswith("Fix: load it again.")
    memory.close()

# SPDX-License-Identifier: Apache-2.0
"""`zaya checkpoint reshape`: the same bits in other files, at a bounded memory, after a kill and with every fault named."""

import io
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.checkpoint.kills import Killed, kill_at
from tests.running import command
from zaya_plugin import cli
from zaya_plugin.checkpoint import finished_files, manifest, on_disk, reshape
from zaya_plugin.checkpoint.stored_boxes import common_box, pieces
from zaya_plugin.ground.lock import locked
from zaya_plugin.optim.sharding.boxes import boxes

STEP = 7
RANKS = 5
BACKEND = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}'


def parameters() -> dict[str, torch.Tensor]:
    """Tensors of every kind: matrices, vectors, a scalar, 16-bit, integers, an empty one."""
    return {
        "optimizer.state.param.decoder.layers.10.fc1": torch.randn(33, 7),
        "optimizer.state.exp_avg.decoder.layers.10.fc1": torch.randn(33, 7).bfloat16(),
        "optimizer.state.param.decoder.layers.2.fc1": torch.randn(4, 6, 10),
        "optimizer.state.exp_avg_sq.decoder.layers.2.fc1": torch.randn(4, 6, 10, dtype=torch.float64),
        "optimizer.state.param.embedding": torch.randn(64, 48),
        "router.biases": torch.arange(17),
        "router.step": torch.tensor(3.5),
        "mask": torch.tensor([True, False, True]),
        "nothing": torch.empty(0, 4),
    }


ALIASES = {"embedding": "optimizer.state.param.embedding"}
OBJECTS = {"rng_state/shard_0.0_1.1": {"seed": 3}, "common_state/shard_0_1": [{"arguments": 1.5}]}


def write_source(run_dir: Path, tensors: dict, aliases: dict, cuts: int = 4) -> Path:
    """A checkpoint as ranks write it: each tensor cut at arbitrary elements into boxes, in the files of RANKS ranks."""
    folder = on_disk.folder(run_dir / "checkpoints", STEP)
    folder.mkdir(parents=True)
    files = [open(folder / f"__{rank}_0.distcp", "wb") for rank in range(RANKS)]
    order, described, storage = random.Random(1), {}, {}

    def store(value) -> _StorageInfo:
        rank = order.randrange(RANKS)
        archive = io.BytesIO()
        torch.save(value, archive)
        start = files[rank].tell()
        files[rank].write(archive.getvalue())
        return _StorageInfo(f"__{rank}_0.distcp", start, archive.tell())

    for key, value in OBJECTS.items():
        described[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), store(value)
    for key, tensor in tensors.items():
        borders = sorted({0, tensor.numel(), *(order.randrange(tensor.numel() + 1) for _ in range(cuts))})
        parts, chunks = [*zip(borders, borders[1:], strict=False)], []
        for start, end in parts:
            for offset, sizes in boxes(tuple(tensor.shape), start, end):
                part = tensor[tuple(slice(a, a + n) for a, n in zip(offset, sizes, strict=True))].clone()
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
                storage[MetadataIndex(key, torch.Size(offset))] = store(part)
        described[key] = TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), tensor.shape, chunks)
    for alias, key in aliases.items():
        of = described[key]
        described[alias] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), of.size, of.chunks)
        storage |= {MetadataIndex(alias, at.offset): place for at, place in storage.items() if at.fqn == key}
    for file in files:
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=storage)))
    (folder / "metadata.json").write_text(BACKEND)
    manifest.write(folder, STEP, {path.name: manifest.describe(path) for path in folder.iterdir()}, run_id="ab12")
    return folder


def loaded(folder: Path) -> dict:
    """All tensors and objects, as torch's own loader reads them."""
    described = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(of.size, dtype=of.properties.dtype) if isinstance(of, TensorStorageMetadata) else io.BytesIO()
        for key, of in described.items()
    }
    dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state


def same_bits(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key, value in a.items():
        if torch.is_tensor(value):
            assert value.dtype == b[key].dtype and torch.equal(value, b[key]), key
        else:
            assert value == b[key], key


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(reshape, "PIECE", 256)


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "old", parameters(), ALIASES)


def target(tmp_path) -> Path:
    return on_disk.folder(tmp_path / "new" / "checkpoints", STEP)


@pytest.mark.parametrize("shape", [(), (1,), (9,), (0, 3), (5, 7), (1, 4, 9), (2, 3, 5, 7)])
@pytest.mark.parametrize("most", [1, 16, 60, 10_000])
def test_pieces_cover_a_tensor_once(shape, most):
    count = torch.zeros(shape, dtype=torch.int)
    for offset, sizes in pieces(shape, 4, most):
        assert math.prod(sizes) * 4 <= max(most, 4)
        count[tuple(slice(a, a + n) for a, n in zip(offset, sizes, strict=True))] += 1
    assert bool((count == 1).all())


def test_common_box():
    assert common_box(((0, 2), (4, 4)), ((3, 0), (5, 3))) == ((3, 2), (1, 1))
    assert common_box(((0, 2), (4, 4)), ((4, 0), (5, 3))) is None
    assert common_box(((), ()), ((), ())) == ((), ())


@pytest.mark.parametrize("files", [1, 3, 1000, 2**20])  # the last took memory for each
def test_the_same_bits_in_other_files(tmp_path, source, small_pieces, files, capsys):
    words = ["checkpoint", "reshape", str(tmp_path / "old"), "--output", str(tmp_path / "new"), "--files", str(files)]
    assert cli.main(words) == 0
    new = target(tmp_path)
    written = [path for path in new.iterdir() if path.suffix == ".distcp"]
    assert len(written) == files or (files >= 1000 and 50 < len(written) < 1000)
    assert (
        f"{new}: {len(written)} files; to train on: run_dir={tmp_path / 'new'} resume=must" in capsys.readouterr().out
    )
    state = loaded(new)
    same_bits(loaded(source), state)
    for key, value in parameters_again().items():
        assert torch.equal(state[key], value), key
    assert torch.equal(state["embedding"], state["optimizer.state.param.embedding"].bfloat16())
    if files == 3:
        sizes = [path.stat().st_size for path in written]
        assert max(sizes) < 1.05 * min(sizes)
    assert {path.name for path in new.iterdir()} - {path.name for path in written} == {
        ".metadata",
        "metadata.json",
        "manifest.json",
    }
    assert manifest.problems(new) == manifest.damaged(new) == []
    content = manifest.read(new)
    assert (content["iteration"], content["run_id"], content["reshaped_from"]) == (STEP, "ab12", str(source))


def parameters_again() -> dict[str, torch.Tensor]:
    torch.manual_seed(1234)  # as the fixture `seeded`
    return parameters()


def test_names_that_share_bytes_still_share_them_and_states_of_a_parameter_are_neighbours(tmp_path, source):
    reshape.reshape(source, target(tmp_path), 2)
    index = FileSystemReader(target(tmp_path)).read_metadata()
    of = {key: [s for at, s in index.storage_data.items() if at.fqn == key] for key in index.state_dict_metadata}
    assert of["embedding"] == of["optimizer.state.param.embedding"] and len(of["embedding"]) == 1
    begin = [(s[0].relative_path, s[0].offset, key) for key, s in of.items() if s and "layers" in key]
    assert [key.removeprefix("optimizer.state.") for _, _, key in sorted(begin)] == [
        "exp_avg_sq.decoder.layers.2.fc1",
        "param.decoder.layers.2.fc1",
        "exp_avg.decoder.layers.10.fc1",
        "param.decoder.layers.10.fc1",
    ]


def test_a_checkpoint_of_torchs_own_writer_without_a_manifest(tmp_path, small_pieces, capsys):
    folder = on_disk.folder(tmp_path / "old", STEP)
    state = parameters() | {"common": "an object"}
    dcp.save(state, storage_writer=FileSystemWriter(folder, thread_count=3), no_dist=True)
    (folder / "metadata.json").write_text(BACKEND)
    torch.save({"of": "older versions of Megatron"}, folder / "common.pt")
    (folder / "integrity.json").write_text("checksums of the old files")
    words = ["checkpoint", "reshape", str(tmp_path / "old"), "--output", str(tmp_path / "new"), "--files", "2"]
    assert cli.main(words) == 0
    assert "its content is not checked" in capsys.readouterr().out
    same_bits(state, loaded(target(tmp_path)))
    assert (target(tmp_path) / "common.pt").read_bytes() == (folder / "common.pt").read_bytes()
    assert not (target(tmp_path) / "integrity.json").exists()


@pytest.mark.slow
def test_a_kill_at_any_operation_is_continued(tmp_path, source):
    expected, number, ended, most_kept = loaded(source), 0, False, 0
    while not ended:
        final = on_disk.folder(tmp_path / str(number) / "checkpoints", STEP)
        with pytest.MonkeyPatch.context() as monkeypatch:
            kill_at(monkeypatch, number)
            try:
                reshape.reshape(source, final, 3)
                ended = True
            except Killed:
                pass
        if not ended:
            unfinished = final.with_name(final.name + manifest.UNFINISHED)
            finished = (
                json.loads(path.read_text())["files"] if (path := unfinished / finished_files.NAME).exists() else {}
            )
            times = {name: (unfinished / name).stat().st_mtime_ns for name in finished}
            if not final.exists():  # else the kill came after the commit
                kept, files = reshape.reshape(source, final, 3)
                assert (kept, files) == (len(finished), 3)
                assert times == {name: (final / name).stat().st_mtime_ns for name in finished}
                most_kept = max(kept, most_kept)
        assert manifest.problems(final) == manifest.damaged(final) == []
        same_bits(expected, loaded(final))
        number += 1
    assert number > 15 and most_kept == 3


def test_sigkill_in_the_middle_and_the_same_command_again(tmp_path, capfd):
    write_source(tmp_path / "old", {f"matrix{i}": torch.randn(512, 1024) for i in range(16)}, {})
    words = ("checkpoint", "reshape", str(tmp_path / "old"), "--output", str(tmp_path / "new"), "--files", "16")
    process = subprocess.Popen(command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    final = target(tmp_path)
    done = final.with_name(final.name + manifest.UNFINISHED) / finished_files.NAME
    deadline = time.monotonic() + 60
    while not (done.exists() and len(json.loads(done.read_text())["files"]) >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not final.exists()
    kept = len(json.loads(done.read_text())["files"])
    assert 2 <= kept < 16
    assert cli.main([*words]) == 0
    assert f"16 files, {kept} of them written before;" in capfd.readouterr().out
    same_bits(loaded(on_disk.folder(tmp_path / "old" / "checkpoints", STEP)), loaded(final))


@pytest.mark.parametrize("changed", ["files", "source", "damaged"])
def test_what_an_interrupted_call_left_is_used_only_where_it_fits(tmp_path, source, changed, monkeypatch):
    final = target(tmp_path)
    unfinished = final.with_name(final.name + manifest.UNFINISHED)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(reshape, "_index_of", lambda *_: (_ for _ in ()).throw(Killed()))
        reshape.reshape(source, final, 3)
    if changed == "source":
        source = write_source(tmp_path / "other", {k: v + 1 for k, v in parameters().items() if k != "mask"}, ALIASES)
    if changed == "damaged":
        path = unfinished / "__1_0.distcp"
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
    kept, _ = reshape.reshape(source, final, 4 if changed == "files" else 3)
    assert kept == {"files": 0, "source": 0, "damaged": 2}[changed]
    same_bits(loaded(source), loaded(final))


def test_damaged_sources_are_refused_and_named(tmp_path, source, capsys):
    words = ["checkpoint", "reshape", str(tmp_path / "old"), "--output", str(tmp_path / "new"), "--files", "2"]
    shard = source / "__2_0.distcp"
    content = bytearray(shard.read_bytes())
    content[700] ^= 1
    shard.write_bytes(content)
    assert cli.main(words) == 1
    assert f"{shard} has the checksum" in capsys.readouterr().out
    shard.write_bytes(content[:-1000])
    assert cli.main(words) == 1
    assert f"{shard} has {len(content) - 1000} bytes, its manifest states {len(content)}" in capsys.readouterr().out
    (source / manifest.NAME).unlink()
    assert cli.main(words) == 1
    assert f"{shard} has {len(content) - 1000} bytes, its index requires {len(content)}" in capsys.readouterr().out
    shard.write_bytes(content)
    stored = FileSystemReader(source).read_metadata().storage_data
    place = next(place for at, place in stored.items() if at.fqn == "router.biases")
    with open(source / place.relative_path, "r+b") as file:
        file.seek(place.offset)
        file.write(bytes(place.length))  # all sizes fit, no archive is there
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert f"{source / place.relative_path}, byte {place.offset}: no tensor as torch.save writes it" in error
    assert not target(tmp_path).exists()


def test_an_index_with_a_gap_or_another_shape_is_refused(tmp_path, source):
    index = FileSystemReader(source).read_metadata()
    index.state_dict_metadata["router.biases"].chunks.pop()
    (source / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(ValueError, match=r"router.biases: \d+ of the 17 elements from \(0,\) on are in the checkpoint"):
        reshape.reshape(source, target(tmp_path), 2)
    index = FileSystemReader(source).read_metadata()
    key = "router.biases"
    stored = {at: place for at, place in index.storage_data.items() if at.fqn == key}
    index.storage_data |= dict(zip(stored, [*stored.values()][1:], strict=False))
    (source / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(
        ValueError, match=r"distcp, byte \d+: its index states a contiguous tensor of \(\d+,\), it holds"
    ):
        reshape.reshape(source, target(tmp_path), 2)


def test_the_format_that_no_reshape_can_help_is_refused(tmp_path):
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32).bucket_idx_0.exp_avg"
    source = write_source(tmp_path / "old", {key: torch.randn(64)}, {})
    with pytest.raises(ValueError, match=r"\(dp_reshardable\).*Fix: .*--dist-ckpt-optim-fully-reshardable"):
        reshape.reshape(source, target(tmp_path), 2)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--files", "2"], "--output: was not given"),
        (["--output", "{new}"], "--files: was not given"),
        (["--output", "{new}", "--files", "0"], "--files: '0' is not a whole number from 1 to "),
        (["--output", "{old}", "--files", "2"], "exists. Fix: --output"),
        (["--output", "{new}", "--files", "2", "--step", "8"], "--step=8: no such checkpoint in"),
        (["--output", "{file}", "--files", "2"], "cannot be written: Not a directory"),
    ],
)
def test_a_users_mistakes(tmp_path, source, words, named, capsys):
    (tmp_path / "file").write_text("")
    words = [word.format(**{name: tmp_path / name for name in ("old", "new", "file")}) for word in words]
    assert cli.main(["checkpoint", "reshape", str(tmp_path / "old"), *words]) == 2
    assert named in capsys.readouterr().err


def test_a_second_command_on_the_same_target_is_refused(tmp_path, source):
    final = target(tmp_path)
    with locked(final, "writing"), pytest.raises(ValueError, match=f"another process is writing {final} "):
        reshape.reshape(source, final, 2)
    reshape.reshape(source, final, 2)
    assert [path.name for path in final.parent.iterdir()] == [final.name]


@pytest.mark.parametrize(
    ("limit", "named"), [("size=300k", r"GB more are needed"), ("size=8m,nr_inodes=6", "No space left on device")]
)
def test_a_full_disk_is_named_and_the_command_continues_with_more(tmp_path, limit, named):
    source = write_source(tmp_path / "old", {f"matrix{i}": torch.randn(64, 256) for i in range(8)}, {})
    (tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "none", tmp_path / "disk"], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        final = on_disk.folder(tmp_path / "disk" / "checkpoints", STEP)
        with pytest.raises(ValueError, match=rf"--output={final.parent}: cannot be written: .*{named}.*GB are free"):
            reshape.reshape(source, final, 8)
        assert not final.exists()
        subprocess.run(["mount", "-o", "remount,size=8m,nr_inodes=100", tmp_path / "disk"], check=True)
        kept, files = reshape.reshape(source, final, 8)
        assert files == 8 and (kept > 0) == ("nr_inodes" in limit)
        same_bits(loaded(source), loaded(final))
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)


MEASURED = """
import re, sys
from pathlib import Path
from zaya_plugin.checkpoint import reshape
reshape.PIECE = 8 * 2**20
for folder in map(Path, sys.argv[1:]):
    reshape.reshape(folder, folder.parents[1] / "new" / folder.name, 2)
    print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_tensors(tmp_path):
    """At most two pieces and 16 MiB more than for tensors of a few KB; the large tensor has 8 pieces, in two boxes."""
    small = write_source(tmp_path / "small", parameters(), {}, cuts=1)
    large = write_source(tmp_path / "large", {"embedding": torch.zeros(2**14, 1024)}, {}, cuts=1)
    done = subprocess.run([sys.executable, "-c", MEASURED, small, large], capture_output=True, text=True, check=True)
    before, after = (int(line) * 1024 for line in done.stdout.split())
    assert after - before < 2 * 8 * 2**20 + 16 * 2**20 < 2**26

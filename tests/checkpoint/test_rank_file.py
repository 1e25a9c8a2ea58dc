# SPDX-License-Identifier: Apache-2.0
"""A file that is made of slices of a buffer is one of torch's distributed checkpoints: Megatron's loader reads it."""

import io

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor

from zaya_plugin.checkpoint.host_buffer import HostBuffer, Staging
from zaya_plugin.checkpoint.rank_file import (
    COMMON,
    FORMAT,
    LONGEST_COMMENT,
    MAIN_WEIGHTS,
    Box,
    Entry,
    RankFile,
    contents,
    copied_weights,
    index,
    main_weights,
    padded_archive,
    saved,
    without_derived,
)

pytestmark = pytest.mark.usefixtures("one_rank")


def state(weight, main, momentum, step: int) -> dict:
    """A model's weight in bf16, its fp32 weights in two boxes, a momentum, an object and what is not sharded."""

    def box(key, values, row, rows):
        return ShardedTensor(key, values, values.dtype, (rows, 8), (6, 8), (row, 0), None)

    return {
        "model": {"w": ShardedTensor.from_rank_offsets("w", weight)},
        "optimizer": [
            box(f"{MAIN_WEIGHTS}w", main[:2], 0, 2),
            box(f"{MAIN_WEIGHTS}w", main[2:], 2, 4),
            ShardedTensor.from_rank_offsets("optimizer.state.exp_avg.w", momentum),
        ],
        "rng": ShardedObject("rng_state", {"step": step}, (1, 1), (0, 0), replica_id=0),
        "copy": ShardedObject("other", "of another rank", (1,), (0,), replica_id=1),
        "step": step,
        "nothing": LocalNonpersistentObject(1),
    }


def test_megatrons_loader_reads_the_file_and_derives_the_weights(tmp_path):
    generator = torch.Generator().manual_seed(0)
    main, momentum = torch.randn(2, 6, 8, generator=generator)
    momentum = momentum.bfloat16()
    weight = torch.zeros(6, 8, dtype=torch.bfloat16)  # not stored: it is derived from the fp32 weights
    boxes, objects, common = contents(state(weight, main, momentum, step=1))
    boxes, derived = without_derived(boxes, main_weights(boxes))
    assert derived == ["w"] and [box.key for box in boxes].count(f"{MAIN_WEIGHTS}w") == 2
    assert sorted(objects) == ["rng_state/shard_0.0_1.1"] and common == {"step": 1}
    objects[COMMON] = [common]
    file = RankFile.plan("__0_0.distcp", boxes, objects)
    buffer = HostBuffer()
    buffer.allocate(file.size, pin=False)
    for start, text in file.fixed:
        buffer.write(start, text)
    staging = Staging(buffer, file.tensors)

    for step in (1, 2, 300):  # the same plan for other values and longer objects
        main += 1
        boxes, objects, common = contents(state(weight, main, momentum, step))
        objects[COMMON] = [common]
        for key, value in objects.items():
            buffer.write(*file.archive(key, value))
        staging.start()
        folder = tmp_path / str(step)
        folder.mkdir()
        (folder / file.name).write_bytes(b"".join(buffer.memory[start : start + size] for start, size in file.slices))
        (folder / ".metadata").write_bytes(index(file.entries, derived))
        (folder / "metadata.json").write_text(FORMAT)

        read = state(torch.empty(6, 8, dtype=torch.bfloat16), torch.empty(6, 8), torch.empty_like(momentum), 0)
        read.pop("copy")
        loaded = dist_checkpointing.load(read, str(folder))
        assert torch.equal(loaded["model"]["w"], main.bfloat16())
        assert torch.equal(torch.cat(loaded["optimizer"][:2]), main)
        assert torch.equal(loaded["optimizer"][2], momentum) and momentum.any()
        assert loaded["step"] == step and loaded["rng"] == {"step": step}
    buffer.release()


def test_an_object_that_outgrows_its_room_is_an_error():
    file = RankFile.plan("f", [], {"a": [b"x"]})
    start, text = file.archive("a", [b"x" * 1000])
    assert (start, len(text)) == file.rooms["a"]
    with pytest.raises(ValueError, match="cannot become"):
        file.archive("a", [b"x" * 10000])


def test_boxes_that_do_not_make_a_tensor_are_an_error():
    half = Entry("w", "f", 0, 1, torch.float32, (0, 0), (2, 4), (4, 4))
    with pytest.raises(ValueError, match=r"w: the ranks hold 8 elements of a tensor of \[4, 4\]"):
        index([half], [])
    copy = ShardedTensor.from_rank_offsets(f"{MAIN_WEIGHTS}v", torch.zeros(4), replica_id=(0, 1, 0))
    assert copied_weights({**state(*torch.zeros(3, 6, 8), step=0), "second": [copy]}) == ["v"]
    with pytest.raises(ValueError, match="v: no rank owns its fp32 weights"):
        index([], ["v"])


def test_a_weight_of_another_shape_is_stored():
    box = Box("w", (0,), (4,), (4,), torch.zeros(4))
    assert without_derived([box], {"w": (8,)}) == ([box], [])


@pytest.mark.parametrize("more", [0, 1, LONGEST_COMMENT])
def test_torch_reads_an_object_with_a_longer_end(more):
    whole = saved({"step": 3, "names": ["a"]})
    longer = padded_archive(whole, len(whole) + more)
    assert len(longer) == len(whole) + more
    assert torch.load(io.BytesIO(longer), weights_only=True) == {"step": 3, "names": ["a"]}


@pytest.mark.parametrize("more", [-1, LONGEST_COMMENT + 1])
def test_an_archive_that_cannot_have_the_size_is_refused(more):
    whole = saved([1])
    with pytest.raises(ValueError, match="cannot become"):
        padded_archive(whole, len(whole) + more)

# SPDX-License-Identifier: Apache-2.0
"""Which samples a stage gets; that they, the weights and the momenta are handed over exactly is in
tests/faults/test_curriculum.py.
"""

from types import SimpleNamespace

import pytest
import torch

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.config.compose import compose
from zaya_plugin.handover.predecessor import Predecessor


def test_a_stage_takes_its_part_of_the_shared_order():
    from zaya_plugin.hosts.stage_handover import stage_part, stage_samples

    whole = compose(["experiment=cpu_demo", "stage.train_iters=8"])
    first = compose(["experiment=cpu_demo", "stage.train_iters=5", "handover.planned_samples=128"])
    second = compose(
        ["experiment=cpu_demo", "stage.train_iters=3", "handover.first_sample=80", "handover.planned_samples=128"]
    )
    counts = [stage_samples(recipe, (recipe.stage.train_iters * 16, 64, 0), 64) for recipe in (whole, first, second)]
    assert counts == [(128, 64, 0)] * 3, "all three build the same set"
    order = list(range(1000, 1128))
    assert stage_part(first, order) is order
    assert list(stage_part(second, order)) == order[80:]


def test_every_validation_reads_the_same_samples():
    from zaya_plugin.hosts.stage_handover import Repeated, stage_samples

    recipe = compose(["experiment=cpu_demo"])
    assert stage_samples(recipe, (1440, 256, 0), 64) == (1440, 64, 0), "of one validation, however many there are"
    assert stage_samples(recipe, (1440, 0, 0), 64) == (1440, 0, 0)
    repeated = Repeated(list(range(100, 180)), 64)
    assert [repeated[i] for i in (0, 63, 64, 319, 10**9 * 64 + 5)] == [100, 163, 100, 163, 105]
    assert len(repeated) > 10**18


@pytest.fixture
def one_rank():
    """A process group of this process alone, as long as the test."""
    started = not torch.distributed.is_initialized()
    if started:
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if started:
        torch.distributed.destroy_process_group()


def test_a_damaged_checkpoint_of_the_stage_before_is_refused(tmp_path, one_rank):
    """By its size at the check, by its content before anything is loaded; what no longer unpickles by name."""
    from zaya_plugin.hosts.stage_handover import Handover

    folder = tmp_path / "checkpoints" / "iter_0000005"
    folder.mkdir(parents=True)
    for name in ("__0_0.distcp", on_disk.INDEX, on_disk.FORMAT):
        (folder / name).write_bytes(bytes(100))
    manifest.write(folder, 5, {path.name: manifest.describe(path) for path in folder.iterdir()})
    recipe = compose(["experiment=cpu_demo", f"handover.from_run={tmp_path}"])
    handover = Handover(recipe, Predecessor(tmp_path, recipe, 5, 0), 0)
    with pytest.raises(
        ValueError, match=f"{folder}: its index, arguments or progress cannot be read .*Fix: zaya check"
    ):
        handover.check(SimpleNamespace(rank=0))
    (folder / "__0_0.distcp").write_bytes(b"1" + bytes(99))
    damaged = f"handover.from_run={tmp_path}: the checkpoint of the previous stage is damaged:"
    with pytest.raises(ValueError, match=rf"^{damaged}\n  {folder}/__0_0.distcp has the checksum"):
        handover.load_and_begin(None, None, None, None)
    (folder / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"^{damaged}\n  {folder}/__0_0.distcp has 0 bytes"):
        handover.check(SimpleNamespace(rank=0))

# SPDX-License-Identifier: Apache-2.0
"""What is under way when a layer's experts are waited for, with Megatron's own rules of waiting and asking (finish_param_sync of its bucket groups)."""

from types import SimpleNamespace

import pytest
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from zaya_plugin.parallel.gather_order import gather_layers_ahead


class Group:
    """A bucket group with the blocks of `names`; what happens to it goes into `events`."""

    def __init__(self, names, events):
        self.names, self.events = names, events
        params = [SimpleNamespace(expert_block=(f"layers.{name}", 0)) for name in names]
        self.buckets = [SimpleNamespace(params_list=params, params=params)]
        self.ddp_config = DistributedDataParallelConfig(overlap_param_gather=True, use_distributed_optimizer=True, overlap_grad_reduce=True)
        self.param_gather_dispatched, self.param_gather_handle, self.next_param_gather_bucket_group = False, None, None

    def start_param_sync(self):
        assert not self.param_gather_dispatched
        self.events.append(("ask", *self.names))
        self.param_gather_dispatched = True
        self.param_gather_handle = SimpleNamespace(wait=lambda: self.events.append(("wait", *self.names)))

    def _post_param_sync(self):
        pass

    finish_param_sync = _ParamAndGradBucketGroup.finish_param_sync


def forward(buckets, relink=True):
    """Events of a forward pass of four layers over buckets of blocks, given in the order of the backward pass."""
    events = []
    groups = [Group(names, events) for names in buckets]
    for later, earlier in zip(groups[1:], groups, strict=False):  # as Megatron links them
        later.next_param_gather_bucket_group = earlier
    chunk = DistributedDataParallel.__new__(DistributedDataParallel)
    chunk.__dict__.update(ddp_config=SimpleNamespace(overlap_param_gather=True), expert_parallel_bucket_groups=groups, bucket_groups=[])
    if relink:
        gather_layers_ahead([chunk])
    for layer in range(4):
        for block in ("fc1", "fc2"):
            next(group for group in groups if f"{layer}.{block}" in group.names).finish_param_sync()
        events.append(("compute", layer))
    return events


ONE_EACH = [[f"{layer}.{block}"] for layer in (3, 2, 1, 0) for block in ("fc2", "fc1")]
A_LAYER = [[f"{layer}.fc2", f"{layer}.fc1"] for layer in (3, 2, 1, 0)]
ACROSS = [["3.fc2", "3.fc1", "2.fc2"], ["2.fc1", "1.fc2", "1.fc1"], ["0.fc2"], ["0.fc1"]]
MIXED = [["3.fc2", "3.fc1"], ["2.fc2"], ["2.fc1"], ["1.fc2", "1.fc1", "0.fc2"], ["0.fc1"]]


def uncovered(events):
    """Buckets that were asked for and waited for with no layer computed in between."""
    asked, found, computed = {}, [], 0
    for event, *names in events:
        if event == "compute":
            computed += 1
        elif event == "ask":
            asked[tuple(names)] = computed
        elif asked[tuple(names)] == computed:
            found.append(tuple(names))
    return found


@pytest.mark.parametrize("buckets", [ONE_EACH, A_LAYER, ACROSS, MIXED], ids=["block", "layer", "across", "mixed"])
def test_only_the_first_layers_buckets_are_waited_for_at_once(buckets):
    events = forward(buckets)
    assert sorted(names for event, *names in events if event == "ask") == sorted(buckets), "each once"
    first = [tuple(names) for names in reversed(buckets) if any(name.startswith("0.") for name in names)]
    assert uncovered(events) == first


def test_as_megatron_links_them_every_second_block_is_waited_for_at_once():
    assert uncovered(forward(ONE_EACH, relink=False)) == [("0.fc1",), ("0.fc2",), ("1.fc2",), ("2.fc2",), ("3.fc2",)]
    assert uncovered(forward(A_LAYER, relink=False)) == uncovered(forward(A_LAYER)) == [("0.fc2", "0.fc1")]


def test_what_is_no_ddp_with_overlap_is_left_alone():
    chunk = DistributedDataParallel.__new__(DistributedDataParallel)
    chunk.__dict__.update(ddp_config=SimpleNamespace(overlap_param_gather=False))
    gather_layers_ahead([chunk, object()])

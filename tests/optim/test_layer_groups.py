# SPDX-License-Identifier: Apache-2.0
"""Buckets of a layer's experts in one of Megatron's bucket groups: gathered, waited for and reduced together, by
Megatron's own code.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup

from zaya_plugin.optim.gradient_buffers import group_layers
from zaya_plugin.optim.parameter_role import ExpertBlock, ParameterRole

LAYERS, BLOCKS = 4, ("fc1", "fc2")
CONFIG = DistributedDataParallelConfig(
    overlap_param_gather=True, use_distributed_optimizer=True, overlap_grad_reduce=True
)
RANKS = SimpleNamespace(rank=lambda: 0, size=lambda: 2)


class Param:
    """A matrix of an expert block, or of no block if `name` is None."""

    def __init__(self, name):
        if name is not None:
            self.zaya_role = ParameterRole(ExpertBlock(int(name.split(".")[0]) + 1, 1))
        self.name = name


def ddp(buckets, config=CONFIG):
    """Return a chunk whose experts are in `buckets` of names, in the order of the backward pass, linked as Megatron
    links them.
    """
    params = [[Param(name) for name in names] for names in buckets]
    # 0.16 reads `params`
    made = [SimpleNamespace(params_list=each, params=each, params_with_extra_main_grads=[]) for each in params]
    groups = [_ParamAndGradBucketGroup([bucket], config, RANKS, 2) for bucket in made]
    if config.overlap_param_gather:
        for later, earlier in zip(groups[1:], groups, strict=False):
            later.next_param_gather_bucket_group = earlier
    chunk = DistributedDataParallel.__new__(DistributedDataParallel)
    chunk.__dict__.update(
        ddp_config=config,
        expert_parallel_bucket_groups=groups,
        bucket_groups=[],
        param_to_bucket_group={p: group for group in groups for p in group.params},
    )
    return chunk


ONE_EACH = [[f"{layer}.{block}"] for layer in (3, 2, 1, 0) for block in ("fc2", "fc1")]
A_LAYER = [[f"{layer}.fc2", f"{layer}.fc1"] for layer in (3, 2, 1, 0)]
ACROSS = [["3.fc2", "3.fc1", "2.fc2"], ["2.fc1", "1.fc2", "1.fc1"], ["0.fc2"], ["0.fc1"]]
MIXED = [["3.fc2", "3.fc1"], ["2.fc2"], ["2.fc1"], ["1.fc2", "1.fc1", "0.fc2"], ["0.fc1"]]


def names_of(group):
    return [[param.name for param in bucket.params_list] for bucket in group.buckets]


@pytest.mark.parametrize(
    "buckets, joined",
    [
        (ONE_EACH, [ONE_EACH[:2], ONE_EACH[2:4], ONE_EACH[4:6], ONE_EACH[6:]]),
        (A_LAYER, [[each] for each in A_LAYER]),
        (ACROSS, [[ACROSS[0]], [ACROSS[1]], ACROSS[2:]]),
        (MIXED, [MIXED[:1], MIXED[1:3], MIXED[3:]]),
    ],
    ids=["block", "layer", "across", "mixed"],
)
def test_buckets_that_one_layer_waits_for_are_one_group(buckets, joined):
    chunk = ddp(buckets)
    group_layers([chunk])
    groups = chunk.expert_parallel_bucket_groups
    assert [names_of(group) for group in groups] == joined
    assert all(
        chunk.param_to_bucket_group[param] is group
        for group in groups
        for bucket in group.buckets
        for param in bucket.params_list
    )
    assert len(chunk.param_to_bucket_group) == 2 * LAYERS
    assert [group.next_param_gather_bucket_group for group in groups] == [None, *groups[:-1]]


def forward(chunk, monkeypatch):
    """Return the events of a forward pass: a layer waits for its blocks in sequence and computes."""
    events = []

    def start(self, force_sync=False):
        assert not self.param_gather_dispatched
        events.append(("ask", id(self)))
        self.param_gather_dispatched, self.param_gather_handle = (
            True,
            SimpleNamespace(wait=lambda: events.append(("wait", id(self)))),
        )

    monkeypatch.setattr(_ParamAndGradBucketGroup, "start_param_sync", start)
    monkeypatch.setattr(_ParamAndGradBucketGroup, "_post_param_sync", lambda self: None, raising=False)
    params = {param.name: group for param, group in chunk.param_to_bucket_group.items()}
    for layer in range(LAYERS):
        for block in BLOCKS:
            params[f"{layer}.{block}"].finish_param_sync()
        events.append(("compute", layer))
    return events


@pytest.mark.parametrize("buckets", [ONE_EACH, A_LAYER, ACROSS, MIXED], ids=["block", "layer", "across", "mixed"])
def test_only_the_first_layer_waits_for_what_it_asks_for(buckets, monkeypatch):
    chunk = ddp(buckets)
    group_layers([chunk])
    asked, computed, uncovered = {}, 0, []
    for event, what in forward(chunk, monkeypatch):
        if event == "compute":
            computed += 1
        elif event == "ask":
            asked[what] = computed
        elif asked[what] == computed:
            uncovered.append(what)
    assert uncovered == [id(chunk.expert_parallel_bucket_groups[-1])] and len(asked) == len(
        chunk.expert_parallel_bucket_groups
    )


def test_a_layer_is_reduced_at_once_when_both_blocks_are_there(monkeypatch):
    reduced = []
    monkeypatch.setattr(
        _ParamAndGradBucketGroup, "start_grad_sync", lambda self, force_all_reduce=False: reduced.append(names_of(self))
    )
    chunk = ddp(ONE_EACH)
    group_layers([chunk])
    # From the second step on Megatron knows how often each gradient is ready.
    for group in chunk.expert_parallel_bucket_groups:
        group.is_first_batch, group.golden_per_param_grad_ready_counts = False, dict.fromkeys(group.params, 1)
    params = {param.name: param for param in chunk.param_to_bucket_group}
    for layer in reversed(range(LAYERS)):
        for number, block in enumerate(BLOCKS):
            param = params[f"{layer}.{block}"]
            chunk.param_to_bucket_group[param].register_grad_ready(param)
            assert len(reduced) == LAYERS - 1 - layer + number
    assert reduced == [ONE_EACH[:2], ONE_EACH[2:4], ONE_EACH[4:6], ONE_EACH[6:]]


def test_what_instances_of_the_optimizer_have_goes_along():
    chunk = ddp(ONE_EACH, replace(CONFIG, num_distributed_optimizer_instances=2))
    for group in chunk.expert_parallel_bucket_groups:
        group.inter_distributed_optimizer_instance_group, group.communication_stream = "others", "stream"
    group_layers([chunk])
    found = {
        (each.inter_distributed_optimizer_instance_group, each.communication_stream)
        for each in chunk.expert_parallel_bucket_groups
    }
    assert found == {("others", "stream")} and len(chunk.expert_parallel_bucket_groups) == LAYERS


def test_a_reduction_that_takes_one_bucket_a_group_keeps_megatrons_groups():
    chunk = ddp(ONE_EACH, replace(CONFIG, reduce_scatter_with_fp32_accumulation=True))
    groups = list(chunk.expert_parallel_bucket_groups)
    group_layers([chunk])
    assert chunk.expert_parallel_bucket_groups == groups and all(len(each.buckets) == 1 for each in groups)


def test_experts_in_no_block_and_other_models_are_left_alone():
    chunk = ddp([[None], [None], [None]])
    groups = list(chunk.expert_parallel_bucket_groups)
    group_layers([chunk, object()])
    assert chunk.expert_parallel_bucket_groups == groups and [
        each.next_param_gather_bucket_group for each in groups
    ] == [None, *groups[:-1]]
    plain = ddp(ONE_EACH, DistributedDataParallelConfig(overlap_grad_reduce=True))
    group_layers([plain])
    assert [each.next_param_gather_bucket_group for each in plain.expert_parallel_bucket_groups] == [None] * LAYERS

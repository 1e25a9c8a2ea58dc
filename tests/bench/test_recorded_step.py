# SPDX-License-Identifier: Apache-2.0
"""Test the breakdown of a forward and backward pass of a small model that torch's own profiler recorded on the CPU."""

import json
import re
from math import prod

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from zaya_plugin.bench import attribution, step_record
from zaya_plugin.bench.step_parts import PARTS, STEP, Ranges, methods
from zaya_plugin.bench.trace import read
from zaya_plugin.plan.flops import Shape, forward_flops_by_part
from zaya_plugin.plan.step_work import Rank, step_work

LAYERS, SIZE, LENGTH, VOCABULARY = 2, 2, 12, 64


@pytest.fixture
def shape():
    return Shape(LAYERS, 32, 4, 2, 8, 4, 24, 16, VOCABULARY)


@pytest.fixture
def model(make_model):
    return make_model(num_layers=LAYERS).train()


@pytest.fixture
def recorded(model, batch, tmp_path):
    """Return the trace's path, after the ranges were removed."""
    ids, positions, labels = batch(SIZE, LENGTH)
    model(ids, positions, None, labels=labels).mean().backward()
    ranges = Ranges()
    ranges.around_model(model)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(STEP):
        model(ids, positions, None, labels=labels).mean().backward()
    ranges.close()
    profiler.export_chrome_trace(str(tmp_path / "trace.json.gz"))
    return tmp_path / "trace.json.gz"


def test_every_part_is_recognised_and_the_shares_add_up_to_the_step(recorded, model, shape):
    trace = read(recorded)
    start, end = trace.window(STEP)
    activities = attribution.operator_activities(trace, start, end)
    work = step_work(shape, LENGTH, Rank(LAYERS, SIZE * LENGTH, 1, experts=4, activation_bytes=4))
    found = step_record.breakdown(activities, start, end, work, gemm=1e12, copy=1e11)
    rows = {row["part"]: row for row in found["parts"]}
    assert list(rows) == list(PARTS) and json.loads(json.dumps(found)) == found
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1, abs=1e-9)
    assert sum(row["ms"] for row in rows.values()) == pytest.approx((end - start) / 1e3)
    for part in ("embedding", "norms", "projections", "prologue", "attention", "router", "experts", "head"):
        row = rows[part]
        assert row["forward_ms"] > 0 and row["backward_ms"] > 0, part
        assert row["forward_ms"] + row["backward_ms"] == pytest.approx(row["ms"])
        assert row["roofline"] > 0
    assert rows["gradients"]["forward_ms"] == 0 < rows["gradients"]["backward_ms"]
    assert rows["optimizer"]["ms"] == 0
    names = {row["part"]: {kernel["name"]: kernel["count"] for kernel in row["longest"]} for row in rows.values()}
    assert not names["communication"]  # of one rank
    assert names["experts"]["ExpertMLP"] == names["experts"]["ExpertMLPBackward"] == LAYERS


def test_operators_are_where_the_model_calls_them(recorded):
    """Counts operators that occur in one part only, over the whole trace."""
    trace = read(recorded)
    found: dict = {}
    for activity in attribution.operator_activities(trace, *trace.window(STEP)):
        if activity.begins:
            key = activity.name, activity.part, activity.backward
            found[key] = found.get(key, 0) + 1
    where = {name: {(part, backward) for n, part, backward in found if n == name} for name, _, _ in found}
    assert found["aten::gelu", "router", False] == found["aten::gelu_backward", "router", True] == 2 * LAYERS
    assert {part for part, _ in where["aten::gelu"]} == {"router"} and where["aten::gelu_backward"] == {
        ("router", True)
    }
    assert {part for part, _ in where["aten::baddbmm"]} == {"prologue"}
    nodes = [places for name, places in where.items() if re.search("hip_ops_cca_prologue.*Backward$", name)]
    assert nodes == [{("prologue", True)}]
    assert where["aten::argmax"] == {("router", False)} and where["aten::sort"] == {("experts", False)}
    assert (
        where["aten::embedding"] == {("embedding", False)}
        and ("embedding", True) in where["aten::embedding_dense_backward"]
    )
    assert {part for part, _ in where["torch::autograd::AccumulateGrad"]} == {"gradients"}
    nobodys = {name for name, part, _ in found if part == "other"}  # the mean of the losses, and its gradient
    assert "aten::mean" in nobodys and nobodys.isdisjoint(
        f"aten::{name}" for name in ("mm", "addmm", "bmm", "mul", "add", "cat", "index_select")
    )


def test_every_method_is_wrapped_on_a_model_of_one_stage(model):
    """A renamed module or method would leave its part without time."""
    ranges = Ranges()
    ranges.around_model(model)
    wrapped = {(id(module), name) for module in model.modules() for name in vars(module)}
    ranges.close()
    for ending, timed in methods().items():
        modules = [module for name, module in model.named_modules() if name.rpartition(".")[2] == ending]
        for method in timed:
            assert any((id(module), method.__name__) in wrapped for module in modules), (ending, method)


def test_nothing_is_left_on_the_model(recorded, model):
    for module in model.modules():
        assert not {"forward", "_prologue", "_attend", "merge_and_norm", "_postprocess"} & set(vars(module)), module


def test_a_wrapped_instance_method_comes_back():
    class Owner:
        def method(self):
            return "of the class"

    owner = Owner()
    owner.method = before = lambda: "of the instance"
    ranges = Ranges()
    ranges.around(owner, "method", "norms")
    assert owner.method is not before and owner.method() == "of the instance"
    ranges.close()
    assert owner.method is before


def flops_of_an_addition(total, a, b, *, out_shape, **_):
    """Of the shapes of total + a b; torch's counter knows such products only out of place."""
    return 2 * prod(a) * b[-1]


def test_operations_are_those_that_torch_counts(model, make_model, batch, shape, monkeypatch):
    """Compares forward and backward with torch's count of matrix products. torch leaves out the depthwise
    convolution, which is elementwise, and counts attention over all pairs, where the formula counts the causal half;
    the reference's loop over experts pads small groups with rows.
    """
    # the counter does not see into operators
    monkeypatch.setattr("hip_ops.runtime.operator.unobserved", lambda: True)
    in_place = dict.fromkeys((torch.ops.aten.baddbmm_, torch.ops.aten.addmm_), flops_of_an_addition)
    length = 256
    model = make_model(num_layers=LAYERS, moe_skip_expert=False)
    ids, positions, labels = batch(1, length)
    forced = torch.arange(length).remainder(4).view(length, 1).expand(LAYERS, -1, -1)  # 64 tokens an expert
    counter = FlopCounterMode(display=False, custom_mapping=in_place)
    with counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(ids, positions, None, labels=labels, extra_block_kwargs={"context_mask": forced}).mean()
        forward = counter.get_total_flops()
        loss.backward()
    parts = forward_flops_by_part(shape, length)
    channels = shape.query_channels + shape.key_channels
    depthwise = 2.0 * LAYERS * channels * shape.conv_taps[0]
    skip_class = 2.0 * LAYERS * shape.router_hidden_size  # this model's router scores no 17th class
    assert forward == length * (sum(parts.values()) + parts["attention"] - depthwise - skip_class)
    # The head and the convolutions before the q-k norm are computed again; a sum of gradients goes through both taps.
    again = length * (parts["head"] + parts["prologue"] - depthwise) + 2 * LAYERS * channels * shape.kv_channels
    assert counter.get_total_flops() == 3 * forward + again

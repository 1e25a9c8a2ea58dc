# SPDX-License-Identifier: Apache-2.0
"""Test the assignment of kernels to parts in a handwritten trace: threads, streams, backward nodes, recomputation,
graphs.
"""

import gzip
import json

import pytest

from hip_ops.runtime.operator import all_operators
from hip_ops.versions import VERSIONS
from zaya_plugin.bench import attribution
from zaya_plugin.bench.trace import parse, read

HOST, ENGINE = 100, 200  # threads: where the model runs, and where autograd does


class Recorder:
    """Events in the form that torch.profiler writes."""

    def __init__(self):
        self.events, self.links, self.launches = [], 0, 0

    def annotation(self, name, start, end, thread=HOST):
        self.events.append(
            dict(ph="X", cat="user_annotation", name=name, tid=thread, ts=start, dur=end - start, args={})
        )

    def operator(self, name, start, end, thread=HOST, **arguments):
        self.events.append(dict(ph="X", cat="cpu_op", name=name, tid=thread, ts=start, dur=end - start, args=arguments))

    def link(self, forward, backward):
        self.links += 1
        for phase, (thread, start) in (("s", forward), ("f", backward)):
            self.events.append(dict(ph=phase, cat="fwdbwd", name="fwdbwd", id=self.links, tid=thread, ts=start))

    def launch(self, host_start, kernels, thread=HOST, call="cudaLaunchKernel", **arguments):
        """kernels: (name, stream, start, end)."""
        self.launches += 1
        runtime = dict(correlation=self.launches, **arguments)
        self.events.append(dict(ph="X", cat="cuda_runtime", name=call, tid=thread, ts=host_start, dur=1, args=runtime))
        for name, stream, start, end in kernels:
            category = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
            inside = dict(correlation=self.launches, stream=stream)
            self.events.append(
                dict(ph="X", cat=category, name=name, tid=stream, ts=start, dur=end - start, args=inside)
            )

    def parts(self, start=0, end=10_000, learned=None):
        found = attribution.device_activities(parse(self.events), start, end, learned)
        return [(a.name, a.part, a.backward, a.communicates) for a in found]


@pytest.fixture
def recorder():
    return Recorder()


def test_the_innermost_range_that_says_something_decides(recorder):
    recorder.annotation("zaya:experts", 0, 100)
    recorder.operator("aten::mm", 1, 5)
    recorder.launch(2, [("gemm", 7, 20, 30)])
    recorder.annotation("zaya:router", 10, 20)
    recorder.annotation("something of a library", 11, 19)
    recorder.launch(12, [("softmax", 7, 30, 35)])
    recorder.operator("hip_ops::merge_norm", 40, 50)
    recorder.launch(42, [("triton_", 7, 50, 60)])
    recorder.launch(60, [("behind", 7, 61, 62)])
    # within what begins at the same moment, though it comes first in the file
    recorder.annotation("zaya:norms", 300, 310)
    recorder.annotation("zaya:head", 300, 320)
    recorder.launch(305, [("inside", 7, 306, 307)])
    recorder.launch(315, [("beside", 7, 316, 317)])
    recorder.launch(150, [("of nobody", 7, 160, 165)])
    recorder.launch(170, [("flash_fwd_kernel", 7, 171, 175)])  # nothing but its name is known
    recorder.launch(180, [("kernel_cutlass_kernel_quackgemm_default", 7, 181, 182)])
    recorder.launch(200, [("another", 7, 201, 205)], thread=999)
    assert recorder.parts() == [
        ("gemm", "experts", False, False),
        ("softmax", "router", False, False),
        ("triton_", "norms", False, False),
        ("behind", "experts", False, False),
        ("of nobody", "other", False, False),
        ("flash_fwd_kernel", "attention", False, False),
        ("kernel_cutlass_kernel_quackgemm_default", "experts", False, False),
        ("another", "other", False, False),
        ("inside", "norms", False, False),
        ("beside", "head", False, False),
    ]


def test_backward_kernels_belong_to_what_made_their_node(recorder):
    recorder.annotation("zaya:head", 0, 20)
    recorder.operator("CrossEntropy", 2, 10, **{"Sequence number": 7, "Fwd thread id": 0, "External id": 1})
    recorder.operator(
        "autograd::engine::evaluate_function: CrossEntropyBackward",
        50,
        80,
        ENGINE,
        **{"Sequence number": 7, "Fwd thread id": 1},
    )
    recorder.operator("CrossEntropyBackward", 52, 60, ENGINE, **{"Sequence number": 7, "Fwd thread id": 1})
    recorder.link((HOST, 2), (ENGINE, 52))
    recorder.launch(55, [("of the node", 7, 100, 110)], ENGINE)
    recorder.launch(70, [("sum for the next node", 7, 110, 120)], ENGINE)
    recorder.operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 90, 99, ENGINE)
    recorder.launch(95, [("add to main_grad", 7, 120, 130)], ENGINE)
    recorder.launch(97, [("ncclDevKernel_ReduceScatter", 20, 125, 300)], ENGINE)
    # zaya_plugin.model.parameters
    recorder.operator("autograd::engine::evaluate_function: ViewTogetherBackward", 99, 101, ENGINE)
    recorder.launch(100, [("add to several", 7, 129, 130)], ENGINE)
    recorder.operator("autograd::engine::evaluate_function: Unknown", 101, 110, ENGINE)
    recorder.launch(105, [("of an unknown node", 7, 130, 131)], ENGINE)
    assert recorder.parts() == [
        ("of the node", "head", True, False),
        ("sum for the next node", "head", True, False),
        ("add to main_grad", "gradients", True, False),
        ("ncclDevKernel_ReduceScatter", "gradients", True, True),
        ("add to several", "gradients", True, False),
        ("of an unknown node", "other", True, False),
    ]


def test_recomputation_in_the_backward_pass_is_of_the_part_that_is_computed_again(recorder):
    recorder.annotation("zaya:experts", 0, 20)
    recorder.operator("CheckpointFunction", 2, 10, **{"Sequence number": 3})
    recorder.operator("CheckpointFunctionBackward", 50, 90, ENGINE, **{"Sequence number": 3})
    recorder.link((HOST, 2), (ENGINE, 50))
    recorder.annotation("zaya:router", 55, 65, ENGINE)
    recorder.operator("aten::mm", 56, 60, ENGINE, **{"Sequence number": 1})
    recorder.launch(57, [("again", 7, 100, 101)], ENGINE)
    recorder.operator("MmBackward0", 70, 80, ENGINE, **{"Sequence number": 1})
    recorder.link((ENGINE, 56), (ENGINE, 70))
    recorder.launch(72, [("gradient", 7, 102, 103)], ENGINE)
    recorder.launch(85, [("left of the checkpoint", 7, 104, 105)], ENGINE)
    assert recorder.parts() == [
        ("again", "router", True, False),
        ("gradient", "router", True, False),
        ("left of the checkpoint", "experts", True, False),
    ]


def test_an_id_finds_the_operator_of_a_launch_that_another_thread_made(recorder):
    recorder.annotation("zaya:prologue", 0, 20)
    recorder.operator("aten::conv1d", 2, 10, **{"External id": 77})
    recorder.launch(5, [("conv", 7, 10, 12)], thread=999, **{"External id": 77})
    assert recorder.parts() == [("conv", "prologue", False, False)]


def test_kernels_of_a_graph_are_those_of_the_step_before_its_capture(recorder):
    recorder.annotation("zaya passes", 10, 100)
    for start, part in ((1, "gradients"), (11, "norms"), (20, "experts"), (30, "norms"), (110, "optimizer")):
        recorder.annotation(f"zaya:{part}", start, start + 5)
        recorder.launch(start + 1, [("elementwise", 7, start + 2, start + 3)])
    recorder.launch(98, [("late", 7, 200, 210)])  # runs when the host is far ahead
    learned = attribution.learn(parse(recorder.events), "zaya passes")
    assert learned == {
        "elementwise": [("norms", False), ("experts", False), ("norms", False)],
        "late": [("other", False)],
    }
    replay = Recorder()
    replay.annotation("zaya:optimizer", 40, 50)
    kernels = [("elementwise", 7, start, start + 2) for start in (11, 13, 15)]
    replay.launch(1, [*kernels, ("unseen rms_norm", 7, 17, 18)], call="cudaGraphLaunch")
    replay.launch(41, [("elementwise", 7, 45, 46)])  # outside the graph its own range counts
    assert [part for _, part, _, _ in replay.parts(learned=learned)] == [
        "norms",
        "experts",
        "norms",
        "norms",
        "optimizer",
    ]


def test_a_graph_with_other_numbers_of_kernels_is_shared_out_in_proportion():
    replay = Recorder()
    replay.launch(
        1, [("elementwise", 7, start, start + 1) for start in (10, 12, 14, 16, 18, 20)], call="hipGraphLaunch"
    )
    learned = {"elementwise": [("norms", False), ("experts", True), ("head", False)]}
    assert [part for _, part, _, _ in replay.parts(learned=learned)] == [
        "norms",
        "norms",
        "experts",
        "experts",
        "head",
        "head",
    ]


def test_activities_are_cut_at_the_step(recorder):
    recorder.launch(1, [("before", 7, 2, 4), ("across", 7, 8, 12), ("after", 7, 30, 31)])
    (found,) = attribution.device_activities(parse(recorder.events), 10, 20)
    assert (found.name, found.start, found.end) == ("across", 10, 12)


def test_without_a_device_operators_count_with_the_time_that_is_their_own(recorder):
    recorder.annotation("zaya step", 0, 100)
    recorder.annotation("zaya:experts", 10, 60)
    recorder.operator("ExpertMLP", 20, 50)
    recorder.operator("aten::mm", 25, 35)
    recorder.operator("aten::mm", 40, 45)
    recorder.operator("autograd::engine::evaluate_function: NegBackward0", 70, 90)
    recorder.operator("aten::neg", 75, 80)
    recorder.operator("c10d::allreduce_", 92, 95)
    found = attribution.operator_activities(parse(recorder.events), 0, 100)
    own = [(a.name, a.start, a.end, a.part, a.begins) for a in found if not a.communicates]
    assert own == [
        ("ExpertMLP", 20, 25, "experts", 1),
        ("ExpertMLP", 35, 40, "experts", 0),
        ("ExpertMLP", 45, 50, "experts", 0),
        ("aten::mm", 25, 35, "experts", 1),
        ("aten::mm", 40, 45, "experts", 1),
        ("aten::neg", 75, 80, "other", 1),
    ]
    assert [(a.start, a.end) for a in found if a.communicates] == [(92, 95)]


def test_what_is_no_trace_is_refused(tmp_path, recorder):
    recorder.annotation("zaya step", 0, 100)
    good, broken = tmp_path / "trace.json.gz", tmp_path / "broken.json"
    with gzip.open(good, "wt") as file:
        json.dump({"traceEvents": recorder.events}, file)
    assert read(good).window("zaya step") == (0, 100)
    with pytest.raises(ValueError, match="has 0 ranges called 'another'. Allowed: 1"):
        read(good).window("another")
    broken.write_text('{"traceEvents": [')
    with pytest.raises(ValueError, match="broken.json: not a chrome trace"):
        read(broken)


def test_kernels_and_copies_between_devices_are_communication_and_copies_on_one_are_not():
    between = (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_ReduceScatter_LD_sum_f32(ncclSymkDevWorkArgs4K)",
        "Memcpy PtoP (Device -> Device)",
    )
    assert all(attribution.COMMUNICATION.search(name) for name in between)
    assert not any(
        attribution.COMMUNICATION.search(name)
        for name in ("Memcpy DtoD (Device -> Device)", "grouped_rows_kernel", "add_runs_kernel")
    )


def test_every_operator_of_hip_ops_belongs_to_a_part():
    named = ("norms", "prologue", "router", *("experts",) * 3, "head", *("optimizer",) * 2, "head", "embedding")
    # the last one belongs to the part that it is called in
    parts = dict(zip(VERSIONS, (*named, None), strict=True))
    ours = [operator for operator in all_operators() if operator.module.startswith("hip_ops.")]
    assert len(ours) > 15
    for operator in ours:
        for name in (f"hip_ops::{operator.name}", f"hip_ops_{operator.name}Backward"):
            assert attribution._by_name(name, attribution.OPERATOR_NAMES) == parts[operator.folder], name

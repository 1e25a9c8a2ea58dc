# SPDX-License-Identifier: Apache-2.0
"""Test the order of a measured run: warm-up, timing, the step before a graph, the traced step, the end."""

import argparse

import pytest
import torch
from torch.profiler import record_function

from zaya_plugin.bench.options import Options
from zaya_plugin.bench.session import Session
from zaya_plugin.bench.step_parts import PASSES, RANGE, STEP
from zaya_plugin.bench.trace import read
from zaya_plugin.hosts.measured_steps import StepParts


class Chunk(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.config = argparse.Namespace(finalize_model_grads_func=lambda model: torch.ones(3).mul_(2))
        self.mlp = torch.nn.Linear(4, 4)

    def zero_grad_buffer(self):
        self.mlp.weight.grad = None


class Optimizer:
    def zero_grad(self):
        pass

    def step(self):
        torch.ones(3).add_(1)


def run(session, args, limit=50) -> int:
    """Take steps as Megatron does until the session ends the run, and return their number."""
    chunk, optimizer = Chunk(), Optimizer()

    def forward_step():
        return chunk.mlp(torch.ones(2, 4)), torch.sum

    def passes(forward_step):
        output, loss = forward_step()
        loss(output).backward()
        chunk.config.finalize_model_grads_func([chunk])

    for taken in range(limit):
        parts = StepParts(forward_step, passes, [chunk], optimizer, args)
        try:
            session.before_step(parts)
        except SystemExit as end:
            assert end.code == 0
            assert (
                "step" not in vars(optimizer)
                and "forward" not in vars(chunk.mlp)
                and "zero_grad_buffer" not in vars(chunk)
            )
            return taken
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        with record_function(f"step {taken}"):
            parts.forward_backward(parts.forward_step)
        optimizer.step()
    raise AssertionError("the session does not end")


@pytest.fixture
def session(tmp_path):
    said = []

    def make(rank=0, **options):
        made = Session(
            Options(**options), rank, "cpu", tmp_path / "trace.json.gz", tmp_path / "reference.json.gz", said.append
        )
        made.said = said
        return made

    return make


def names(path):
    return [r.name for r in read(path).hosts if r.annotation]


def test_a_plain_run(session):
    made = session(warmup=3, steps=2)
    assert run(made, argparse.Namespace(cuda_graph_impl="none")) == 3 + 2 + 2
    assert len(made.moments) == 2 + 1 and made.moments == sorted(made.moments)
    assert made.memory_gib[:2] == (0, 0) and 0.1 < made.memory_gib[2] < 16
    assert made.said == ["timing 2 steps", "tracing one step"] and not made.learned
    found = names(made.trace)
    assert "step 6" in found and "step 5" not in found and found.count(STEP) == 1  # step 5 warmed the profiler
    for part in ("optimizer", "gradients", "experts", "head"):
        assert RANGE + part in found


def test_other_ranks_keep_step_and_trace_nothing(session):
    made = session(rank=1, warmup=1, steps=1)
    assert run(made, argparse.Namespace(cuda_graph_impl="none")) == 1 + 1 + 2
    assert len(made.moments) == 2 and not made.trace.exists() and made.profiler is None


def test_the_only_step_before_a_graph_is_traced_without_a_warm_up(session):
    made = session(warmup=1, steps=1)
    assert run(made, argparse.Namespace(cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=1)) == 2 + 1 + 2
    assert made.learned and names(made.reference).count("step 0") == names(made.reference).count(PASSES) == 1


def test_the_step_before_a_graph_is_traced_and_its_capture_is_not_timed(session):
    made = session(warmup=1, steps=2)
    args = argparse.Namespace(cuda_graph_impl="full_iteration", cuda_graph_warmup_steps=3)
    assert run(made, args) == 4 + 2 + 2  # steps 0 to 2 are launched, 3 is captured
    assert made.learned and names(made.reference).count("step 2") == 1
    assert (
        names(made.reference).count(PASSES) == 1
        and not {"step 1", "step 3"} & set(names(made.reference))
        and RANGE + "optimizer" in names(made.reference)
    )
    assert "step 7" in names(made.trace) and len(made.moments) == 3

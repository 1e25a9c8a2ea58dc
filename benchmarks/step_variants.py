# SPDX-License-Identifier: Apache-2.0
"""Changes to our forward and backward pass that are measured before they are adopted, each as a context manager.

None of them changes what is computed beyond rounding. `plain` is the model as `zaya train` runs it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from zaya_plugin.model import experts


@contextmanager
def plain(model) -> Iterator[None]:
    """Nothing changed."""
    yield


@contextmanager
def plain_linears(model) -> Iterator[None]:
    """F.linear in place of Megatron's parallel linears, which at tensor parallelism 1 compute the same."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    def forward(self, x, weight=None, *_, **__):
        return torch.nn.functional.linear(x, self.weight if weight is None else weight), None

    with (
        mock.patch.object(ColumnParallelLinear, "forward", forward),
        mock.patch.object(RowParallelLinear, "forward", forward),
    ):
        yield


@contextmanager
def compiled_layers(model) -> Iterator[None]:
    """torch.compile on whole layers, broken at the experts."""
    from zaya_plugin.model.layer import ZayaTransformerLayer

    torch._dynamo.reset()
    compiled = torch.compile(ZayaTransformerLayer.forward, dynamic=False)
    # Functions inside that are compiled by themselves stay so.
    uncompiled = torch._dynamo.disable(experts.GroupedExperts.forward)
    with (
        mock.patch.object(ZayaTransformerLayer, "forward", compiled),
        mock.patch.object(experts.GroupedExperts, "forward", uncompiled),
    ):
        yield


def unwrapped(model):
    """The GPTModel inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


CHANGES = {
    "plain": plain,
    "linears": plain_linears,
    "layers": compiled_layers,
    "graph": plain,  # measure_step.py captures the step instead of launching it
}


@contextmanager
def variant(name: str, model) -> Iterator[None]:
    """Apply changes to `model` for the time of the block; `name` joins them by +, as in compiled+lean_ce."""
    with ExitStack() as stack:
        for change in name.split("+"):
            stack.enter_context(CHANGES[change](model))
        yield

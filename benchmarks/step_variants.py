# SPDX-License-Identifier: Apache-2.0
"""Changes to our forward and backward pass that are measured before they are adopted, each as a context manager.

None of them changes what is computed beyond rounding. `plain` is the model as `zaya train` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch import Tensor

from zaya_plugin.model import experts


@contextmanager
def plain(model) -> Iterator[None]:
    """Nothing changed."""
    yield


@contextmanager
def compiled_functions(model) -> Iterator[None]:
    """torch.compile on the pure functions between the matrix products: one graph for all layers."""
    from zaya_plugin.model import attention, norm, residual, router

    functions = [
        (attention, "mix_qk"), (attention, "shift_values"), (residual, "scale_residual"), (residual, "affine"),
        (norm, "rms_norm"), (router, "rms_norm"), (router, "choose_expert"), (experts, "swiglu"),
    ]
    torch._dynamo.reset()
    with ExitStack() as stack:
        for module, name in functions:
            wrapped = torch.compile(getattr(module, name), dynamic=False)
            stack.enter_context(mock.patch.object(module, name, wrapped))
        stack.enter_context(mock.patch.object(experts, "swiglu_backward", torch.compile(_swiglu_backward, dynamic=False)))
        yield


def _swiglu_backward(grad: Tensor, gate_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """experts.swiglu_backward without `out=` on views, at which torch.compile breaks its graph."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    grad, weights = grad.float(), weights.float().unsqueeze(-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    product = silu * up
    grad_weights = (grad * product).sum(-1)
    grad = grad * weights
    grad_gate_up = torch.cat((grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu), dim=-1)
    return grad_gate_up.to(gate_up.dtype), grad_weights, (product * weights).to(gate_up.dtype)


def _loss_and_logsumexp(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    normalizer = torch.logsumexp(logits, dim=-1)
    return normalizer - logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), normalizer


def _gradient_in_place(logits: Tensor, labels: Tensor, normalizer: Tensor, grad: Tensor) -> None:
    softmax = torch.exp(logits.float() - normalizer.unsqueeze(-1))
    here = torch.arange(logits.shape[-1], device=logits.device) == labels.unsqueeze(-1)
    logits.copy_((softmax - here.float()) * grad.unsqueeze(-1))


class LeanCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits [T, v] that keeps the logits in their own dtype and overwrites them with the gradient.

    Six bytes an element of memory traffic in bf16, and no fp32 copy of the logits at any time.
    """

    forward_kernel: Callable = staticmethod(torch.compile(_loss_and_logsumexp, dynamic=False))
    backward_kernel: Callable = staticmethod(torch.compile(_gradient_in_place, dynamic=False))

    @staticmethod
    def forward(ctx, logits, labels):
        losses, normalizer = LeanCrossEntropy.forward_kernel(logits, labels)
        ctx.save_for_backward(logits, labels, normalizer)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        logits, labels, normalizer = ctx.saved_tensors
        LeanCrossEntropy.backward_kernel(logits, labels, normalizer, grad)
        return logits, None


@contextmanager
def lean_cross_entropy(model) -> Iterator[None]:
    """LeanCrossEntropy in place of Megatron's, which makes an fp32 copy and passes over it nine times."""
    gpt = unwrapped(model)

    def loss(labels, logits):  # labels [b, s], logits [s, b, v] -> [b, s]
        s, b, v = logits.shape
        losses = LeanCrossEntropy.apply(logits.view(s * b, v), labels.transpose(0, 1).reshape(-1))
        return losses.view(s, b).transpose(0, 1)

    with mock.patch.object(gpt, "compute_language_model_loss", loss):
        yield


class DirectExpertMLP(torch.autograd.Function):
    """ExpertMLP whose weight gradients go into the fp32 gradient buffer block by block, past autograd's accumulation."""

    @staticmethod
    def forward(ctx, x, weights, offsets, fc1, fc2, fc1_grad, fc2_grad):
        gate_up = experts.grouped_rows(x, fc1.transpose(1, 2), offsets)
        y = experts.grouped_rows(experts.swiglu(gate_up, weights), fc2.transpose(1, 2), offsets)
        ctx.save_for_backward(x, weights, offsets, gate_up, fc1, fc2)
        ctx.grads = fc1_grad, fc2_grad
        return y.masked_fill_(experts._rows_of_no_expert(offsets, len(x)).unsqueeze(-1), 0.0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_y):
        x, weights, offsets, gate_up, fc1, fc2 = ctx.saved_tensors
        fc1_grad, fc2_grad = ctx.grads
        grad_y = grad_y.contiguous()
        grad_hidden = experts.grouped_rows(grad_y, fc2, offsets)
        grad_gate_up, grad_weights, hidden = experts.swiglu_backward(grad_hidden, gate_up, weights)
        accumulate(fc2_grad, experts.grouped_outer(grad_y, hidden, offsets))
        accumulate(fc1_grad, experts.grouped_outer(grad_gate_up, x, offsets))
        nobody = experts._rows_of_no_expert(offsets, len(x))
        grad_x = experts.grouped_rows(grad_gate_up, fc1, offsets).masked_fill_(nobody.unsqueeze(-1), 0.0)
        grad_weights = grad_weights.masked_fill(nobody, 0.0).to(weights.dtype)
        return grad_x, grad_weights, None, None, None, None, None


@torch.compile(dynamic=False)
def accumulate(total: Tensor, part: Tensor) -> None:
    """total += part, fp32 += bf16; torch's own mixed add is not vectorised."""
    total.add_(part)


@contextmanager
def direct_expert_gradients(model) -> Iterator[None]:
    """DirectExpertMLP on the blocks of parameters and of gradients in DDP's buffers."""
    blocks: dict[int, list[Tensor]] = {}

    def block_of(tensors: list[Tensor]) -> Tensor:
        block = experts.as_block(tensors)
        assert block.data_ptr() == tensors[0].data_ptr(), "copied"
        return block

    for module in model.modules():
        if isinstance(module, experts.GroupedExperts):
            groups = [module.linear_fc1.matrices(), module.linear_fc2.matrices()]
            blocks[id(module)] = [
                *(block_of([m.detach() for m in g]) for g in groups), *(block_of([m.main_grad for m in g]) for g in groups),
            ]

    def forward(self, x, weights, offsets):
        return DirectExpertMLP.apply(x, weights, offsets, *blocks[id(self)])

    with mock.patch.object(experts.GroupedExperts, "forward", forward):
        yield


@contextmanager
def compiled_routers(model) -> Iterator[None]:
    """torch.compile on the whole router, products included."""
    from zaya_plugin.model.router import ZayaRouter

    compiled = torch.compile(ZayaRouter.forward, dynamic=False)
    with mock.patch.object(ZayaRouter, "forward", compiled):
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
    from zaya_plugin.model.moe import PermuteRows

    torch._dynamo.reset()
    compiled = torch.compile(ZayaTransformerLayer.forward, dynamic=False)
    # Functions inside that are compiled by themselves stay so.
    uncompiled = torch._dynamo.disable(experts.GroupedExperts.forward)
    with (
        mock.patch.object(ZayaTransformerLayer, "forward", compiled),
        mock.patch.object(experts.GroupedExperts, "forward", uncompiled),
        mock.patch.object(PermuteRows, "apply", torch._dynamo.disable(PermuteRows.apply)),
    ):
        yield


def unwrapped(model):
    """The GPTModel inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


CHANGES = {
    "plain": plain,
    "compiled": compiled_functions,
    "routers": compiled_routers,
    "linears": plain_linears,
    "layers": compiled_layers,
    "lean_ce": lean_cross_entropy,
    "direct_grads": direct_expert_gradients,
    "graph": plain,  # measure_step.py captures the step instead of launching it
}


@contextmanager
def variant(name: str, model) -> Iterator[None]:
    """Apply changes to `model` for the time of the block; `name` joins them by +, as in compiled+lean_ce."""
    with ExitStack() as stack:
        for change in name.split("+"):
            stack.enter_context(CHANGES[change](model))
        yield

# SPDX-License-Identifier: Apache-2.0
"""Changes to our forward and backward pass that are measured before they are adopted, each as a context manager.

None of them changes what is computed beyond rounding. `plain` is the model as `zaya train` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor


@contextmanager
def plain(model) -> Iterator[None]:
    """Nothing changed."""
    yield


@contextmanager
def cudnn_attention(model) -> Iterator[None]:
    """cuDNN's attention before flash attention; torch's own order is the other way round."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from zaya_plugin.model import core_attention

    order = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    original = core_attention.causal_attention

    def attend(*args):
        with sdpa_kernel(order, set_priority=True):
            return original(*args)

    with mock.patch.object(core_attention, "causal_attention", attend):
        yield


@contextmanager
def compiled_functions(model) -> Iterator[None]:
    """torch.compile on the pure functions between the matrix products: one graph for all layers."""
    from zaya_plugin.model import attention, experts, norm, residual, router

    functions = [
        (attention, "mix_qk"), (attention, "shift_values"), (residual, "scale_residual"), (residual, "affine"),
        (norm, "rms_norm"), (router, "rms_norm"), (router, "choose_expert"), (experts, "swiglu"),
        (experts, "swiglu_backward"),
    ]
    torch._dynamo.reset()
    with ExitStack() as stack:
        for module, name in functions:
            wrapped = torch.compile(getattr(module, name), dynamic=False)
            stack.enter_context(mock.patch.object(module, name, wrapped))
        yield


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


@contextmanager
def torch_compiled_cross_entropy(model) -> Iterator[None]:
    """torch's own cross_entropy, compiled as one graph."""
    gpt = unwrapped(model)

    @torch.compile(dynamic=False)
    def losses(logits, labels):
        return F.cross_entropy(logits.float(), labels, reduction="none")

    def loss(labels, logits):
        s, b, v = logits.shape
        return losses(logits.view(s * b, v), labels.transpose(0, 1).reshape(-1)).view(s, b).transpose(0, 1)

    with mock.patch.object(gpt, "compute_language_model_loss", loss):
        yield


def unwrapped(model):
    """The GPTModel inside Megatron's wrappers."""
    while hasattr(model, "module"):
        model = model.module
    return model


VARIANTS: dict[str, tuple] = {
    "plain": (plain,),
    "cudnn": (cudnn_attention,),
    "lean_ce": (lean_cross_entropy,),
    "compiled_ce": (torch_compiled_cross_entropy,),
    "compiled": (compiled_functions,),
    "all": (compiled_functions, cudnn_attention, lean_cross_entropy),
}


@contextmanager
def variant(name: str, model) -> Iterator[None]:
    """Apply the changes of VARIANTS[name] to `model` for the time of the block."""
    with ExitStack() as stack:
        for change in VARIANTS[name]:
            stack.enter_context(change(model))
        yield

# SPDX-License-Identifier: Apache-2.0
"""Operators that go past torch's dispatch where nobody would see it: it costs the host more than the kernels take on the device.

    @direct_operator("hip_ops::scale", mutates_args=())
    def _scale(x: Tensor, factor: float) -> Tensor: ...

is registered as `torch.library.custom_op` would, with `register_fake` and `register_autograd` of the same meaning. A call comes to the same
results, gradients and errors on either way; torch's is taken where somebody may look at, or stand in for, operators by name: compilers and tracers,
modes, transforms, fake and meta tensors and other subclasses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OTHERS = frozenset((int, float, bool, NoneType, torch.dtype))


def nobody_looks() -> bool:
    """Whether no compiler, tracer, transform or mode is at work in this thread."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


class DirectOperator:
    """See the module's text. The first argument is a tensor, the others tensors on its device, numbers, dtypes or None.

    registered: torch's operator, of which that is the implementation: `run`.
    """

    def __init__(self, name: str, run: Callable, mutates_args: Iterable[str]):
        self.registered = torch.library.custom_op(name, run, mutates_args=mutates_args)
        self.run = run
        self._function: type[torch.autograd.Function] | None = None
        names = run.__code__.co_varnames[: run.__code__.co_argcount]
        self._mutated = tuple(names.index(each) for each in mutates_args)
        self._name = name.replace("::", "_")  # of nodes of the backward pass, by which profiles tell them

    def register_fake(self, function: Callable) -> Callable:
        return self.registered.register_fake(function)

    def register_autograd(self, gradients: Callable, *, setup_context: Callable) -> None:
        self.registered.register_autograd(gradients, setup_context=setup_context)
        assert not self._mutated, self._name
        run = self.run

        def forward(ctx, *arguments):
            results = run(*arguments)
            setup_context(ctx, arguments, results)
            return results

        self._function = type(
            self._name,
            (torch.autograd.Function,),
            {"forward": staticmethod(forward), "backward": staticmethod(gradients)},
        )

    def __call__(self, *arguments: Any) -> Any:
        if not nobody_looks():
            return self.registered(*arguments)
        differentiated = False
        for argument in arguments:
            kind = type(argument)
            if kind in _TENSORS:
                differentiated = differentiated or argument.requires_grad
            elif kind not in _OTHERS:
                return self.registered(*arguments)
        if arguments[0].is_meta:
            return self.registered(*arguments)
        if differentiated and torch.is_grad_enabled():
            # Without a formula, torch's operator has results that refuse to be differentiated.
            return self.registered(*arguments) if self._function is None else self._function.apply(*arguments)
        results = self.run(*arguments)
        for place in self._mutated:
            increment_version(arguments[place])
        return results


def direct_operator(name: str, *, mutates_args: Iterable[str]) -> Callable[[Callable], DirectOperator]:
    """A decorator; arguments as of torch.library.custom_op."""
    return lambda run: DirectOperator(name, run, mutates_args)

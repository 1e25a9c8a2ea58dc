# SPDX-License-Identifier: Apache-2.0
"""Compiles functions with torch.compile on accelerators. On a CPU they run uncompiled.

The functions compute what lies between matrix products, where eager mode reads and writes each intermediate result.
They take tensors and numbers and keep no state, so all layers share one compiled version. TORCHDYNAMO_DISABLE=1
disables compilation.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from hip_ops.errors import warn_once
from hip_ops.runtime.choice import missing
from hip_ops.versions import selection

P = ParamSpec("P")
R = TypeVar("R")


def compile_function(function: Callable) -> Callable:
    """Return `function`, compiled at its first call with static shapes, one version per shape.

    torch keeps at most eight versions of one code object (torch._dynamo.config.recompile_limit). So each choice of
    arguments that are None is compiled from a copy, as if it were a function of its own.
    """
    forms: dict[tuple[bool, ...], Callable] = {}

    def call(*arguments, **keywords):
        form = tuple([argument is None for argument in arguments])
        if form not in forms:
            code = function.__code__.replace(co_name=f"{function.__name__}_{len(forms)}")
            inside = function.__globals__, function.__name__, function.__defaults__, function.__closure__
            copied = types.FunctionType(code, *inside)
            copied.__kwdefaults__ = function.__kwdefaults__
            forms[form] = torch.compile(copied, dynamic=False)
        return forms[form](*arguments, **keywords)

    return call


def formula(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a differentiable function of plain torch: it is compiled for tensors on an accelerator unless the
    reference is requested. Where the compiler fails it runs uncompiled from then on, with a warning.

    The function is no operator: it has no other versions and no self-check. Where hip or triton is requested it is
    compiled too.
    """
    folder = function.__module__.rpartition(".")[0].rpartition(".")[2]
    failures: list[Exception] = []

    @functools.cache
    def compiled() -> Callable:
        """Return the compiled function; made at the first use, because torch.compile imports its compilers."""
        not_available = missing("compiled", torch.device("cuda"), named=False)
        return function if not_available else compile_function(function)

    @functools.wraps(function)
    def call(*args, **kwargs):
        on_accelerator = any(isinstance(argument, Tensor) and argument.is_cuda for argument in args)
        as_written = (
            not on_accelerator
            or torch.compiler.is_compiling()
            or bool(failures)
            or selection().of(folder).version == "reference"
        )
        if as_written:
            return function(*args, **kwargs)
        try:
            return compiled()(*args, **kwargs)
        except Exception as error:
            if not _is_of_the_compiler(error):
                raise
            failures.append(error)
            text = "hip_ops: torch.compile failed for %s, which runs uncompiled: %s"
            reason = " ".join(str(error).splitlines()[:2])
            warn_once(("formula", function.__qualname__), text, function.__qualname__, reason)
        return function(*args, **kwargs)

    return call


def _is_of_the_compiler(error: Exception) -> bool:
    """Return whether torch.compile raised the error before anything ran. Its module is imported when it compiles."""
    exceptions = sys.modules.get("torch._dynamo.exc")
    return exceptions is not None and isinstance(error, exceptions.BackendCompilerFailed)

# SPDX-License-Identifier: Apache-2.0
"""An operator: the tensors that it takes, its registration with torch, and its call.

    _scale = Operator(
        reference.scale,
        takes="x [n, h] bf16|fp32",
        example=lambda device: (torch.randn(3, 5, device=device), 2.0),
    )
    y = _scale(x, 2.0)

`reference` is the definition, in `hip_ops/ops/<operator>/reference.py`; its annotations are the schema of the torch
operator `hip_ops::scale`, and on meta tensors it gives the shapes and dtypes of fake results. The other versions are
the functions of the same name in hip.py, triton.py, ... next to it, as hip_ops/versions.py lists them; choice.py
chooses among them.

A call goes through `Operator.__call__`, `Operator.run`, which checks the arguments, `Versions.implementations` of
choice.py (at the first call it runs the self-checks), and the first version whose function of `fits` accepts the
arguments. In a Triton version launch.py makes rows, tile and grid; in a HIP version launchers.py loads the library and
calls its launcher.

A call bypasses torch's dispatcher where nothing can observe it: the dispatcher costs the host more than the kernels
take on the device. The registered operator is called where something may observe or replace operators by name:
compilers, tracers, modes (that of zaya_plugin on a CPU too), transforms, fake and meta tensors and other subclasses.
Both ways give the same results, gradients and errors.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map_only

from hip_ops.errors import NotCompiled, mistake, warn_once
from hip_ops.runtime.choice import Versions, compile_side_by_side
from hip_ops.runtime.code_objects import objects_identity
from hip_ops.runtime.compiled import compile_function
from hip_ops.runtime.launch import wide
from hip_ops.runtime.launchers import identity
from hip_ops.versions import VERSIONS

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "bool": torch.bool,
}
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
MAX_CHECKED_CALLS = 4096
OPERATORS: dict[str, Operator] = {}
# What versions come from, after the operators in `running`.
LIBRARY, OBJECTS, TRITON = "library of the HIP kernels", "objects of the Triton kernels", "Triton"
Rule = Callable[[dict], "tuple[str, str] | None"]
_LINE = re.compile(r"(\w+)(\?)?\s+\[(.*?)\]\s+(\S+)$")
_INTS = (int, torch.SymInt)
_TENSORS = frozenset((Tensor, torch.nn.Parameter))
_OTHERS = frozenset((int, float, bool, str, NoneType, torch.dtype))
_LISTS = frozenset((list, tuple))


@dataclass(frozen=True)
class Line:
    """One declared tensor. sizes: the shape without the leading `...`."""

    name: str
    optional: bool
    leading: bool
    sizes: tuple[str, ...]
    dtype: str

    @classmethod
    def parse(cls, text: str) -> Line:
        match = _LINE.match(text)
        assert match, f"not a declaration of a tensor: {text!r}"
        name, optional, shape, dtype = match.groups()
        sizes = [size.strip() for size in shape.split(",")] if shape else []
        leading = bool(sizes) and sizes[0] == "..."
        return cls(name, optional is not None, leading, tuple(sizes[leading:]), dtype)


class Declaration:
    """Declares the tensors that an operator takes, as text, and checks an operator's arguments by it.

        TAKES = '''
            output    [..., h>0]  bf16|fp32
            weight    [h]         bf16|fp32
            offsets?  [experts]   int32
        '''
    A line is a name, a shape and a dtype. `?` after the name allows None.

    A size in a shape is one of
        ...         the leading sizes, which all tensors of the call share
        name        the first tensor with this name sets its value, or an integer argument of this name does
        name>0      the same, and an empty size is refused
        (n+g)*d     arithmetic over names that have a value

    A dtype is one of these, or several joined by `|`
        fp32        or bf16, fp16, int32, int64, bool
        =name       the dtype of another tensor
        wide(name)  fp32, or fp64 where that tensor is fp64
        fp32!       fp32 only

    Where bf16, fp16 or fp32 is allowed, all these tensors of a call may be fp64 instead; `fp32!` stays fp32.

    Args:
        operator: name in messages. parameters: names of the operator's arguments, in order.
        takes: the declaration as text. rule: further conditions; gets sizes and arguments by name and returns None, or
            what is wrong and what is allowed.
    """

    def __init__(self, operator: str, parameters: Sequence[str], takes: str, rule: Rule | None = None):
        self.operator, self.parameters, self.rule = operator, tuple(parameters), rule
        self.takes = tuple(Line.parse(line.strip()) for line in takes.strip().splitlines() if line.strip())
        unknown = {line.name for line in self.takes} - set(parameters)
        assert not unknown, f"{operator} has no arguments {unknown}"
        self._known: set[tuple] = set()

    def check(self, arguments: Sequence[Any]) -> None:
        """Raise ValueError for a wrong argument; the message names operator, argument, what was given and what is
        allowed.
        """
        if not self.takes and self.rule is None:
            return
        key = tuple([(a.shape, a.dtype, a.device) if isinstance(a, Tensor) else a for a in arguments])
        try:
            if key in self._known:
                return
        except TypeError:  # symbolic sizes, while something is traced
            key = None
        self._check(dict(zip(self.parameters, arguments, strict=True)))
        if key is not None:
            if len(self._known) >= MAX_CHECKED_CALLS:
                self._known.clear()
            self._known.add(key)

    def fail(self, name: str, what: str, allowed: str) -> None:
        """Raise ValueError for an argument. what: "has shape (3,)", for example."""
        raise mistake(f"hip_ops.{self.operator}", f"{name} {what}", allowed)

    def _check(self, arguments: Mapping[str, Any]) -> None:
        """Check all tensors, with the sizes by name; the leading sizes are under "..."."""
        sizes = {
            name: value for name, value in arguments.items() if isinstance(value, _INTS) and not isinstance(value, bool)
        }
        first = double = None
        for line in self.takes:
            tensor = arguments[line.name]
            if tensor is None:
                if not line.optional:
                    self.fail(line.name, "is None", "a tensor")
                continue
            first = first or (line.name, tensor)
            if tensor.device != first[1].device:
                self.fail(line.name, f"is on {tensor.device}", f"on {first[1].device} like {first[0]}")
            self._shape(line, tensor, sizes)
            if double is None and tensor.is_floating_point():
                double = tensor.dtype == torch.float64
            allowed = self._dtypes(line.dtype, arguments, bool(double))
            if tensor.dtype not in allowed:
                like = f" like {line.dtype[1:]}" if line.dtype.startswith("=") else ""
                either = not double and not like and "!" not in line.dtype and set(allowed) & set(FLOATS)
                double_too = " (or all tensors torch.float64)" if either else ""
                self.fail(line.name, f"is {tensor.dtype}", " or ".join(map(str, allowed)) + like + double_too)
        wrong = self.rule({**arguments, **sizes}) if self.rule else None
        if wrong:
            raise mistake(f"hip_ops.{self.operator}", *wrong)

    def _shape(self, line: Line, tensor: Tensor, sizes: dict[str, Any]) -> None:
        """Check one shape and store the sizes that it names for the first time."""
        shape, count = tuple(tensor.shape), len(line.sizes)
        leading, tail = shape[: max(0, len(shape) - count)], shape[max(0, len(shape) - count) :]
        right = len(tail) == count and (sizes.setdefault("...", leading) == leading if line.leading else not leading)
        for size, extent in zip(line.sizes, tail, strict=False):
            name = size.removesuffix(">0")
            right = right and extent == (
                sizes.setdefault(name, extent) if name.isidentifier() else evaluate(name, sizes)
            )
            right = right and (extent > 0 or name == size)
        if not right:
            self.fail(line.name, f"has shape {shape}", self._shape_text(line, sizes))

    @staticmethod
    def _shape_text(line: Line, sizes: Mapping[str, Any]) -> str:
        """Describe the declared shape, in numbers where the sizes are known."""
        declared = f"[{', '.join(('...', *line.sizes) if line.leading else line.sizes)}]"
        try:
            tail = tuple(evaluate(size.removesuffix(">0"), sizes) for size in line.sizes)
        except (NameError, ZeroDivisionError):
            return declared
        return (
            declared if ">0" in declared else f"{(*sizes.get('...', ()), *tail) if line.leading else tail}, {declared}"
        )

    def _dtypes(self, text: str, arguments: Mapping[str, Any], double: bool) -> tuple[torch.dtype, ...]:
        allowed = []
        for part in text.split("|"):
            if part.startswith("="):
                allowed.append(arguments[part[1:]].dtype)
            elif part.startswith("wide("):
                allowed.append(wide(arguments[part[5:-1]].dtype))
            elif part.endswith("!"):
                allowed.append(DTYPES[part[:-1]])
            else:
                allowed.append(torch.float64 if double and DTYPES[part] in FLOATS else DTYPES[part])
        return tuple(dict.fromkeys(allowed))


def evaluate(text: str, sizes: Mapping[str, Any]):
    """Evaluate arithmetic over sizes. `text` is a literal of this package, never a user's input."""
    return eval(text, {"__builtins__": {}}, dict(sizes))  # noqa: S307


def unobserved() -> bool:
    """Return whether no compiler, tracer, transform or mode is active in this thread."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


class Operator(Versions):
    """An operator, called with the arguments of its reference; the module's docstring explains it.

    Args:
        reference: the definition. Its arguments are positional, without defaults; the first is a tensor or a list of
            tensors. Its module names the operator's folder, by which versions are chosen.
        takes, rule: as `Declaration`.
        mutates: names of the arguments that it writes to.
        choosing: example, compare, tolerance, written, more_examples, tolerances, fits, prefers and available, as
            `Versions`. Calls whose first tensor is fp64 run the reference.
    """

    def __init__(
        self,
        reference: Callable,
        *,
        takes: str = "",
        rule: Rule | None = None,
        mutates: Sequence[str] = (),
        **choosing: Any,
    ):
        assert reference.__name__ not in OPERATORS, f"there is an operator {reference.__name__} already"
        self.module = reference.__module__.rpartition(".")[0]
        folder = self.module.rpartition(".")[2]
        super().__init__(reference.__name__, folder, VERSIONS[folder], reference=reference, **choosing)
        signature = inspect.signature(reference)
        # torch leaves out arguments that equal their default.
        assert all(p.default is p.empty for p in signature.parameters.values()), f"{self.name}: defaults"
        parameters = list(signature.parameters)
        self.declaration = Declaration(self.name, parameters, takes, rule)
        self._mutated = tuple(parameters.index(name) for name in mutates)
        schema = torch.library.infer_schema(reference, mutates_args=tuple(mutates))
        self.registered = torch.library.custom_op(
            f"hip_ops::{self.name}", self.run, mutates_args=tuple(mutates), schema=schema
        )
        self.registered.register_fake(self._fake)
        # The autograd function that `register_autograd` makes, for calls past torch's dispatcher.
        self._function: type[torch.autograd.Function] | None = None
        OPERATORS[self.name] = self

    def register_autograd(self, gradients: Callable, *, setup_context: Callable) -> None:
        """Register gradients, as torch.library does: `gradients(ctx, *gradients of results)`, `setup_context(ctx,
        inputs, output)`.
        """
        assert not self._mutated, self.name
        self.registered.register_autograd(gradients, setup_context=setup_context)
        run = self.run

        def forward(ctx, *arguments):
            results = run(*arguments)
            setup_context(ctx, arguments, results)
            return results

        methods = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
        # Profiles show this name for nodes of the backward pass.
        self._function = type(f"hip_ops_{self.name}", (torch.autograd.Function,), methods)

    def __call__(self, *arguments: Any) -> Any:
        """Call `run`: through torch's registered operator where something may observe the call, through the autograd
        function where a gradient is recorded, otherwise directly.
        """
        if not unobserved():
            return self.registered(*arguments)
        differentiated = listed = False
        for argument in arguments:
            kind = type(argument)
            if kind in _TENSORS:
                differentiated = differentiated or argument.requires_grad
            elif kind in _LISTS:
                listed = True
                if any([type(item) not in _TENSORS and type(item) not in _OTHERS for item in argument]):
                    return self.registered(*arguments)
            elif kind not in _OTHERS:
                return self.registered(*arguments)
        if (_first_tensor(arguments) if listed else arguments[0]).is_meta:
            return self.registered(*arguments)
        if (differentiated or listed) and torch.is_grad_enabled():
            # Without registered gradients, results of torch's operator cannot be differentiated.
            if self._function is None or listed:
                return self.registered(*arguments)
            return self._function.apply(*arguments)
        results = self.run(*arguments)
        for place in self._mutated:
            if arguments[place] is not None:
                increment_version(arguments[place])
        return results

    def _fake(self, *arguments: Any) -> Any:
        """Check the arguments and return contiguous empty results, as the reference gives them on meta tensors."""
        self.declaration.check(arguments)
        if not self.registered._opoverload._schema.returns:
            return None
        first = _first_tensor(arguments)
        on_meta = tree_map_only(Tensor, lambda tensor: torch.empty_like(tensor, device="meta"), arguments)
        results = self.reference(*on_meta)
        return tree_map_only(Tensor, lambda result: first.new_empty(result.shape, dtype=result.dtype), results)

    def run(self, *arguments: Any) -> Any:
        """Check the arguments and call the first version that takes them, without gradients; fp64 calls the
        reference.
        """
        self.declaration.check(arguments)
        first = arguments[0] if isinstance(arguments[0], Tensor) else _first_tensor(arguments)
        if first.dtype == torch.float64:
            return self.reference(*arguments)
        for place, (fits, function) in enumerate(self.implementations(first.device)):
            if fits is None or fits(*arguments):
                if place:
                    self._warn_if_requested(first)
                try:
                    return function(*arguments)
                except NotCompiled as error:  # before anything was launched
                    warn_once((first.device, str(error)), "%s. Another version of %s runs", error, self.name)
        raise AssertionError("the last version takes every call")

    def _warn_if_requested(self, first: Tensor) -> None:
        """Warn once if a version that was requested by name does not take a call. first: the call's first tensor."""
        request = self.request()
        if request.version in self.versions:
            key = (first.device, request.version, f"{self.name} of {request.source}")
            text = "hip_ops: %s: this version of %s does not take %s %s; such calls run another version"
            dtype = str(first.dtype).removeprefix("torch.")
            warn_once(key, text, request.source, self.name, dtype, tuple(first.shape))

    @functools.cached_property
    def _compiled(self) -> Callable:
        return compile_function(self.reference)

    def _function_of(self, version: str) -> Callable:
        """Return the function of `version`: `<operator>` of hip_ops/ops/<folder>/<version>.py, which it imports.
        compiled is made from the reference.
        """
        if version == "reference":
            return self.reference
        if version == "compiled":
            return self._compiled
        return getattr(importlib.import_module(f"{self.module}.{version}"), self.reference.__name__)


def _first_tensor(values: Iterable) -> Tensor | None:
    for value in values:
        if isinstance(value, Tensor):
            return value
        if isinstance(value, (list, tuple)):
            tensor = _first_tensor(value)
            if tensor is not None:
                return tensor
    return None


def all_operators() -> list[Operator]:
    """Import all operators of the package and return them."""
    for folder in VERSIONS:
        importlib.import_module(f"hip_ops.ops.{folder}")
    return list(OPERATORS.values())


def warm_up(device: torch.device | str, operators: Iterable[Versions] | None = None) -> dict[str, str]:
    """Choose and check the versions of all operators on `device` before their first use. Required before a graph is
    captured.

    Return by operator which version runs and why. Raises ValueError where a version requested by name is not
    available.
    """
    device, operators = _indexed(device), all_operators() if operators is None else list(operators)
    compile_side_by_side(operators, device)
    return {operator.name: operator.choice(device) for operator in operators}


def running(device: torch.device | str, others: Iterable[Versions] = ()) -> dict[str, tuple[str, ...]]:
    """Check all operators, and `others`, and return by name the versions that run, best first; and, where such a
    version uses them, the library of the HIP kernels, the shipped objects of Triton kernels and the release of Triton,
    which compiles calls that no object fits.

    A compiled version behind another one is not compiled: `warm_up` and the first call that needs it do that.
    """
    device = _indexed(device)
    operators = [*all_operators(), *others]
    compile_side_by_side(operators, device)
    chosen = {operator.name: operator.running(device) for operator in operators}
    used = {version for versions in chosen.values() for version in versions}
    if "hip" in used and (loaded := identity(device)):
        chosen[LIBRARY] = (loaded,)
    if "triton" in used and (objects := objects_identity(device)):
        chosen[OBJECTS] = (objects,)
    if not used.isdisjoint(("triton", "compiled")):
        chosen[TRITON] = (_triton_release(),)
    return chosen


def _triton_release() -> str:
    """Return Triton's release, or that it cannot be imported: operators that run from shipped objects do not need it."""
    try:
        return importlib.import_module("triton").__version__
    except Exception:  # absent, or an error of its own at import
        return "cannot be imported"


def report(device: torch.device | str, check: bool = True, others: Iterable[Versions] = ()) -> list[str]:
    """Return lines that say which version of each operator, and of `others`, runs on `device` and why; `check` and
    errors as in `Versions.choice`.
    """
    device, operators = _indexed(device), [*others, *all_operators()]
    if check:
        compile_side_by_side(operators, device)
    return table({operator.name: operator.choice(device, check) for operator in operators})


def table(choices: dict[str, str]) -> list[str]:
    """Format `choices`: one line per folder whose operators agree, or one line if all operators agree."""
    folders: dict[str, dict[str, str]] = {}
    for name, choice in choices.items():
        folder = OPERATORS[name].folder if name in OPERATORS else name
        folders.setdefault(folder, {})[f"{folder}.{name}"] = choice
    rows = {}
    for folder, mine in folders.items():
        rows |= {folder: next(iter(mine.values()))} if len({*mine.values()}) == 1 else mine
    if len({*rows.values()}) == 1:
        rows = {"all operators": next(iter(rows.values()))}
    return [f"{name:{max(map(len, rows))}}  {choice}" for name, choice in rows.items()]


def _indexed(device: torch.device | str) -> torch.device:
    """Return `device` with its index, as the devices of tensors have it."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device

# SPDX-License-Identifier: Apache-2.0
"""Declares the tensors that an operator takes, as text, by which its arguments are checked.

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
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hip_ops.errors import mistake

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
_INTS = (int, torch.SymInt)
Rule = Callable[[dict], "tuple[str, str] | None"]
_LINE = re.compile(r"(\w+)(\?)?\s+\[(.*?)\]\s+(\S+)$")


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 and fp32 for every other dtype."""
    return torch.promote_types(dtype, torch.float32)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`, without its microseconds on the host where there is nothing to convert."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


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
    """Checks an operator's arguments; the syntax is in the module's docstring.

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
            self.fail(line.name, f"has shape {shape}", self._wanted(line, sizes))

    @staticmethod
    def _wanted(line: Line, sizes: Mapping[str, Any]) -> str:
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

# SPDX-License-Identifier: Apache-2.0
"""v_cmp and v_cmpx: a lane mask in VCC, an SGPR pair or EXEC."""

import numpy as np

from tests.gfx942.emulator.decode import Instruction
from tests.gfx942.emulator.operands import double_reader, float_reader, integer_reader, wide_reader
from tests.gfx942.emulator.registry import opcode_pattern

_ORDERED = {
    "lt": np.less,
    "eq": np.equal,
    "le": np.less_equal,
    "gt": np.greater,
    "lg": lambda a, b: (a < b) | (a > b),
    "ne": np.not_equal,
    "ge": np.greater_equal,
}
_NEGATED = {"nge": "ge", "nlg": "lg", "ngt": "gt", "nle": "le", "nlt": "lt"}


def comparison(name: str):
    """(a, b) -> bool array; float conditions with a leading n are true for NaN."""
    if name in _ORDERED:
        return _ORDERED[name]
    if name == "neq":
        return np.not_equal
    if name in _NEGATED:
        inner = _ORDERED[_NEGATED[name]]
        return lambda a, b: ~inner(a, b)
    return {
        "o": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
        "u": lambda a, b: np.isnan(a) | np.isnan(b),
        "f": lambda a, b: np.zeros(np.broadcast_shapes(a.shape, b.shape), bool),
        "t": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
        "tru": lambda a, b: np.ones(np.broadcast_shapes(a.shape, b.shape), bool),
    }[name]


def classify(value: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """v_cmp_class: bit 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, 7 +denormal, 8
    +normal, 9 +inf.
    """
    bits, negative = value.view(np.uint32), np.signbit(value)
    quiet = (bits & np.uint32(0x400000)) != 0
    zero, denormal = value == 0, (np.abs(value) < np.float32(2.0**-126)) & (value != 0)
    normal = np.isfinite(value) & ~zero & ~denormal
    classes = [
        np.isnan(value) & ~quiet,
        np.isnan(value) & quiet,
        np.isneginf(value),
        normal & negative,
        denormal & negative,
        zero & negative,
        zero & ~negative,
        denormal & ~negative,
        normal & ~negative,
        np.isposinf(value),
    ]
    result = np.zeros(np.broadcast_shapes(value.shape, mask.shape), bool)
    for bit, member in enumerate(classes):
        result |= member & ((mask >> np.uint32(bit)) & np.uint32(1)).astype(bool)
    return result


@opcode_pattern(r"v_cmp(x?)_(\w+?)_([iuf])(16|32|64)")
def _compare(instruction: Instruction, match):
    to_exec, name, kind, width = bool(match[1]), match[2], match[3], int(match[4])
    first = len(instruction.operands) - 2
    target = instruction.operands[0].index if first > 0 else 126
    if name == "class":
        read, mask = float_reader(instruction, first), integer_reader(instruction, first + 1)

        def lanes(m):
            return classify(read(m), mask(m))
    else:
        compare = comparison(name)
        if kind == "f" and width != 16:
            reader = float_reader if width == 32 else double_reader
        else:
            reader = wide_reader if width == 64 else integer_reader
        a_of, b_of = reader(instruction, first), reader(instruction, first + 1)
        convert = _conversion(kind, width)

        def lanes(m):
            return compare(convert(a_of(m)), convert(b_of(m)))

    def run(m):
        result = m.spread(lanes(m))
        m.write_mask(target, result)
        if to_exec and target != 126:
            m.write_mask(126, result)

    return run


def _conversion(kind: str, width: int):
    if kind == "f":
        return (lambda a: np.ascontiguousarray(a.astype(np.uint16)).view(np.float16)) if width == 16 else (lambda a: a)
    if width == 16:
        return lambda a: np.ascontiguousarray(a.astype(np.uint16)).view(np.int16 if kind == "i" else np.uint16)
    return (lambda a: a.view({32: np.int32, 64: np.int64}[width])) if kind == "i" else (lambda a: a)

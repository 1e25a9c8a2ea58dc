# SPDX-License-Identifier: Apache-2.0
"""Test the arguments that a declaration accepts, and its messages about others."""

import re

import pytest
import torch
from torch import Tensor

from hip_ops.runtime import operator
from hip_ops.runtime.operator import Declaration, Line

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TAKES = """
    x         [..., n>0]     bf16|fp32
    weight    [n, (n+g)*2]   =x
    offsets?  [experts]      int32
    scale?    [1]            wide(x)
"""
PARAMETERS = ("x", "weight", "offsets", "scale", "g", "experts", "flag")


def arguments(**changes):
    """Return valid arguments for n = 3, g = 2 and 4 experts, with the changes."""
    right = dict(x=torch.ones(5, 3), weight=torch.ones(3, 10), offsets=None, scale=None, g=2, experts=4, flag=True)
    assert changes.keys() <= right.keys()
    return tuple((right | changes).values())


@pytest.fixture
def declared():
    return Declaration("product", PARAMETERS, TAKES)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"x": torch.ones(3)},
        {"x": torch.ones(2, 0, 3)},
        {"x": torch.ones(5, 3, dtype=BF16), "weight": torch.ones(3, 10, dtype=BF16), "scale": torch.ones(1)},
        {"offsets": torch.ones(4, dtype=torch.int32), "scale": torch.ones(1)},
        {"x": torch.ones(3, dtype=FP64), "weight": torch.ones(3, 10, dtype=FP64), "scale": torch.ones(1, dtype=FP64)},
        {"weight": torch.ones(10, 3).t()},
        {"g": 0, "weight": torch.ones(3, 6)},
    ],
    ids=str,
)
def test_right_arguments(declared, changes):
    for _ in range(2):
        declared.check(arguments(**changes))


ERRORS = [
    ({"x": torch.ones(5, 0)}, "x has shape (5, 0). Allowed: [..., n>0]"),
    ({"x": torch.tensor(1.0)}, "x has shape (). Allowed: [..., n>0]"),
    ({"weight": torch.ones(3, 9)}, "weight has shape (3, 9). Allowed: (3, 10), [n, (n+g)*2]"),
    ({"weight": torch.ones(1, 3, 10)}, "weight has shape (1, 3, 10). Allowed: (3, 10), [n, (n+g)*2]"),
    ({"g": 3}, "weight has shape (3, 10). Allowed: (3, 12), [n, (n+g)*2]"),
    ({"offsets": torch.ones(5, dtype=torch.int32)}, "offsets has shape (5,). Allowed: (4,), [experts]"),
    ({"scale": torch.ones(2)}, "scale has shape (2,). Allowed: (1,), [1]"),
    ({"weight": None}, "weight is None. Allowed: a tensor"),
    (
        {"x": torch.ones(5, 3).half()},
        "x is torch.float16. Allowed: torch.bfloat16 or torch.float32 (or all tensors torch.float64)",
    ),
    ({"weight": torch.ones(3, 10).bfloat16()}, "weight is torch.bfloat16. Allowed: torch.float32 like x"),
    ({"weight": torch.ones(3, 10).double()}, "weight is torch.float64. Allowed: torch.float32 like x"),
    ({"offsets": torch.ones(4)}, "offsets is torch.float32. Allowed: torch.int32"),
    (
        {"scale": torch.ones(1).double()},
        "scale is torch.float64. Allowed: torch.float32 (or all tensors torch.float64)",
    ),
    ({"weight": torch.ones(3, 10, device="meta")}, "weight is on meta. Allowed: on cpu like x"),
]


@pytest.mark.parametrize("changes, message", ERRORS, ids=[message for _, message in ERRORS])
def test_wrong_arguments_are_named(declared, changes, message):
    declared.check(arguments())
    with pytest.raises(ValueError, match="^" + re.escape(f"hip_ops.product: {message}.") + "$"):
        declared.check(arguments(**changes))


def test_leading_sizes_are_shared():
    declared = Declaration("add", ("a", "b"), "a [..., h] fp32\n b [..., h] fp32")
    declared.check((torch.ones(2, 5, 3), torch.ones(2, 5, 3)))
    for other in ((5, 3), (3,), (2, 5, 4), ()):
        with pytest.raises(ValueError, match=re.escape(f"add: b has shape {other}. Allowed: (2, 5, 3), [..., h]")):
            declared.check((torch.ones(2, 5, 3), torch.ones(other)))


def test_equal_sizes_and_sizes_that_are_not_empty():
    declared = Declaration("square", ("a",), "a [n>0, n, 2*n>0] fp32")
    declared.check((torch.ones(2, 2, 4),))
    for shape in ((2, 3, 4), (2, 2, 5), (0, 0, 0)):
        with pytest.raises(ValueError, match=re.escape(f"square: a has shape {shape}. Allowed: [n>0, n, 2*n>0]")):
            declared.check((torch.ones(shape),))


def test_fp64_is_for_all_floats_or_none():
    declared = Declaration("add", ("a", "b"), "a [n] bf16|fp32\n b [n] fp32")
    double, single = torch.ones(2, dtype=FP64), torch.ones(2)
    declared.check((double, double))
    declared.check((single, single))
    with pytest.raises(ValueError, match="b is torch.float32. Allowed: torch.float64.$"):
        declared.check((double, single))
    with pytest.raises(ValueError, match=re.escape("b is torch.float64. Allowed: torch.float32 (or all tensors ")):
        declared.check((single, double))


def test_a_rule_gets_sizes_and_arguments_and_is_remembered():
    seen = []

    def rule(given):
        seen.append(given)
        return ("n is 2", "3") if given["n"] == 2 else None

    declared = Declaration("halve", ("x", "mode"), "x [..., n] fp32", rule)
    for _ in range(3):
        declared.check((torch.ones(4, 3), "fast"))
    assert len(seen) == 1 and seen[0]["n"] == 3 and seen[0]["mode"] == "fast" and seen[0]["x"].shape == (4, 3)
    declared.check((torch.ones(4, 3), "slow"))
    assert len(seen) == 2, "numbers and texts count, too"
    for _ in range(2):
        with pytest.raises(ValueError, match="^hip_ops.halve: n is 2. Allowed: 3.$"):
            declared.check((torch.ones(2), "fast"))
    only_a_rule = Declaration(
        "join", ("tensors",), "", lambda given: None if given["tensors"] else ("no tensors", "one")
    )
    only_a_rule.check(([torch.ones(1)],))
    with pytest.raises(ValueError, match="^hip_ops.join: no tensors. Allowed: one.$"):
        only_a_rule.check(([],))


def test_what_is_known_is_bounded(declared, monkeypatch):
    monkeypatch.setattr(operator, "MAX_CHECKED_CALLS", 3)
    for rows in range(10):
        declared.check(arguments(x=torch.ones(rows, 3)))
        assert len(declared._known) <= 3


def test_symbolic_sizes(make_operator):
    """In a graph with dynamic shapes all sizes are symbols, including those of integer arguments."""

    def repeat(x: Tensor, times: int) -> Tensor:
        return x.expand(times, *x.shape).contiguous()

    takes, example = "x [n, h] fp32", lambda device: (torch.ones(2, 3, device=device), 4)
    made = make_operator(repeat, takes=takes, example=example)
    shapes = []

    def keep(module, inputs):
        shapes.extend(node.meta["example_value"].shape for node in module.graph.nodes if made.name in str(node.target))
        return module

    compiled = torch.compile(lambda x, times: made(x, times + 1) * 2, fullgraph=True, dynamic=True, backend=keep)
    for rows, times in ((5, 6), (7, 8), (9, 10)):
        assert torch.equal(compiled(torch.ones(rows, 3), times), torch.full((times + 1, rows, 3), 2.0))
    assert len(shapes) == 1 and all(isinstance(size, torch.SymInt) for size in shapes[0][:2])


def test_mistakes_in_a_declaration():
    with pytest.raises(AssertionError, match=re.escape("not a declaration of a tensor: 'x [n]'")):
        Line.parse("x [n]")
    with pytest.raises(AssertionError, match="product has no arguments {'z'}"):
        Declaration("product", ("x",), "z [n] fp32")

# SPDX-License-Identifier: Apache-2.0
"""Parts added up in the order of ranks, on the CPU: the torch reference, Triton's version in its interpreter, and what the compiler makes of it for Hopper."""

import re
from types import SimpleNamespace

import pytest
import torch

import hip_ops
from hip_ops import backend, parts_sum
from hip_ops.operator import OPERATORS
from hip_ops.reference import parts_sum as reference
from hip_ops.self_check import difference
from tests.hip_ops.compiled_for_hopper import compiled_for_hopper
from tests.hip_ops.cpu_kernels import run_python
from tests.hip_ops.parts_sum_cases import BF16, CASES, FP16, Parts, check

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reference(case):
    check(reference, case)


@pytest.mark.parametrize(
    "case", [Parts(100, 3, 1), Parts(100, 3, 0, BF16, pad=4), Parts(100, 5, 4, torch.float64)], ids=str
)
def test_the_operator(case):
    check(hip_ops, case)


def test_the_operator_is_torchs():
    parts = torch.full((3, 8), torch.nan)[:, :5]
    parts[0], parts[2] = 1.0, 10.0
    out = torch.empty(5)
    assert hip_ops.add_up_parts_(out, torch.full((5,), 4.0), parts, 1) is None
    assert out.tolist() == [15.0] * 5
    torch.library.opcheck(torch.ops.hip_ops.add_up_parts.default, (out, torch.ones(5), torch.ones(3, 5), 2))


def test_the_order_of_ranks_is_that_of_the_sum():
    """2^24 + 1 is 2^24 in fp32."""
    values = {0: 2.0**24, 1: 1.0, 2: -(2.0**24), 3: 1.0}

    def sum_of(*order):
        found = set()
        for rank in range(4):
            rows = torch.tensor([[values[each]] for each in order])
            own = rows[rank].clone()
            rows[rank] = torch.nan
            hip_ops.add_up_parts_(own, own, rows, rank)
            found.add(own.item())
        (value,) = found
        return value

    assert (sum_of(0, 1, 2, 3), sum_of(0, 2, 1, 3), sum_of(1, 0, 3, 2), sum_of(1, 3, 0, 2)) == (1.0, 2.0, 0.0, 2.0)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_rounds_once(dtype):
    """Three quarters of an ULP in three steps: each alone would be rounded away."""
    eps = torch.finfo(dtype).eps
    parts = torch.tensor([[1.0], [eps / 4], [eps / 4], [eps / 4]], dtype=dtype)
    out = torch.empty(1, dtype=dtype)
    hip_ops.add_up_parts_(out, parts[0].clone(), parts, 0)
    assert out.item() == 1 + eps and (parts[0] + parts[1]).item() == 1.0


@pytest.mark.parametrize(
    "out, own, parts, rank",
    [
        (torch.ones(4), torch.ones(4), torch.ones(2, 4), 2),
        (torch.ones(4), torch.ones(4), torch.ones(2, 4), -1),
        (torch.ones(3), torch.ones(4), torch.ones(2, 4), 0),
        (torch.ones(4), torch.ones(4), torch.ones(2, 5), 0),
        (torch.ones(4), torch.ones(4), torch.ones(2, 4).bfloat16(), 0),
        (torch.ones(4).int(), torch.ones(4).int(), torch.ones(2, 4).int(), 0),
        (torch.ones(4), torch.ones(4), torch.ones(4, 2).mT, 0),
        (torch.ones(4), torch.ones(8)[::2], torch.ones(2, 4), 0),
    ],
)
def test_wrong_arguments(out, own, parts, rank):
    with pytest.raises(AssertionError):
        hip_ops.add_up_parts_(out, own, parts, rank)


def from_the_last(out, own, parts, rank):
    reference.add_up_parts_(out, own, parts.flip(0), len(parts) - 1 - rank)


def own_first(out, own, parts, rank):
    others = torch.cat((own[None], parts[:rank], parts[rank + 1 :]))
    reference.add_up_parts_(out, own, others, 0)


def own_from_the_window(out, own, parts, rank):
    reference.add_up_parts_(out, parts[rank], parts, rank)


def last_tile_left_out(out, own, parts, rank):
    end = out.numel() // 2048 * 2048
    reference.add_up_parts_(out[:end], own[:end], parts[:, :end], rank)


def from_zero(out, own, parts, rank):
    reference.add_up_parts_(out, own, torch.cat((torch.zeros_like(parts[:1]), parts)), rank + 1)


def rounding_each(out, own, parts, rank):
    total = own if rank == 0 else parts[0]
    for row in range(1, len(parts)):
        total = total + (own if row == rank else parts[row])
    out.copy_(total)


@pytest.mark.parametrize("wrong", [from_the_last, own_first, own_from_the_window, last_tile_left_out])
def test_the_self_check_would_not_pass(wrong):
    operator = OPERATORS["add_up_parts"]
    assert "argument[0]" in difference(wrong, operator.reference, operator.example, CPU, tolerance=operator.tolerance)
    assert difference(rounding_each, operator.reference, operator.example, CPU, tolerance=operator.tolerance) is None, (
        "no rounding in fp32"
    )


@pytest.mark.parametrize(
    "wrong, case",
    [
        (from_the_last, Parts(1000, 3, 1)),
        (own_first, Parts(1000, 8, 4)),
        (from_zero, Parts(4000, 2, 0, special=True)),
        (rounding_each, Parts(1000, 8, 4, BF16)),
        (last_tile_left_out, Parts(2049, 3, 1)),
    ],
)
def test_the_check_sees(wrong, case):
    with pytest.raises(AssertionError, match="other bits"):
        check(SimpleNamespace(add_up_parts_=wrong), case)


def test_a_backend_by_name_that_has_no_version(monkeypatch, caplog, fresh_backend):
    assert parts_sum.adder_on(CPU) is hip_ops.add_up_parts_ and not caplog.records
    monkeypatch.setitem(backend._choices, ("cpu", "hip"), backend.Choice(("hip",), "", explicit=True))
    with backend.use_backend("hip"):
        check(SimpleNamespace(add_up_parts_=parts_sum.adder_on(CPU)), Parts(100, 3, 1))
    assert "add_up_parts has no hip version; torch runs instead" in caplog.text


PROGRAM = """
from hip_ops.triton_kernels import parts_sum
from tests.hip_ops.parts_sum_cases import BF16, CASES, check

cases = [case for case in CASES if case.dtype != BF16]  # whose rounding is the interpreter's own
assert len(cases) > 20
for case in cases:
    check(parts_sum, case)
print("right")
"""


def test_triton_in_the_interpreter():
    pytest.importorskip("triton")
    done = run_python(PROGRAM, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stdout[-4000:]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size, rank", [(2, 1), (8, 3)])
def test_reads_and_writes_16_bytes_at_a_time_on_hopper(dtype, size, rank):
    """Of all rows but one from the window, and of its own; additions in fp32 that keep what is too small to be normal, before one rounding."""
    pytest.importorskip("triton")
    from hip_ops.triton_kernels import parts_sum as kernels

    signature = {"out": f"*{dtype}", "own": f"*{dtype}", "parts": f"*{dtype}", "count": "i32", "row_stride": "i32"}
    block = kernels.ROW_BYTES // (4 if dtype == "fp32" else 2)
    constexprs = {"SIZE": size, "RANK": rank, "BLOCK": block}
    compiled = compiled_for_hopper(
        kernels.add_up_parts_kernel, signature, constexprs, divisible_by_16=list(signature), num_warps=8
    )
    ptx = compiled.asm["ptx"]
    assert re.findall(r"\bld\.global\S*", ptx) == ["ld.global.v4.b32"] * (2 * size)
    assert re.findall(r"\bst\.global\S*", ptx) == ["st.global.v4.b32"] * 2
    arithmetic = re.findall(r"\b(?:add|fma|mul)\S*f(?:32|16)\S*", ptx)
    if (
        size == 2 and dtype != "fp32"
    ):  # the compiler adds two of them as they are: rounded once, the same bits, for fp32 has more than twice their digits
        assert len(arithmetic) == block // 256 // 2 and all("add." in each and "16x2" in each for each in arithmetic)
    else:
        assert set(arithmetic) == {"add.f32"} and len(arithmetic) == (size - 1) * block // 256
    assert "ftz" not in ptx and compiled.metadata.shared == 0 and "ld.local" not in ptx

# SPDX-License-Identifier: Apache-2.0
"""Inputs for the expert path, what is exactly right for them, and the comparisons that every version must pass.

A version is any object with the functions of hip_ops.ops.expert_permutation.reference and hip_ops.ops.weighted_swiglu.reference
that a check calls. The order of tokens is determined token by token; sums and activations are checked against fp64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.hip_ops.rms_norm_cases import BF16, FP32, FP64, Exact, compare

NAMES = {BF16: "bf16", FP32: "fp32", FP64: "fp64"}
MIXES = ("even", "skewed", "one", "no_expert", "empty_experts", "strange")


def expert_ids(mix: str, tokens: int, num_experts: int, dtype: torch.dtype = torch.int64, seed: int = 0) -> Tensor:
    """even: all classes with the skip class; one: all to the last expert; strange: ids far outside, negative ones
    too.
    """
    generator = torch.Generator().manual_seed(seed + tokens + 1000 * num_experts)
    ids = torch.randint(0, num_experts + 1, (tokens,), generator=generator)
    if mix == "skewed":
        ids = torch.where(torch.rand(tokens, generator=generator) < 0.8, num_experts // 2, ids)
    elif mix == "one":
        ids.fill_(num_experts - 1)
    elif mix == "no_expert":
        ids.fill_(num_experts)
    elif mix == "empty_experts":
        ids = ids // 2 * 2
    elif mix == "strange":
        ids = torch.tensor([-1, 0, num_experts - 1, num_experts, 2**31 - 1, -(2**31)])[
            torch.randint(0, 6, (tokens,), generator=generator)
        ]
    return ids.to(dtype)


def exact_order(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four results of sort_by_expert, token by token."""
    of_expert: list[list[int]] = [[] for _ in range(num_experts + 1)]
    for token, expert in enumerate(ids.tolist()):
        of_expert[expert if 0 <= expert < num_experts else num_experts].append(token)
    token_of_row, row_of_token, offsets = [], [0] * len(ids), []
    for expert, tokens in enumerate(of_expert):
        for token in tokens:
            row = len(token_of_row)
            row_of_token[token] = row if expert < num_experts else ~row
            token_of_row.append(token if expert < num_experts else ~token)
        offsets.append(len(token_of_row))
    counts = [len(tokens) for tokens in of_expert[:-1]]
    return tuple(torch.tensor(t, dtype=torch.int32) for t in (token_of_row, row_of_token, counts, offsets[:-1]))


def check_sort(module, ids: Tensor, num_experts: int) -> None:
    found = module.sort_by_expert(ids, num_experts)
    for name, got, want in zip(
        ("token_of_row", "row_of_token", "counts", "offsets"), found, exact_order(ids.cpu(), num_experts), strict=True
    ):
        assert got.dtype == torch.int32 and got.shape == want.shape, (
            f"{name}: {got.dtype} {tuple(got.shape)}, want {tuple(want.shape)}"
        )
        wrong = (got.cpu() != want).nonzero().flatten()
        assert not len(wrong), (
            f"{name}: {len(wrong)} of {len(want)} entries are wrong, the first at {wrong[0]}: {got[wrong[0]]}, want "
            f"{want[wrong[0]]}"
        )


@dataclass(frozen=True)
class Rows:
    """`pad`: elements that a row has beyond its end (strided rows); a pad that is no multiple of 16 bytes makes rows
    unaligned.
    """

    tokens: int
    hidden: int
    dtype: torch.dtype = BF16
    prob_dtype: torch.dtype = FP32
    mix: str = "even"
    num_experts: int = 4
    pad: int = 0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}-{NAMES[self.dtype]}-{NAMES[self.prob_dtype]}-{self.mix}" + (
            f"-pad{self.pad}" if self.pad else ""
        )


def numbers(
    shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, pad: int = 0, scale: float = 1.0
) -> Tensor:
    whole = (
        torch.randn((*shape[:-1], shape[-1] + pad), generator=generator, dtype=FP64 if dtype == FP64 else FP32) * scale
    )
    return whole.to(dtype)[..., : shape[-1]]


def same_bits(name: str, got: Tensor, want: Tensor) -> None:
    assert (got.shape, got.dtype) == (want.shape, want.dtype), (
        f"{name}: {got.dtype} {tuple(got.shape)}, want {want.dtype} {tuple(want.shape)}"
    )
    wrong = (got.cpu() != want.cpu()).nonzero()
    assert not len(wrong), (
        f"{name}: {len(wrong)} of {want.numel()} elements are wrong, the first at {wrong[0].tolist()}"
    )


def poisoned(rows: Tensor, no_expert: Tensor) -> Tensor:
    """Fill padding rows with NaN: a kernel that reads one has NaN in its results."""
    rows[no_expert] = float("nan")
    return rows


def check_rows(module, case: Rows, device: str = "cpu") -> None:
    """Gathers rows both ways, with and without probs."""
    generator = torch.Generator().manual_seed(case.seed + case.tokens + 17 * case.hidden)
    shape = (case.tokens, case.hidden)
    token_of_row, row_of_token, _, _ = exact_order(
        expert_ids(case.mix, case.tokens, case.num_experts, seed=case.seed), case.num_experts
    )
    probs = (torch.rand(case.tokens, generator=generator) + 0.1).to(case.prob_dtype)
    tokens = poisoned(numbers(shape, case.dtype, generator, case.pad), row_of_token < 0)
    rows = poisoned(numbers(shape, case.dtype, generator, case.pad), token_of_row < 0)
    maps = token_of_row.to(device), row_of_token.to(device)
    for name, source, index, places in (
        ("to experts", tokens, token_of_row, maps),
        ("to tokens", rows, row_of_token, maps[::-1]),
    ):
        live = index >= 0
        want, want_probs = torch.zeros(shape, dtype=case.dtype), torch.zeros_like(probs)
        want[live], want_probs[live] = source[index[live].long()], probs[index[live].long()]
        for given in (probs, None):
            got, got_probs = module.gather_rows(source.to(device), *places, None if given is None else given.to(device))
            same_bits(f"gather_rows {name}", got, want)
            same_bits(f"gather_rows {name}, probs", got_probs, got_probs[:0] if given is None else want_probs)


@dataclass(frozen=True)
class Swiglu:
    """offsets: "none", "all" where every row has an expert, "some" where the last rows have none, "no_expert"."""

    rows: int
    width: int
    dtype: torch.dtype = BF16
    prob_dtype: torch.dtype = FP32
    offsets: str = "some"
    pad: int = 0
    scale: float = 2.0
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}-{NAMES[self.dtype]}-{NAMES[self.prob_dtype]}-{self.offsets}" + (
            f"-pad{self.pad}" if self.pad else ""
        )

    @property
    def live(self) -> int:
        return {"some": self.rows - max(1, self.rows // 3), "no_expert": 0}.get(self.offsets, self.rows)


@dataclass
class SwigluInputs:
    """Padding rows hold NaN everywhere."""

    grad: Tensor
    gate_up: Tensor
    probs: Tensor
    offsets: Tensor | None


def swiglu_inputs(case: Swiglu) -> SwigluInputs:
    generator = torch.Generator().manual_seed(case.seed + case.rows + 31 * case.width)
    no_expert = torch.arange(case.rows) >= case.live
    gate_up = poisoned(numbers((case.rows, 2 * case.width), case.dtype, generator, case.pad, case.scale), no_expert)
    grad = poisoned(numbers((case.rows, case.width), case.dtype, generator, case.pad), no_expert)
    probs = poisoned((torch.rand(case.rows, generator=generator) + 0.1).to(case.prob_dtype), no_expert)
    # An expert without rows in the middle, and one at the end.
    offsets = (
        None if case.offsets == "none" else torch.tensor([case.live // 2] * 2 + [case.live] * 2, dtype=torch.int32)
    )
    return SwigluInputs(grad, gate_up, probs, offsets)


def exact_swiglu(i: SwigluInputs, live: int) -> dict[str, Exact]:
    """By autograd in fp64. An error of the exponential's argument is relative to it: so terms grow with |gate|."""
    gate_up, probs = i.gate_up[:live].double().requires_grad_(), i.probs[:live].double().requires_grad_()
    gate, up = gate_up.chunk(2, dim=-1)
    product = gate * torch.sigmoid(gate) * up
    output = product * probs[:, None]
    grad = i.grad[:live].double()
    d_gate_up, d_probs = torch.autograd.grad(output, (gate_up, probs), grad)
    with torch.no_grad():
        grow, sigmoid = 1.0 + gate.abs(), torch.sigmoid(gate)
        weighted = (grad * probs[:, None]).abs() * grow
        d_gate = weighted * up.abs() * (sigmoid + gate.abs() * sigmoid * (1.0 - sigmoid))
        terms = {
            "output": output.abs() * grow,
            "d_gate_up": torch.cat((d_gate, weighted * (gate * sigmoid).abs()), -1),
            "d_probs": ((grad * product).abs() * grow).sum(-1),
        }
    values = {"output": output.detach(), "d_gate_up": d_gate_up, "d_probs": d_probs}
    dead = len(i.probs) - live

    def with_zeros(t: Tensor) -> Tensor:
        return torch.cat((t, t.new_zeros(dead, *t.shape[1:])))

    return {name: Exact(with_zeros(values[name]), with_zeros(terms[name])) for name in values}


def check_swiglu(module, case: Swiglu, device: str = "cpu") -> None:
    inputs = swiglu_inputs(case)
    want = exact_swiglu(inputs, case.live)
    gate_up, probs = inputs.gate_up.to(device), inputs.probs.to(device)
    offsets = None if inputs.offsets is None else inputs.offsets.to(device)
    output = module.weighted_swiglu(gate_up, probs, offsets)
    assert output.dtype == case.dtype
    compare("output", output.cpu(), want["output"])
    for with_output in (True, False):
        d_gate_up, d_probs, again = module.weighted_swiglu_backward(
            inputs.grad.to(device), gate_up, probs, offsets, with_output
        )
        assert (d_gate_up.dtype, d_probs.dtype, again.dtype) == (case.dtype, case.prob_dtype, case.dtype)
        compare("d_gate_up", d_gate_up.cpu(), want["d_gate_up"])
        compare("d_probs", d_probs.cpu(), want["d_probs"])
        if with_output:
            compare("output again", again.cpu(), want["output"])
        else:
            assert again.numel() == 0

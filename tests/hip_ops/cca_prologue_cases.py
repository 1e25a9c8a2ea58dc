# SPDX-License-Identifier: Apache-2.0
"""Inputs for the CCA prologue, what is right for them in fp64, and the comparison that every version must pass.

What is right is computed document by document with torch's convolutions and autograd, as transformers writes it, and
knows nothing of tiles, reach or merged taps. A version is a module with the two functions of
hip_ops.ops.cca_prologue.reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
RESULTS = ("query", "key", "value", "inverse_norm")
GRADIENTS = (
    "projected",
    "depthwise_weight",
    "depthwise_bias",
    "grouped_weight",
    "grouped_bias",
    "temperature",
    "halo",
    "value_halo",
)


@dataclass(frozen=True)
class Case:
    """rows of a chunk, micro batch, query heads and groups, chunks; pad: columns of other things behind each row of
    projected.

    document: mean length of documents; 0: none are packed. at: rows of every sequence at which a document starts
    besides. rope_batch: the angles differ between the sequences of the batch. zero: the first key has temperature 0.
    """

    rows: int
    batch: int = 1
    heads: int = 2
    groups: int = 1
    d: int = 128
    chunks: int = 1
    halo: bool = False
    document: int = 0
    at: tuple[int, ...] = ()
    rotary: int = 64
    rope_batch: bool = False
    delayed: int | None = None
    pad: int = 0
    zero: bool = False
    dtype: torch.dtype = BF16
    seed: int = 0

    def __str__(self) -> str:
        names = {BF16: "bf16", FP32: "fp32", FP64: "fp64"}
        options = [f"{self.chunks}x{self.rows}x{self.batch}", f"{self.heads}q{self.groups}k{self.d}", names[self.dtype]]
        options += (
            ["halo"] * self.halo
            + [f"documents{self.document}"] * bool(self.document)
            + [f"start{'_'.join(map(str, self.at))}"] * bool(self.at)
        )
        options += (
            [f"r{self.rotary}"] * (self.rotary != 64)
            + ["angles"] * self.rope_batch
            + [f"w{self.delayed}"] * (self.delayed is not None)
        )
        return "-".join(options + [f"pad{self.pad}"] * bool(self.pad) + ["zero"] * self.zero)

    @property
    def channels(self) -> int:
        return (self.heads + self.groups) * self.d

    @property
    def late(self) -> int:
        return self.groups * self.d // 2 if self.delayed is None else self.delayed


@dataclass
class Inputs:
    """tensors: the ten of hip_ops.cca_prologue in order, None where a case has none; upstream: gradients of query, key,
    value.
    """

    case: Case
    tensors: dict[str, Tensor | None]
    upstream: tuple[Tensor, Tensor, Tensor]

    @property
    def arguments(self) -> tuple:
        return *self.tensors.values(), self.case.groups, self.case.late


def make(case: Case, device: str = "cpu") -> Inputs:
    generator = torch.Generator().manual_seed(case.seed + 31 * case.rows + 1009 * case.d)
    compute = torch.promote_types(case.dtype, FP32)
    d, n, g, k, c, b = case.d, case.heads, case.groups, case.chunks, case.rows, case.batch

    def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = case.dtype) -> Tensor:
        return (torch.randn(shape, generator=generator, dtype=FP64) * scale).to(dtype).to(device)

    whole = random(k * c, b, case.channels + g * d + case.pad)
    tensors: dict[str, Tensor | None] = {
        "projected": whole[..., : case.channels + g * d],
        "depthwise_weight": random(case.channels, 1, 2),
        "depthwise_bias": random(case.channels, scale=0.4),
        "grouped_weight": random(case.channels, d, 2, scale=(2 * d) ** -0.5),
        "grouped_bias": random(case.channels, scale=0.4),
        "temperature": (random(g, scale=0.3) + 1.2).to(case.dtype),
    }
    if case.zero:
        tensors["temperature"][0] = 0.0
    angles = random(k * c, b if case.rope_batch else 1, case.rotary // 2, scale=3.0, dtype=FP64)
    tensors["rope"] = torch.cat((angles.cos(), angles.sin()), dim=-1).to(compute) if case.rotary else None
    tensors["halo"] = random(k, 2, b, case.channels) if case.halo else None
    tensors["value_halo"] = random(k, b, case.late) if case.halo else None
    starts = None
    if case.document or case.at:
        starts = torch.rand(k, c + 1, b, generator=generator) < (1.0 / case.document if case.document else 0.0)
        for row in case.at:
            starts[:, row + 1] = True
        starts = starts.to(device)
    tensors["starts"] = starts
    upstream = (random(k * c, b, n, d), random(k * c, b, g, d), random(k * c, b, g, d))
    return Inputs(case, tensors, upstream)


def _segments(starts: Tensor) -> list[tuple[int, int, bool]]:
    """(first row, end, whether a document starts there) of one sequence; starts bool [rows + 1]."""
    rows = len(starts) - 1
    edges = [0, *(t for t in range(1, rows) if starts[t + 1]), rows]
    return [(a, z, bool(starts[a + 1])) for a, z in zip(edges, edges[1:], strict=False)]


def _prologue(i: Inputs, t: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    case = i.case
    d, n, g, k, c, b = case.d, case.heads, case.groups, case.chunks, case.rows, case.batch
    z, current, late = t["projected"].split((case.channels, g * d - case.late, case.late), dim=-1)
    starts = torch.zeros(k, c + 1, b, dtype=torch.bool) if t["starts"] is None else t["starts"].cpu()
    y, values = torch.empty_like(z), torch.empty_like(t["projected"][..., : g * d])
    for chunk, entry in ((chunk, entry) for chunk in range(k) for entry in range(b)):
        rows = slice(chunk * c, (chunk + 1) * c)
        of_z, of_late = z[rows, entry], late[rows, entry]
        for first, end, fresh in _segments(starts[chunk, :, entry]):
            before, lag = of_z.new_zeros(2, case.channels), of_late.new_zeros(1, case.late)
            if not fresh and first == 0 and t["halo"] is not None:
                before, lag = t["halo"][chunk, :, entry], t["value_halo"][chunk, entry].unsqueeze(0)
                if starts[chunk, 0, entry]:
                    before = torch.cat((torch.zeros_like(before[:1]), before[1:]))
            u = F.conv1d(
                torch.cat((before, of_z[first:end])).t().unsqueeze(0),
                t["depthwise_weight"],
                t["depthwise_bias"],
                groups=case.channels,
            )
            out = F.conv1d(u, t["grouped_weight"], t["grouped_bias"], groups=n + g)
            here = slice(chunk * c + first, chunk * c + end)
            y[here, entry] = out.squeeze(0).t()
            values[here, entry] = torch.cat((current[here, entry], torch.cat((lag, of_late[first : end - 1]))), dim=-1)
    y, z = y.unflatten(-1, (n + g, d)), z.unflatten(-1, (n + g, d))
    mean = (z[:, :, :n].unflatten(2, (g, n // g)) + z[:, :, n:].unsqueeze(3)) / 2
    x = y + torch.cat((mean.flatten(2, 3), mean.mean(3)), dim=2)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    x = x / length * d**0.5
    x = torch.cat((x[:, :, :n], x[:, :, n:] * t["temperature"].unsqueeze(-1)), dim=2)
    if t["rope"] is not None:
        half = case.rotary // 2
        cos, sin = t["rope"].unsqueeze(2).split(half, dim=-1)
        turned = torch.cat(
            (x[..., :half] * cos - x[..., half : 2 * half] * sin, x[..., half : 2 * half] * cos + x[..., :half] * sin),
            dim=-1,
        )
        x = torch.cat((turned, x[..., 2 * half :]), dim=-1)
    return x[:, :, :n], x[:, :, n:], values.unflatten(-1, (g, d)), (1.0 / length).squeeze(-1).permute(2, 0, 1)


def exact(i: Inputs) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Results and gradients in fp64, on the CPU."""
    leaves = {}
    for name, tensor in i.tensors.items():
        value = None if tensor is None else tensor.detach().cpu()
        leaves[name] = value if value is None or name == "starts" else value.to(FP64).requires_grad_(name != "rope")
    results = _prologue(i, leaves)
    wanted = [name for name in GRADIENTS if leaves[name] is not None]
    upstream = [u.cpu().to(FP64) for u in i.upstream]
    gradients = torch.autograd.grad(results[:3], [leaves[name] for name in wanted], upstream, materialize_grads=True)
    return {name: r.detach() for name, r in zip(RESULTS, results, strict=True)}, dict(
        zip(wanted, gradients, strict=True)
    )


# Of the length of a head's vector: results of bf16 are rounded once, and before that u, or the gradient of x and the
# merged taps.
ALLOWED = {"results": {BF16: 6e-3, FP32: 5e-6, FP64: 1e-12}, "gradients": {BF16: 1.5e-2, FP32: 2e-5, FP64: 1e-11}}


def compare(name: str, got: Tensor, want: Tensor, d: int, allowed: float, least: float = 1e-30) -> None:
    """Raises AssertionError unless every vector of d neighbouring channels is within `allowed` of its length, of a
    tenth of their mean length, or of `least`.
    """
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if want.numel() == 0:
        return
    width = d if want.numel() % d == 0 else want.numel()
    got, want = (x.detach().double().cpu().reshape(-1, width) for x in (got, want))
    length = want.norm(dim=1)
    error = (got - want).norm(dim=1) / length.clamp_min(max(0.1 * length.square().mean().sqrt().item(), least))
    error = error.nan_to_num(torch.inf)
    worst = int(error.argmax())
    assert error[worst] <= allowed, (
        f"{name}: {int((error > allowed).sum())} of {len(error)} vectors are wrong; the worst, {worst}, by "
        f"{error[worst]:.3g} of {allowed:.3g}; it begins with "
        f"{got[worst, :4].tolist()}, right is {want[worst, :4].tolist()}"
    )


def check(module, case: Case, device: str = "cpu") -> None:
    """Forward and backward of `case` against fp64."""
    inputs = make(case, device)
    results, gradients = exact(inputs)
    got = dict(zip(RESULTS, module.cca_prologue(*inputs.arguments), strict=True))
    for name, want in results.items():
        assert got[name].dtype == (torch.promote_types(case.dtype, FP32) if name == "inverse_norm" else case.dtype)
        if name == "value":
            assert torch.equal(got[name].cpu().double(), want), "values are copies"
        else:
            compare(
                name,
                got[name].movedim(0, -1) if name == "inverse_norm" else got[name],
                want.movedim(0, -1) if name == "inverse_norm" else want,
                case.d,
                ALLOWED["results"][case.dtype],
            )
    found = backward(module, inputs, got)
    for name, want in gradients.items():
        assert found[name].dtype == case.dtype
        if name == "value_halo":
            assert torch.equal(found[name].cpu().double(), want), "values' gradients are copies"
        else:
            # A temperature's gradient is a sum of as many numbers as there are rows, each about sqrt(d), of either
            # sign.
            least = (case.d * case.chunks * case.rows * case.batch) ** 0.5 if name == "temperature" else 1e-30
            compare("d_" + name, found[name], want, case.d, ALLOWED["gradients"][case.dtype], least)
    for name in GRADIENTS[6:]:
        assert name in gradients or found[name].numel() == 0


def backward(module, inputs: Inputs, got: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients by name from the results of the forward."""
    saved = (got["query"], got["key"], got["inverse_norm"])
    found = module.cca_prologue_backward(
        *inputs.upstream, *inputs.tensors.values(), *saved, inputs.case.groups, inputs.case.late
    )
    return dict(zip(GRADIENTS, found, strict=True))

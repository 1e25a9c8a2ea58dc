# SPDX-License-Identifier: Apache-2.0
"""What only an accelerator can show: no host synchronisation, and rows that grouped products leave uninitialised."""

import pytest
import torch

from tests.no_waiting import no_waiting
from zaya_plugin.model.experts import ExpertMLP

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")]


def loop(x, weights, offsets, fc1, fc2):
    out, start = torch.zeros_like(x), 0
    for expert, end in enumerate(offsets.tolist()):
        gate, up = (x[start:end] @ fc1[expert].T).chunk(2, -1)
        out[start:end] = (torch.nn.functional.silu(gate) * up @ fc2[expert].T) * weights[start:end, None]
        start = end
    return out


@pytest.mark.parametrize("counts", [[3, 0, 5, 7], [1, 2, 3, 9], [15, 0, 0, 0], [0, 0, 0, 16], [0, 0, 0, 1]])
def test_experts_in_bf16(counts):
    rows, h, f, experts = 16, 64, 48, 4
    torch.empty(64 << 20, device="cuda").fill_(float("nan"))  # what later allocations will find

    def normal(*shape, scale=1.0):
        return (torch.randn(*shape, device="cuda") * scale).bfloat16().requires_grad_()

    x, weights = normal(rows, h), torch.rand(rows, device="cuda", requires_grad=True)
    fc1 = [normal(2 * f, h, scale=h**-0.5) for _ in range(experts)]
    fc2 = [normal(h, f, scale=f**-0.5) for _ in range(experts)]
    leaves = [x, weights, *fc1, *fc2]
    offsets, grad = torch.tensor(counts, device="cuda").cumsum(0).int(), normal(rows, h).detach()
    torch.autograd.grad(ExpertMLP.apply(x, weights, offsets, experts, None, 1.0, *fc1, *fc2), leaves, grad)  # compiles
    with no_waiting():
        y = ExpertMLP.apply(x, weights, offsets, experts, None, 1.0, *fc1, *fc2)
        gradients = torch.autograd.grad(y, leaves, grad)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = loop(exact[0], exact[1], offsets, exact[2 : 2 + experts], exact[2 + experts :])
    wanted = torch.autograd.grad(expected, exact, grad.double(), allow_unused=True, materialize_grads=True)
    live = sum(counts)  # the other rows of y and of the gradient of x are not defined
    pairs = zip(
        [y[:live], gradients[0][:live], *gradients[1:]], [expected[:live], wanted[0][:live], *wanted[1:]], strict=True
    )
    for got, want in pairs:
        assert got.isfinite().all() and not got[want == 0].any()
        assert (got.double() - want).norm() <= 2e-2 * want.norm()


def test_decoder_never_waits_for_the_host(make_model, batch):
    fields = dict(use_cpu_initialization=False, params_dtype=torch.bfloat16, bf16=True)
    model = make_model(**fields, hidden_size=64, kv_channels=16, moe_ffn_hidden_size=32, ffn_hidden_size=32).cuda()
    ids, positions, labels = (t.cuda() for t in batch(s=16))
    model(ids, positions, None, labels=labels).mean().backward()  # moves what is moved once
    x, rope = model.embedding(ids, positions), model.rotary_pos_emb(16)
    with no_waiting():
        model.decoder(x, None, rotary_pos_emb=rope).float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())

# SPDX-License-Identifier: Apache-2.0
"""The attention of a layer, forward and backward, against its formula in fp64: every version, dtype and form, packed
documents too.
"""

import pytest
import torch
import torch.nn.functional as F

import hip_ops
from zaya_plugin.parallel.packed_documents import PackedDocuments

ROWS, BATCH, HEADS, GROUPS, WIDTH = 13, 2, 4, 2, 128
LENGTH = {"linear": lambda t: t, "exp": torch.exp, "clamped_exp": lambda t: t.clamp(1e-7, 2.0).exp()}
FP64, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16


def plain(x, angles, parameters, form):
    """One document x [s, h] with angles [s, r / 2] and temperatures [s, groups] -> [s, h], as transformers'
    ZayaAttention has it (arXiv 2510.04476).
    """
    q, k, current, delayed, depthwise, depthwise_bias, grouped, grouped_bias, temperature, out = parameters
    heads, d = HEADS + GROUPS, len(depthwise) // (HEADS + GROUPS)
    z = x @ torch.cat((q, k)).T
    u = F.conv1d(F.pad(z.T, (2, 0)), depthwise, depthwise_bias, groups=len(depthwise))
    y = F.conv1d(u, grouped, grouped_bias, groups=heads).T
    query, key = z.unflatten(1, (heads, d)).split((HEADS, GROUPS), dim=1)
    mean = (query.unflatten(1, (GROUPS, -1)) + key.unsqueeze(2)) / 2
    y = y.unflatten(1, (heads, d)) + torch.cat((mean.flatten(1, 2), mean.mean(2)), dim=1)
    y = d**0.5 * y / y.norm(dim=-1, keepdim=True)
    y = torch.cat((y[:, :HEADS], y[:, HEADS:] * LENGTH[form](temperature).unsqueeze(-1)), dim=1)
    half = angles.shape[1]
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    first, second, rest = y.split((half, half, d - 2 * half), dim=-1)
    y = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    late = F.pad((x @ delayed.T)[:-1], (0, 0, 1, 0))
    value = torch.cat((x @ current.T, late), dim=1).unflatten(1, (GROUPS, d))
    key, value = (t.repeat_interleave(HEADS // GROUPS, dim=1) for t in (y[:, HEADS:], value))
    scores = torch.einsum("snd,tnd->nst", y[:, :HEADS], key) / d**0.5
    visible = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    context = torch.einsum("nst,tnd->snd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)
    return context.flatten(1) @ out.T


NAMES = (
    *("linear_q.weight", "linear_k.weight", "linear_v_current.weight", "linear_v_delayed.weight"),
    *("conv_qk_depthwise.weight", "conv_qk_depthwise.bias", "conv_qk_grouped.weight", "conv_qk_grouped.bias"),
    *("temperature", "linear_proj.weight"),
)


def errors(make_model, dtype, channels, form, packed):
    """Return the errors of the output and of all gradients by name, relative to their norms.

    The gradient of a temperature is a sum over rows of numbers of either sign; its error is relative to the norm of
    these numbers.
    """
    options = dict(num_layers=2, hidden_size=WIDTH, kv_channels=channels, temperature_form=form)
    model = make_model(**options, **(dict(params_dtype=BF16, bf16=True) if dtype == BF16 else {})).to(dtype)
    attention = model.decoder.layers[1].self_attention
    with torch.no_grad():
        attention.temperature.copy_(torch.tensor([-0.4, 1.2]))  # clamped_exp clamps the first
    tokens = torch.ones(BATCH, ROWS, dtype=torch.int64)
    if packed:  # documents of one, two and more tokens
        tokens[0, [0, 2, 9]] = tokens[1, [5, 6, 12]] = 0
    angles = model.rotary_pos_emb(ROWS).to(hip_ops.wide(dtype))
    parameters = dict(attention.named_parameters())
    assert parameters.keys() == {*NAMES}
    leaves = [torch.randn(ROWS, BATCH, WIDTH).to(dtype).requires_grad_(), *(parameters[name] for name in NAMES)]
    upstream = torch.randn(ROWS, BATCH, WIDTH).to(dtype)
    documents = PackedDocuments.from_ends(tokens == 0) if packed else None
    output, _ = attention(leaves[0], rotary_pos_emb=angles, packed_seq_params=documents)
    found = output, *torch.autograd.grad(output, leaves, upstream)

    x, *exact = (leaf.detach().double().requires_grad_() for leaf in leaves)
    place = NAMES.index("temperature")
    of_rows = exact[place].detach().expand(ROWS, BATCH, GROUPS).clone().requires_grad_()
    turns, sequences = angles[:, 0, 0, : angles.shape[-1] // 2].double(), []
    for sequence in range(BATCH):
        ends = [*((tokens[sequence, :-1] == 0).nonzero().flatten() + 1).tolist(), ROWS]
        pieces = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        for piece in pieces:
            exact[place] = of_rows[piece, sequence]
            sequences.append(plain(x[piece, sequence], turns[piece], exact, form))
    want = torch.cat(sequences).unflatten(0, (BATCH, ROWS)).transpose(0, 1)
    exact[place] = of_rows
    wanted = [want, *torch.autograd.grad(want, (x, *exact), upstream.double())]
    scales = [each.norm() for each in wanted]
    wanted[place + 2] = wanted[place + 2].sum((0, 1))
    assert all(each.norm() > 0 for each in wanted) and (form != "clamped_exp" or wanted[10][0] == 0)
    names = ("output", "hidden_states", *NAMES)
    compared = zip(names, found, wanted, scales, strict=True)
    return {name: ((a.double() - b).norm() / scale).item() for name, a, b, scale in compared}


# In bf16 the projections, the prologue, the softmax and the products behind it each round once.
BOUNDS = {FP64: 1e-13, FP32: 5e-6, BF16: 3e-2}


def check(found, dtype):
    for name, error in found.items():
        assert error <= BOUNDS[dtype], f"{name}: {error:.3g}"


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("form", LENGTH)
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_output_and_gradients_are_those_of_the_formula(make_model, dtype, form, packed):
    check(errors(make_model, dtype, 8, form, packed), dtype)


@pytest.mark.parametrize("packed", [False, True], ids=["whole", "packed"])
@pytest.mark.parametrize("form", LENGTH)
def test_hip_has_the_output_and_gradients_of_the_formula(make_model, form, packed):
    """The HIP version has the formula's output and gradients, for heads of 128 channels in bf16."""
    found = []
    for kernels in ("reference", "hip"):
        torch.manual_seed(1234)
        with hip_ops.use_kernels(kernels):
            found.append(errors(make_model, BF16, 128, form, packed))
        check(found[-1], BF16)
    assert found[0]["conv_qk_grouped.weight"] != found[1]["conv_qk_grouped.weight"], "two versions"

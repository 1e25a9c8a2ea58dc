# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that the product adds to the main gradient: their numbers, and that DDP adds, copies and loses
nothing.
"""

import pytest
import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from hip_ops.runtime import main_grad
from hip_ops.runtime.main_grad import (
    MainGradLinear,
    add_product,
    add_product_,
    add_products_,
    handed_over,
    handed_over_block,
    main_grad_linear,
)
from zaya_plugin.model import experts, gpt_model, parameters


def weight_with_main_grad(out, columns, dtype=torch.float32, main_dtype=torch.float32):
    weight = nn.Parameter(torch.randn(out, columns).to(dtype))
    weight.main_grad, weight.grad_added_to_main_grad = torch.randn(out, columns).to(main_dtype), False
    return weight


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_the_product_is_added_in_fp32(dtype, rows):
    total = torch.randn(5, 3, dtype=torch.promote_types(dtype, torch.float32))
    wide_a, b = torch.randn(rows, 9).to(dtype), torch.randn(rows, 3).to(dtype)
    a = wide_a[:, 2:7]  # strided, as a part of a joined projection's gradient is
    wanted = total.double() + a.double().t() @ b.double()
    assert add_product_(total, a, b).data_ptr() == total.data_ptr()
    bound = (rows + 2) * 2.0**-24 * (wanted.abs() + a.double().abs().t() @ b.double().abs())
    assert ((total.double() - wanted).abs() <= bound).all()


def test_products_of_joined_columns_go_to_their_own_matrices():
    totals = [torch.randn(out, 4) for out in (3, 1, 2)]
    a, b = torch.randn(7, 6), torch.randn(7, 4)
    wanted = torch.cat(totals).double() + a.double().t() @ b.double()
    add_products_(totals, a, b)
    torch.testing.assert_close(torch.cat(totals).double(), wanted, atol=1e-6, rtol=1e-6)


def test_a_main_gradient_of_the_weights_own_dtype_is_rounded_once_a_call():
    weight = weight_with_main_grad(5, 3, torch.bfloat16, torch.bfloat16)
    a, b = torch.randn(37, 5).bfloat16(), torch.randn(37, 3).bfloat16()
    exact = weight.main_grad.double() + a.double().t() @ b.double()
    add_product(weight, a, b)
    assert weight.main_grad.dtype == torch.bfloat16
    assert ((weight.main_grad.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-5).all()


def test_without_a_main_gradient_the_gradient_is_autograds_own():
    weight, x, g = (
        nn.Parameter(torch.randn(5, 3).bfloat16()),
        torch.randn(11, 3).bfloat16(),
        torch.randn(11, 5).bfloat16(),
    )
    F.linear(x, weight).backward(g)
    assert torch.equal(add_product(weight, g, x), weight.grad)
    assert type(main_grad_linear(x, weight).grad_fn).__name__ != "MainGradLinearBackward"


def test_autograd_takes_what_is_handed_over_without_a_copy():
    weight, seen = weight_with_main_grad(6, 4), []
    accumulate = weight.expand_as(weight).grad_fn.next_functions[0][0]

    def hook(*unused):
        seen.append(weight.grad.data_ptr())
        weight.grad = None

    accumulate.register_hook(hook)
    for _ in range(2):
        main_grad_linear(torch.randn(3, 4), weight).sum().backward()
    assert seen == [weight.data_ptr()] * 2
    assert weight.grad_added_to_main_grad and weight.grad is None


def test_autograd_takes_the_matrices_of_a_block_without_a_copy():
    block, seen = torch.randn(3, 6, 4), []
    weights = [torch.nn.Parameter(matrix) for matrix in block]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *matrices):
            ctx.matrices = matrices
            return block.sum()

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx, grad):
            return handed_over_block(ctx.matrices, block)

    for weight in weights:
        weight.grad_added_to_main_grad = False
        weight.register_post_accumulate_grad_hook(
            lambda weight: seen.append((weight.grad.data_ptr(), weight.data_ptr()))
        )
    Product.apply(*weights).backward()
    assert (
        len(seen) == 3
        and all(given == own for given, own in seen)
        and all(weight.grad_added_to_main_grad for weight in weights)
    )
    weights[1].zero_out_wgrad, weights[1].grad_added_to_main_grad = True, False
    found = handed_over_block(weights, block)
    assert found[1] is None and not weights[1].grad_added_to_main_grad and found[2].data_ptr() == weights[2].data_ptr()


def test_a_weight_with_another_use_leaves_ddps_hook_to_that_one():
    weight, other = weight_with_main_grad(6, 4), torch.randn(6, 4)
    weight.zero_out_wgrad = True
    x = torch.randn(3, 4)
    before = weight.main_grad.clone()
    (main_grad_linear(x, weight).sum() + (weight * other).sum()).backward()
    assert torch.equal(weight.grad, other)  # DDP adds it; the product's share is in main_grad
    assert not weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad, before + x.sum(0).expand(6, 4))
    assert handed_over(weight) is None


def test_gradcheck_and_frozen_weights():
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(rows, 4, dtype=torch.float64, requires_grad=True) for rows in (3, 2)]
    assert torch.autograd.gradcheck(MainGradLinear.apply, (x, *weights))
    weights[1].requires_grad_(False)
    MainGradLinear.apply(x, *weights).sum().backward()
    torch.testing.assert_close(weights[0].grad, x.detach().sum(0).expand(3, 4))
    assert weights[1].grad is None


def gradients_of_a_step(
    make_model, batch, monkeypatch, *, direct, overlap, dtype=torch.float32, micro_batches=2, **overrides
):
    """main_grad of every parameter after a step of micro-batches, and the sizes of gradients that DDP saw not
    added yet.
    """
    with monkeypatch.context() as patch:
        if not direct:
            for module in (main_grad, experts, parameters, gpt_model):
                patch.setattr(module, "main_grad_of", lambda weight: None)
        model = make_model(params_dtype=dtype, bf16=dtype == torch.bfloat16, **overrides)
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=overlap,
            overlap_grad_reduce=overlap,
            bucket_size=20_000 if overlap else None,
            grad_reduce_in_fp32=True,
        )
        ddp = DistributedDataParallel(model.config, options, model)
        ddp.train()
        ddp.zero_grad_buffer()
        ids, positions, labels = batch()
        left = {}
        with ddp.no_sync():
            for _ in range(micro_batches - 1):
                ddp(ids, positions, None, labels=labels).mean().backward()
        ddp(ids, positions, None, labels=labels).mean().backward()
        for name, p in model.named_parameters():
            assert p.grad is None, name
            left[name] = p.grad_added_to_main_grad
        ddp.finish_grad_sync()
        return {name: p.main_grad.double().clone() for name, p in model.named_parameters()}, left


@pytest.mark.parametrize(
    "overlap, recompute",
    [
        (False, None),
        (True, "full"),
        pytest.param(True, None, marks=pytest.mark.slow),
        pytest.param(False, "full", marks=pytest.mark.slow),
    ],
)
def test_a_step_under_ddp_gives_the_gradients_of_autograd(make_model, batch, monkeypatch, overlap, recompute):
    overrides = (
        {}
        if recompute is None
        else dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    )
    found = [
        gradients_of_a_step(make_model, batch, monkeypatch, direct=direct, overlap=overlap, **overrides)
        for direct in (False, True)
    ]
    (plain, not_direct), (direct, added) = found
    for name, want in plain.items():
        assert (direct[name] - want).norm() <= 1e-6 * want.norm(), name
        assert torch.equal(direct[name], want) or ".experts." not in name, name
    assert not any(not_direct.values())
    left = {name.removeprefix("decoder.layers.") for name, direct in added.items() if not direct}
    of_layers = {
        f"{layer}.{name}"
        for layer in range(4)
        for name in ("input_layernorm.weight", "self_attention.conv_qk_grouped.weight")
    }
    assert left == of_layers | {"0.input_affine.bias", "0.input_affine.scale", "decoder.final_layernorm.weight"}


def test_in_bf16_main_gradients_are_nearer_to_fp64():
    """A projection's gradient summed over micro-batches in fp32 is nearer to fp64 than one that each micro-batch
    rounds to bf16.
    """
    x, g = torch.randn(8, 64, 16).bfloat16(), torch.randn(8, 64, 12).bfloat16()
    exact = torch.einsum("mto,mti->oi", g.double(), x.double())
    weight = weight_with_main_grad(12, 16, torch.bfloat16)
    weight.main_grad.zero_()
    rounded = torch.zeros(12, 16)
    for micro_batch in range(8):
        main_grad_linear(x[micro_batch], weight).backward(g[micro_batch])
        weight.grad = None
        rounded += g[micro_batch].t() @ x[micro_batch]
    error, before = ((total.double() - exact).norm() / exact.norm() for total in (weight.main_grad, rounded))
    assert error < 1e-6 and before > 1e-4

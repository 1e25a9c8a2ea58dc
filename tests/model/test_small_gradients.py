# SPDX-License-Identifier: Apache-2.0
"""A layer's vectors, whose gradients are added to the main gradients together: the bits of DDP's own additions, none
lost, none twice.
"""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hip_ops.ops.rms_norm.reference import scale_residual
from zaya_plugin.model import parameters
from zaya_plugin.model.parameters import add_together_, direct, view_together
from zaya_plugin.model.stream import LinkedContext
from zaya_plugin.parallel.packed_documents import PackedDocuments

LAYERS, VECTORS = 4, 13
SHAPES = ((5,), (6, 1, 2), (2,))
FULL = dict(recompute_granularity="full", recompute_method="uniform")
BF16 = dict(params_dtype=torch.bfloat16, bf16=True)
aten = torch.ops.aten


def parameters_with_main_grads(dtype=torch.float32):
    found = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    for parameter in found:
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.randn(parameter.shape), False
    return found


class Additions(TorchDispatchMode):
    """Calls of torch that add to one of `totals`, and how many of these each reached."""

    def __init__(self, totals):
        super().__init__()
        self.addresses, self.reached = {total.data_ptr() for total in totals}, []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        if function.overloadpacket in (aten.add_, aten._foreach_add_):
            targets = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1]
            count = sum(target.data_ptr() in self.addresses for target in targets)
            self.reached += [count] if count else []
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("part_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("total_dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_one_addition_each(part_dtype, total_dtype):
    totals = [torch.randn(shape).to(total_dtype) for shape in SHAPES]
    parts = [torch.randn(shape).to(part_dtype) for shape in SHAPES]
    parts[0] = torch.randn(()).to(part_dtype).expand(5)  # as the gradient of a sum comes
    parts[1] = torch.randn(2, 1, 6).to(part_dtype).permute(2, 1, 0)
    wanted = [total.clone().add_(part) for total, part in zip(totals, parts, strict=True)]
    before = [total.data_ptr() for total in totals]
    add_together_(totals, parts)
    assert [total.data_ptr() for total in totals] == before
    assert all(torch.equal(total, want) for total, want in zip(totals, wanted, strict=True))


def test_only_gradients_that_come_are_added_and_reported():
    first, second, third = parameters_with_main_grads()
    third.zero_out_wgrad = True
    before, seen = [p.main_grad.clone() for p in (first, second, third)], []
    first.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.data_ptr()))
    view = view_together((first, second, third))
    alias = view(first)
    assert alias is not first and alias.data_ptr() == first.data_ptr() and view(first) is alias
    ((alias * 3.0).sum() + (alias * alias).sum() + (view(third) * 5.0).sum()).backward()
    assert torch.equal(first.main_grad, before[0] + (3.0 + 2.0 * first.detach()))  # of both uses, in one addition
    assert torch.equal(second.main_grad, before[1]) and torch.equal(third.main_grad, before[2] + 5.0)
    assert [p.grad_added_to_main_grad for p in (first, second, third)] == [True, False, False]
    assert seen == [first.data_ptr()] and second.grad is None and third.grad is None


def test_parameters_without_a_main_gradient_are_used_directly():
    plain, frozen, main = nn.Parameter(torch.ones(3)), *parameters_with_main_grads()[:2]
    frozen.requires_grad_(False)
    view = view_together((plain, frozen, main))
    assert view(plain) is plain and view(frozen) is frozen and view(main) is not main
    assert view_together((plain, frozen)) is direct
    with torch.no_grad():
        assert view_together((main,)) is direct


def test_compiled_functions_take_them():
    torch._dynamo.reset()
    versions, results = [], []
    compiled = torch.compile(
        scale_residual, dynamic=False, backend=lambda graph, _: versions.append(graph) or graph.forward
    )
    x, residual = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    for function in (scale_residual, compiled, compiled):
        vectors = [nn.Parameter(torch.linspace(0.5, i, 8)) for i in range(4)]
        for vector in vectors:
            vector.main_grad, vector.grad_added_to_main_grad = torch.zeros(8), False
        stream = function(x, residual, *map(view_together(vectors), vectors))
        stream.square().sum().backward()
        results.append([stream.detach(), *(vector.main_grad for vector in vectors)])
    assert len(versions) == 1
    for result in results[1:]:
        assert all(torch.equal(ours, want) for ours, want in zip(result, results[0], strict=True))


def under_ddp(make_model, *, overlap=False, prepare=lambda model: None, **overrides):
    model = make_model(**overrides)
    prepare(model)
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=overlap,
        overlap_grad_reduce=overlap,
        bucket_size=20_000 if overlap else None,
        grad_reduce_in_fp32=True,
    )
    ddp = DistributedDataParallel(model.config, options, model)
    ddp.train()
    ddp.zero_grad_buffer()
    return model, ddp


def main_grads_of_a_step(make_model, batch, monkeypatch, *, together, micro_batches, inputs=None, **options):
    """main_grad of every parameter after a step, and the names of those of which DDP was informed that all was
    added.
    """
    with monkeypatch.context() as patch:
        if not together:
            patch.setattr(parameters, "main_grad_of", lambda parameter: None)
        model, ddp = under_ddp(make_model, **options)
        ids, positions, labels = batch()
        for step in range(micro_batches):
            with ddp.no_sync() if step < micro_batches - 1 else torch.enable_grad():
                ddp(ids.roll(step, 1), positions, None, labels=labels, **(inputs or {})).mean().backward()
        ddp.finish_grad_sync()
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert all(p.grad is None for p in named.values())
        return {name: p.main_grad for name, p in named.items()}, {
            name for name, p in named.items() if p.grad_added_to_main_grad
        }


def freeze(model):
    for name, parameter in model.named_parameters():
        if "temperature" in name or "post_mlp_residual.output_scale" in name:
            parameter.requires_grad_(False)


def multiply_streams(model):
    def change(layer, inputs, outputs):
        assert isinstance(outputs[1], LinkedContext)
        return outputs[0] * 1.5, outputs[1]

    model.decoder.layers[1].register_forward_hook(change)


@pytest.mark.parametrize(
    "options, vectors",
    [
        (dict(micro_batches=1), VECTORS),
        (dict(micro_batches=2, overlap=True), VECTORS),
        (dict(micro_batches=2, **BF16), VECTORS),
        (dict(micro_batches=2, overlap=True, **FULL, recompute_num_layers=2), VECTORS),
        pytest.param(  # Megatron compiles a C++ extension
            dict(
                micro_batches=2,
                overlap=True,
                recompute_granularity="selective",
                recompute_modules=["layernorm", "core_attn", "moe"],
            ),
            VECTORS - 1,
            marks=pytest.mark.slow,
        ),
        (dict(micro_batches=2, overlap=True, prepare=freeze), VECTORS - 2),
        (dict(micro_batches=2, overlap=True, prepare=multiply_streams), VECTORS),
        (dict(micro_batches=1, temperature_form="clamped_exp"), VECTORS),
        (
            dict(
                micro_batches=1,
                inputs=dict(packed_seq_params=PackedDocuments.from_ends(torch.arange(24).view(2, 12) % 5 == 0)),
            ),
            VECTORS,
        ),
    ],
    ids=["fp32", "overlap", "bf16", "full", "selective", "frozen", "stream_replaced", "exp", "packed"],
)
def test_a_step_has_the_bits_of_autograd_and_ddp(make_model, batch, monkeypatch, options, vectors):
    expected, without = main_grads_of_a_step(make_model, batch, monkeypatch, together=False, **options)
    ours, told = main_grads_of_a_step(make_model, batch, monkeypatch, together=True, **options)
    assert ours.keys() == expected.keys()
    for name, want in expected.items():
        assert torch.equal(ours[name], want), name
    assert without <= told and len(told - without) == LAYERS * vectors
    assert all(float(ours[name].abs().sum()) > 0 for name in told - without)


@pytest.mark.parametrize("together, calls", [(False, [1] * VECTORS), (True, [VECTORS])])
def test_calls_that_add_a_layers_vectors(make_model, batch, monkeypatch, together, calls):
    if not together:
        monkeypatch.setattr(parameters, "main_grad_of", lambda parameter: None)
    model, ddp = under_ddp(make_model, **BF16)
    ids, positions, labels = batch()
    loss = ddp(ids, positions, None, labels=labels).mean()
    with Additions([parameter.main_grad for parameter in model.decoder.layers[1].vectors()]) as seen:
        loss.backward()
    assert seen.reached == calls


def test_values_are_read_after_the_gather(make_model, batch):
    """Vectors are read after their module's pre-forward hook has gathered them; until then they are NaN."""
    model, ddp = under_ddp(make_model)
    ids, positions, labels = batch()
    expected = ddp(ids, positions, None, labels=labels).detach()
    values = {parameter: parameter.detach().clone() for parameter in model.parameters()}

    def arrive(module, *_):
        for parameter in module.parameters(recurse=False):
            if parameter in values:
                parameter.data.copy_(values.pop(parameter))  # as the gather writes: autograd does not notice

    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    for module in model.modules():
        module.register_forward_pre_hook(arrive)
    losses = ddp(ids, positions, None, labels=labels)
    assert torch.equal(losses, expected) and not values
    losses.sum().backward()
    assert all(parameter.main_grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.gpu
def test_on_a_gpu_they_are_two_launches():
    totals = [torch.randn(shape, device="cuda") for shape in (*[(2048,)] * 9, (1280, 1, 2), (1280,), (1280,), (2,))]
    parts = [torch.randn_like(total).bfloat16() for total in totals]
    wanted = [total + part for total, part in zip(totals, parts, strict=True)]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        add_together_(totals, parts)
        torch.cuda.synchronize()
    assert all(torch.equal(total, want) for total, want in zip(totals, wanted, strict=True))
    assert sum("multi_tensor_apply" in event.name for event in profile.events()) == 2
    assert not any("elementwise" in event.name for event in profile.events())

# SPDX-License-Identifier: Apache-2.0
"""ChainedMuonAdamW's step against Megatron's own on the same gradients: norm, clipping, the division by tokens, skipped
steps.
"""

import pytest
import torch

from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this file)

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.optimizer.optimizer import ChainedOptimizer  # isort: skip

from tests.distributed.muon_model import build_model
from zaya_plugin.optim.chained import DeferredScale, NonFiniteGradientsError
from zaya_plugin.optim.factory import build_muon_adamw
from zaya_plugin.optim.muon import MuonSettings, StepContext

TOKENS = 4096


def make(distributed=True, bf16=True, non_finite=None, clip_grad=1.0, **options):
    model = build_model()
    if not bf16:
        model = model.float()
        model.config.bf16, model.config.params_dtype = False, torch.float32
    buffers = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed, bucket_size=60_000, grad_reduce_in_fp32=True
    )
    ddp = DistributedDataParallel(model.config, buffers, model)
    config = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        min_lr=1e-3,
        weight_decay=0.1,
        bf16=bf16,
        clip_grad=clip_grad,
        use_distributed_optimizer=distributed,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        **options,
    )
    return ddp, build_muon_adamw(
        get_megatron_optimizer, config, [ddp], MuonSettings(dtype="fp32"), non_finite=non_finite
    )


def give_gradients(ddp, optimizer, number, tokens=TOKENS):
    """Set gradients that are sums over tokens, and let Megatron divide them."""
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(number)
    for p in ddp.parameters():
        p.main_grad.copy_(tokens * torch.randn(p.shape, generator=generator))
    ddp.scale_gradients(1.0 / torch.tensor(tokens, dtype=torch.int if isinstance(tokens, int) else torch.float))


def megatrons(ddp, optimizer):
    """Take the same step with Megatron's own function, on gradients scaled in their buffers."""
    for buffer in ddp.buffers + ddp.expert_parallel_buffers:
        buffer.grad_data *= optimizer.deferred.factor
    optimizer.deferred.reset()
    for part in optimizer.parts:
        part.optimizer.begin_step(StepContext(targets=getattr(part, "targets", {})))
    return ChainedOptimizer.step(optimizer)


@pytest.fixture(autouse=True)
def megatrons_functions_on_a_cpu(monkeypatch):
    """Megatron's own functions for norm and scaling; with Transformer Engine installed it takes that package's, for GPUs."""
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    monkeypatch.setattr(clip_grads, "multi_tensor_applier", utils.local_multi_tensor_applier)
    monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_impl", utils.local_multi_tensor_scale)
    monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", None, raising=False)


def weights(ddp):
    return torch.cat([p.detach().float().flatten() for p in ddp.parameters()])


def state(ddp, optimizer):
    """Return all tensors that a step changes: the model's weights, then the optimizer's weights and state."""
    found = [weights(ddp)]
    for inner in optimizer.chained_optimizers:
        for p in inner.get_parameters():
            found += [p.detach().clone(), *(t.clone() for t in inner.optimizer.state[p].values())]
    return found


def steps_counted(optimizer):
    return {group.get("step", 0) for inner in optimizer.chained_optimizers for group in inner.optimizer.param_groups}


@pytest.mark.parametrize(
    "options",
    [dict(), dict(bf16=False), dict(distributed=False), dict(clip_grad=0.0)],
    ids=["bf16", "fp32", "no distributed optimizer", "no clipping"],
)
def test_the_step_is_megatrons(options):
    (ddp, ours), (other, theirs) = make(**options), make(**options)
    for number in range(2):
        give_gradients(ddp, ours, number)
        give_gradients(other, theirs, number)
        succeeded, norm, zeros = ours.step()
        assert succeeded and zeros is None
        expected = megatrons(other, theirs)[1]
        # before Megatron clips it in place
        exact = sum(p.main_grad.double().square().sum() for p in other.parameters()).sqrt()
        if options.get("clip_grad", 1.0):
            assert exact == pytest.approx(1.0, rel=1e-3) and norm > 100
        else:
            assert norm == pytest.approx(exact.item(), rel=1e-6)
        assert norm == pytest.approx(expected, rel=1e-6)
        tie = 2**-7 if options.get("bf16", True) else 0.0  # a bf16 weight may be rounded to the other side
        torch.testing.assert_close(weights(ddp), weights(other), rtol=tie, atol=2e-6)
    for mine, his in zip(state(ddp, ours)[1:], state(other, theirs)[1:], strict=True):
        assert torch.allclose(mine, his, rtol=1e-5, atol=2e-6)
    assert steps_counted(ours) == {2}


def test_the_norm_is_that_of_fp64():
    ddp, optimizer = make()
    give_gradients(ddp, optimizer, 3)
    exact = torch.cat([p.main_grad.double().flatten() for p in ddp.parameters()]).norm() / TOKENS
    assert optimizer.step()[1] == pytest.approx(exact.item(), rel=1e-6)


def test_finite_gradients_of_any_size_are_finite():
    ddp, optimizer = make(non_finite="skip")
    give_gradients(ddp, optimizer, 4, tokens=2.0**70)  # squares of these overflow fp32
    succeeded, norm, _ = optimizer.step()
    assert succeeded and 100 < norm < 1e4


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_skipped_step_changes_nothing(broken):
    ddp, optimizer = make(non_finite="skip")
    give_gradients(ddp, optimizer, 0)
    assert optimizer.step()[0]
    before = state(ddp, optimizer)
    give_gradients(ddp, optimizer, 1)
    list(ddp.parameters())[-1].main_grad.view(-1)[3] = broken
    assert optimizer.step() == (False, None, None)
    for old, new in zip(before, state(ddp, optimizer), strict=True):
        assert torch.equal(old, new)
    assert steps_counted(optimizer) == {1}
    give_gradients(ddp, optimizer, 2)
    assert optimizer.step()[0] and steps_counted(optimizer) == {2}
    assert not torch.equal(weights(ddp), before[0])


def test_skipped_steps_in_a_row_end_the_run():
    ddp, optimizer = make(non_finite="skip")
    optimizer.max_non_finite = 2
    for step, broken in enumerate([True, False, True, False]):
        give_gradients(ddp, optimizer, step)
        if broken:
            list(ddp.parameters())[-1].main_grad.view(-1)[3] = float("nan")
        assert optimizer.step()[0] is not broken
    before = state(ddp, optimizer)
    for last in (False, True):
        give_gradients(ddp, optimizer, 9)
        list(ddp.parameters())[-1].main_grad.view(-1)[3] = float("nan")
        if last:
            with pytest.raises(NonFiniteGradientsError, match="^optim.max_non_finite_steps=2: "):
                optimizer.step()
        else:
            assert optimizer.step() == (False, None, None)
    for old, new in zip(before, state(ddp, optimizer), strict=True):
        assert torch.equal(old, new)


def test_a_step_that_stops_changes_nothing_and_says_why():
    ddp, optimizer = make(non_finite="stop")
    give_gradients(ddp, optimizer, 0)
    assert optimizer.step()[0]
    before = state(ddp, optimizer)
    give_gradients(ddp, optimizer, 1)
    for parameter in list(ddp.parameters())[-2:]:
        parameter.main_grad.view(-1)[3] = float("inf")
    with pytest.raises(NonFiniteGradientsError, match="2 gradients .* hold an infinity or NaN"):
        optimizer.step()
    for old, new in zip(before, state(ddp, optimizer), strict=True):
        assert torch.equal(old, new)
    assert steps_counted(optimizer) == {1}


def test_without_skipping_the_norm_says_what_happened():
    ddp, optimizer = make()
    give_gradients(ddp, optimizer, 0)
    list(ddp.parameters())[-1].main_grad.view(-1)[0] = float("nan")
    succeeded, norm, _ = optimizer.step()
    assert succeeded and norm != norm


@pytest.mark.skipif(
    "grad_norm_skip_threshold" not in OptimizerConfig.__dataclass_fields__, reason="megatron-core 0.16 has no threshold"
)
def test_a_norm_beyond_the_threshold_skips_the_step():
    ddp, optimizer = make(grad_norm_skip_threshold=1.0)
    before = weights(ddp)
    give_gradients(ddp, optimizer, 0)
    succeeded, norm, _ = optimizer.step()
    assert not succeeded and norm > 1 and torch.equal(weights(ddp), before) and steps_counted(optimizer) == {0}


def test_the_loop_reads_the_loss_scale_without_a_device():
    _, optimizer = make()
    assert optimizer.get_loss_scale().device.type == "cpu" and optimizer.get_loss_scale().item() == 1
    assert optimizer.scale_loss(torch.tensor(3.0)) == 3


def test_scaling_is_put_off_and_forgotten_with_the_gradients():
    ddp, optimizer = make()
    give_gradients(ddp, optimizer, 0)
    raw = next(ddp.parameters()).main_grad.clone()
    assert optimizer.deferred.factor == 1 / TOKENS and raw.abs().max() > 1000
    ddp.scale_gradients(0.5)
    assert optimizer.deferred.factor == 0.5 / TOKENS and torch.equal(next(ddp.parameters()).main_grad, raw)
    optimizer.step()
    assert optimizer.deferred.factor == 1
    give_gradients(ddp, optimizer, 1)
    optimizer.zero_grad()
    assert optimizer.deferred.factor == 1


def test_all_buffers_are_scaled_by_one_number():
    class Buffer:
        pass

    buffers = [Buffer(), Buffer()]
    deferred = DeferredScale(buffers, "cpu")
    buffers[1].scale_gradients(half := torch.tensor([0.5]))
    with pytest.raises(AssertionError, match="by one number"):
        buffers[0].scale_gradients(torch.tensor([0.25]))
    buffers[0].scale_gradients(half)
    assert deferred.factor == 0.5 and deferred.factor.shape == ()

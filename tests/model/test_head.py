# SPDX-License-Identifier: Apache-2.0
"""Head and loss in one operator against torch's cross-entropy of the model's logits: training, and DDP's main
gradients.
"""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from tests.model.steps import train
from zaya_plugin.model.gpt_model import EmbeddingRows, ZayaGPTModel

TIED = "embedding.word_embeddings.weight"


class ByLogits:
    """A model whose losses are torch's cross-entropy of its logits."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, *inputs, labels, loss_mask=None):
        logits = self.model(*inputs).float()
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def test_fp32_gives_the_losses_and_gradients_of_the_plain_model_over_20_steps(make_model, batch):
    plain, plain_gradients = train(ByLogits(make_model()), batch, 20, 0.05)
    fused, fused_gradients = train(make_model(), batch, 20, 0.05)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)
    assert plain_gradients.keys() == fused_gradients.keys()
    for name, gradient in plain_gradients.items():
        # 20 steps amplify the last bits
        assert (fused_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name
    assert plain[-1] < plain[0] - 0.5


def masked_step(model, batch, mask, promise: bool):
    ids, positions, labels = batch()
    losses = model(ids, positions, None, labels=labels, **(dict(loss_mask=mask) if promise else {}))
    (losses.float() * mask).sum().backward()
    return losses.detach()


def a_mask(batch):
    shape = batch()[0].shape
    mask = (torch.arange(shape.numel()).reshape(shape) % 3 != 0).float()
    mask[0, 1] = 0.25  # not only zeros and ones
    return mask


@pytest.mark.parametrize(
    "recompute",
    [{}, dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)],
    ids=["", "full"],
)
def test_with_a_promise_and_without_one_gradients_are_the_same(make_model, batch, recompute):
    mask, found = a_mask(batch), []
    for promise, wrapped in ((False, ByLogits), (False, lambda model: model), (True, lambda model: model)):
        model = make_model(calculate_per_token_loss=True, **recompute)
        losses = masked_step(wrapped(model), batch, mask, promise)
        found.append((losses, {name: p.grad for name, p in model.named_parameters()}))
    for losses, gradients in found[1:]:
        torch.testing.assert_close(losses, found[0][0], rtol=1e-6, atol=1e-6)
        for name, want in found[0][1].items():
            assert (gradients[name] - want).norm() <= 1e-5 * want.norm() + 1e-7, name
    torch.testing.assert_close(found[1][0], found[2][0], rtol=5e-7, atol=0)


def test_z_loss_is_the_square_of_the_logsumexp_and_only_in_training(make_model, batch):
    ids, positions, labels = batch()
    plain, model = ByLogits(make_model()), make_model(z_loss=0.5)
    normalizer = plain.model(ids, positions, None).double().logsumexp(-1)
    want = plain(ids, positions, None, labels=labels) + 0.5 * normalizer.square()
    torch.testing.assert_close(model(ids, positions, None, labels=labels).double(), want.double(), rtol=1e-5, atol=1e-5)
    validation = model.eval()(ids, positions, None, labels=labels)
    torch.testing.assert_close(validation, plain(ids, positions, None, labels=labels), rtol=1e-5, atol=1e-5)


def test_a_broken_promise_is_detected(make_model, batch):
    model = make_model(calculate_per_token_loss=True)
    ids, positions, labels = batch()
    losses = model(ids, positions, None, labels=labels, loss_mask=a_mask(batch))
    with pytest.raises(RuntimeError, match="gradient is not promised_grad"):
        losses.sum().backward()


@pytest.mark.parametrize(
    "overrides, training", [(dict(calculate_per_token_loss=False), True), (dict(calculate_per_token_loss=True), False)]
)
def test_a_mask_is_no_promise_where_the_loss_may_be_divided_before(make_model, batch, overrides, training):
    model = make_model(**overrides).train(training)
    ids, positions, labels = batch()
    (model(ids, positions, None, labels=labels, loss_mask=a_mask(batch)).sum() / 7).backward()
    assert model.get_parameter(TIED).grad.norm() > 0


def test_without_labels_there_are_logits(make_model, batch):
    ids, positions, labels = batch()
    model = make_model()
    with torch.no_grad():
        losses, want = (each(ids, positions, None, labels=labels) for each in (model, ByLogits(model)))
        assert losses.shape == labels.shape and model(ids, positions, None).shape == (*ids.shape, 64)
    torch.testing.assert_close(losses, want, rtol=1e-6, atol=1e-6)


def step_under_ddp(make_model, batch, *, promise, overlap, dtype=torch.float32, wrapped=lambda model: model):
    """main_grad of every parameter after two micro-batches."""
    model = make_model(calculate_per_token_loss=True, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    ddp = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=overlap,
            overlap_grad_reduce=overlap,
            bucket_size=20_000 if overlap else None,
            grad_reduce_in_fp32=True,
        ),
        model,
    )
    mask = a_mask(batch)
    for _ in range(2):  # the second step as the first: flags and buffers are put back
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            masked_step(wrapped(ddp), batch, mask, promise)
        masked_step(wrapped(ddp), batch, mask, promise)
        ddp.finish_grad_sync()
    assert all(p.grad is None for p in model.parameters())
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}, model


@pytest.mark.first_cases(3)  # a promise without overlap is what each of the others has one half of
@pytest.mark.parametrize("promise, overlap", [(False, False), (True, True), (False, True), (True, False)])
def test_main_gradients_under_ddp(make_model, batch, promise, overlap):
    plain, _ = step_under_ddp(make_model, batch, promise=False, overlap=overlap, wrapped=ByLogits)
    fused, model = step_under_ddp(make_model, batch, promise=promise, overlap=overlap)
    for name, want in plain.items():
        assert (fused[name] - want).norm() <= 1e-5 * want.norm() + 1e-7, name
    assert model.get_parameter(TIED).grad_added_to_main_grad


def test_main_gradients_in_bf16_are_as_near_to_the_fp32_model_as_plain_ones(make_model, batch):
    exact, _ = step_under_ddp(make_model, batch, promise=False, overlap=False, wrapped=ByLogits)
    found = [
        step_under_ddp(make_model, batch, promise=True, overlap=False, dtype=torch.bfloat16, wrapped=wrapped)[0][TIED]
        for wrapped in (ByLogits, lambda model: model)
    ]
    plain, fused = ((grad - exact[TIED]).norm() / exact[TIED].norm() for grad in found)
    assert fused < 0.05 and fused < 1.1 * plain


@pytest.mark.parametrize("cut", [False, True])
def test_gradcheck_of_embedding_rows(cut):
    weight = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 4, 4], [-2, 5, 1]]) if cut else torch.tensor([[0, 4, 4], [2, 2, 1]])
    assert torch.autograd.gradcheck(lambda w: EmbeddingRows.apply(ids, w, cut, True), weight)
    rows = EmbeddingRows.apply(ids, weight, cut, True)
    assert not cut or not rows[1, :2].any() and rows[1, 2].any()


def test_no_dense_gradient_of_the_tied_matrix_is_made(make_model, batch):
    """Every tensor that the backward pass makes is smaller than the matrix; the plain model makes several as large."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        found = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(tensor, torch.Tensor) and not any(
                    isinstance(a, torch.Tensor) and a.data_ptr() == tensor.data_ptr() for a in args
                ):
                    self.found = max(self.found, tensor.numel())
            return result

    def largest(wrapped):
        torch.manual_seed(3)
        from zaya_plugin.model.build import build_zaya_model

        model = build_zaya_model(make_model().config.__class__(**CONFIG), vocab_size=4096, max_sequence_length=64)
        ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
        ddp.zero_grad_buffer()
        with Largest() as mode:
            masked_step(wrapped(ddp), batch, a_mask(batch), True)
        return mode.found

    matrix = 4096 * 32
    assert largest(ByLogits) >= matrix
    assert largest(lambda model: model) < matrix, "a tensor as large as the matrix"


CONFIG = dict(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=24,
    moe_ffn_hidden_size=24,
    num_moe_experts=4,
    router_hidden_size=16,
    use_cpu_initialization=True,
    calculate_per_token_loss=True,
)


def test_the_loss_is_transformers_loss(make_model, batch):
    """ForCausalLMLoss of transformers on the model's own logits; tests/parity compares the logits with
    ZayaForCausalLM's.
    """
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    model = make_model()
    assert isinstance(model, ZayaGPTModel)
    ids, positions, _ = batch()
    with torch.no_grad():
        logits = model(ids, positions, None)
        want = loss_utils.ForCausalLMLoss(logits, ids, vocab_size=64)
        losses = model(ids[:, :-1], positions[:, :-1], None, labels=ids[:, 1:])
    torch.testing.assert_close(losses.mean(), want, rtol=1e-6, atol=1e-6)

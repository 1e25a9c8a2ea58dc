# SPDX-License-Identifier: Apache-2.0
"""Layers that apply the next one's norm with their own last merge train as layers that norm the stream themselves.

The reference throughout is `separate`: every layer norms the stream itself, as where layers are not linked.
"""

import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import hip_ops
from tests.model.steps import assert_same_bits, train
from zaya_plugin.model.residual import InputAffine, ZayaRMSNorm
from zaya_plugin.model.stream import LinkedContext
from zaya_plugin.parallel.packed_documents import PackedDocuments

LAYERS = 4


def full(method: str, layers: int) -> dict:
    return dict(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)


RECOMPUTE = {
    "nothing": {},
    "uniform_1": full("uniform", 1),
    "uniform_2": full("uniform", 2),
    "uniform_4": full("uniform", 4),
    "block_1": full("block", 1),
    "block_3": full("block", 3),
    "layernorm": dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
}


def linked(model) -> list[int]:
    """The layers, from 0, that apply the next one's norm."""
    return [index for index, layer in enumerate(model.decoder.layers) if layer.next_norm]


def separate(model):
    for layer in model.decoder.layers:
        layer.next_norm = ()
    return model


def test_fp32_gives_the_same_bits(make_model, batch):
    expected = train(separate(make_model()), batch, 4, 0.05)
    assert_same_bits(train(make_model(), batch, 4, 0.05), expected)
    assert expected[0][-1] < expected[0][0]


@pytest.mark.parametrize(
    "recompute, links",
    [
        ("uniform_1", []),
        ("uniform_2", [0, 2]),
        ("block_1", [1, 2]),
        pytest.param("layernorm", [], marks=pytest.mark.slow),  # Megatron compiles a C++ extension
        pytest.param("uniform_4", [0, 1, 2], marks=pytest.mark.slow),
        pytest.param("block_3", [], marks=pytest.mark.slow),
    ],
)
def test_recomputation_changes_no_bit_and_layers_are_linked_within_what_it_runs_as_one(
    make_model, batch, recompute, links
):
    options = RECOMPUTE[recompute]
    ours = make_model(**options)
    assert linked(ours) == links
    expected = train(separate(make_model(**options)), batch, 2, 0.05)
    assert_same_bits(train(ours, batch, 2, 0.05), expected)
    torch.testing.assert_close(expected[0], train(separate(make_model()), batch, 2, 0.05)[0], rtol=1e-6, atol=0)


def test_packed_documents_and_given_experts(make_model, batch):
    s, b = 12, 2
    inputs = dict(
        packed_seq_params=PackedDocuments.from_ends(
            torch.randint(0, 4, (b, s), generator=torch.Generator().manual_seed(1)) == 0
        ),
        extra_block_kwargs={
            "context_mask": torch.randint(-1, 4, (LAYERS, s, b), generator=torch.Generator().manual_seed(2))
        },
    )
    expected = train(separate(make_model()), batch, 2, 0.05, **inputs)
    assert_same_bits(train(make_model(), batch, 2, 0.05, **inputs), expected)
    assert not torch.equal(expected[0], train(make_model(), batch, 2, 0.05)[0])


class Additions(TorchDispatchMode):
    """Counts the additions of two tensors of the stream's shape and dtype;
    an operator of hip_ops counts as one whole.
    """

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        tensors = [
            a for a in arguments if isinstance(a, torch.Tensor) and a.shape == self.shape and a.dtype == torch.float32
        ]
        self.count += function.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_) and len(tensors) == 2
        return function(*arguments, **(named or {}))


class Compiled(torch.autograd.Function):
    """A function as an accelerator's compiler makes it: what its gradient consists of is not seen from outside."""

    @staticmethod
    def forward(ctx, function, *arguments):
        ctx.arguments = [
            a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in arguments
        ]
        with torch.enable_grad():
            ctx.results = function(*ctx.arguments)
        return tuple(r.detach() for r in ctx.results) if isinstance(ctx.results, tuple) else ctx.results.detach()

    @staticmethod
    def backward(ctx, *gradients):
        wanted = [a for a in ctx.arguments if isinstance(a, torch.Tensor) and a.requires_grad]
        with _disable_current_modes():
            found = iter(torch.autograd.grad(ctx.results, wanted, gradients))
        return None, *(next(found) if any(a is w for w in wanted) else None for a in ctx.arguments)


@pytest.mark.parametrize("layers", [2, 4])
def test_no_two_gradients_of_the_stream_are_added_by_autograd(make_model, batch, monkeypatch, layers):
    for name in ("affine", "affine_rms_norm", "scale_residual", "rms_norm"):
        monkeypatch.setattr(hip_ops, name, functools.partial(Compiled.apply, getattr(hip_ops, name)))

    def additions(model):
        ids, positions, labels = batch()
        loss = model(ids, positions, None, labels=labels).float().mean()
        with Additions((12, 2, 32)) as seen:
            loss.backward()
        return seen.count

    options = dict(num_layers=layers, params_dtype=torch.bfloat16, bf16=True)
    assert additions(make_model(**options)) == 0
    assert additions(separate(make_model(**options))) == layers - 1


@pytest.mark.gpu
def test_on_a_gpu_linked_layers_add_less_and_have_the_gradients_of_separate_ones(make_model, batch):
    torch._dynamo.reset()  # else other tests of this process may have used up its limit of versions a function
    ids, positions, labels = (x.cuda() for x in batch(2, 64))
    experts = torch.randint(0, 4, (LAYERS, 64, 2), generator=torch.Generator().manual_seed(2)).cuda()
    kernels = (torch.profiler.ProfilerActivity.CUDA,)
    additions, gradients = [], []
    for prepare in (lambda model: model, separate):
        sizes = dict(hidden_size=256, kv_channels=32, moe_ffn_hidden_size=128, ffn_hidden_size=128)
        model = prepare(make_model(**sizes)).cuda()
        for _ in range(2):  # the first time compiles
            model.zero_grad(set_to_none=True)
            loss = model(ids, positions, None, labels=labels, extra_block_kwargs={"context_mask": experts}).mean()
            with torch.profiler.profile(activities=kernels) as profile:
                loss.backward()
                torch.cuda.synchronize()
        additions.append(sum("CUDAFunctor_add<float>" in event.name for event in profile.events()))
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    ours, expected = gradients
    assert additions[1] - additions[0] == LAYERS - 1
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (ours[name] - gradient).norm() <= 1e-3 * gradient.norm(), name


def test_the_beginning_of_the_stream_and_its_norm_are_those_of_the_modules(make_config):
    for config in (make_config(), make_config(residual_in_fp32=False, params_dtype=torch.bfloat16)):
        affine, input_norm = InputAffine(config), ZayaRMSNorm(config, 32, 1e-5)
        with torch.no_grad():
            for parameter in (*affine.parameters(), *input_norm.parameters()):
                parameter.add_(torch.randn(32).to(parameter))
        embedding = torch.randn(5, 2, 32).to(config.params_dtype)
        normed, stream = affine.affine_and_norm(embedding, input_norm)
        assert torch.equal(stream, affine(embedding)) and torch.equal(normed, input_norm(stream))
        assert stream.dtype == normed.dtype == config.params_dtype


def test_a_stream_that_was_changed_between_layers_is_normed_again(make_model, batch):
    def change(layer, inputs, outputs):
        assert isinstance(outputs[1], LinkedContext) == bool(layer.next_norm)
        return outputs[0] * 1.5, outputs[1]

    runs = []
    for model in (make_model(), separate(make_model())):
        model.decoder.layers[1].register_forward_hook(change)
        runs.append(train(model, batch, 2, 0.05))
    assert_same_bits(*runs)
    assert not torch.equal(runs[0][0], train(make_model(), batch, 2, 0.05)[0])


def test_handing_over_across_the_border_of_what_is_recomputed_is_an_error(make_model, batch):
    """A LinkedContext across the border of a recomputed part is an error, because its gradients would be lost
    silently.
    """
    model = make_model(**RECOMPUTE["uniform_2"])
    model.decoder.layers[1].next_norm = (model.decoder.layers[2].input_layernorm,)
    with pytest.raises(AssertionError, match="crossed the border"):
        train(model, batch, 1, 0.05)


def test_checkpoints_do_not_know_of_it(make_model):
    from megatron.core.models.gpt import GPTModel

    from zaya_plugin.model.layer_specs import zaya_block_spec

    ours, plain = make_model(), make_model()
    assert linked(ours) == linked(plain) == [0, 1, 2]
    config = plain.config
    stock = GPTModel(  # Megatron's own model around our layers links none
        config,
        zaya_block_spec(config),
        vocab_size=64,
        max_sequence_length=64,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        rotary_percent=0.5,
    )
    assert linked(stock) == []
    for model in (ours, plain):
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in stock.named_parameters()]
        assert list(model.state_dict()) == list(stock.state_dict())
        assert model.sharded_state_dict().keys() == stock.sharded_state_dict().keys()
    ours.load_state_dict(plain.state_dict())

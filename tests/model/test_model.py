# SPDX-License-Identifier: Apache-2.0
"""The whole model: recomputation, the router state between layers, precision, specs, size, initial values."""

import pytest
import torch

from zaya_plugin.model.build import build_zaya_model
from zaya_plugin.model.router import ZayaRouter

ZAYA1 = dict(
    num_layers=40,
    hidden_size=2048,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=128,
    ffn_hidden_size=2048,
    moe_ffn_hidden_size=2048,
    num_moe_experts=16,
    router_hidden_size=256,
)


def run(model, batch):
    """Loss, gradients by name, and expert counts [layers, E + 1]."""
    ids, positions, labels = batch
    model.zero_grad(set_to_none=True)
    loss = model(ids, positions, None, labels=labels).float().mean()
    loss.backward()
    counts = torch.stack([m.tokens_per_expert for m in model.modules() if isinstance(m, ZayaRouter)])
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, counts


RECOMPUTE = {
    "uniform_1": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "uniform_2": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2),
    "block_3": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
    "moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "core_attn": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    "layernorm": dict(recompute_granularity="selective", recompute_modules=["layernorm"]),
    "permute": dict(recompute_granularity="selective", recompute_modules=["layernorm", "permute"]),
    "all_selective": dict(recompute_granularity="selective", recompute_modules=["core_attn", "moe", "layernorm"]),
}


# Megatron compiles a C++ extension at the first layernorm recomputation.
COMPILES = ("layernorm", "permute", "all_selective")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in COMPILES)) for n in RECOMPUTE])
def test_recomputation_changes_nothing(make_model, batch, name, require_tool):
    if name in COMPILES:
        require_tool("ninja")
        require_tool("g++")
    loss, gradients, counts = run(make_model(), batch())
    again, recomputed, recounted = run(make_model(**RECOMPUTE[name]), batch())
    assert torch.equal(again, loss)
    assert torch.equal(recounted, counts) and (counts.sum(1) == 24).all()
    for parameter, gradient in gradients.items():
        assert gradient is not None, parameter
        torch.testing.assert_close(recomputed[parameter], gradient, rtol=1e-6, atol=1e-8, msg=parameter)


def test_evaluation_counts_nothing(make_model, batch):
    ids, positions, labels = batch()
    model = make_model(recompute_granularity="selective", recompute_modules=["moe"]).eval()
    with torch.no_grad():
        model(ids, positions, None, labels=labels)
    assert all(m.tokens_per_expert.sum() == 0 for m in model.modules() if isinstance(m, ZayaRouter))


def test_router_state_crosses_layers(make_model, batch):
    ids, positions, _ = batch()
    model = make_model()
    logits = model(ids, positions, None)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    assert routers[0].router_states_scale is None
    # The state of layer 1 reaches layer 4 through every gamma in between.
    states = []
    hooks = [r.register_forward_hook(lambda m, i, out: states.append(out[2].detach())) for r in routers]
    model(ids, positions, None)
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        routers[1].router_states_scale.zero_()
    changed = model(ids, positions, None)
    assert (changed - logits).abs().max() > 1e-4
    assert len(states) == 4 and states[0].shape == (12, 2, 16)
    gradient = torch.autograd.grad(changed.sum(), routers[0].down_proj.weight)[0]
    assert gradient.abs().sum() > 0


def test_no_averaging_when_switched_off(make_model, batch):
    model = make_model(router_eda=False)
    assert not any("router_states_scale" in name for name in model.state_dict())
    _, gradients, _ = run(model, batch())
    assert all(g is not None and g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("position", [0, 3, 7])
def test_no_token_sees_the_future(make_model, batch, position):
    ids, positions, _ = batch(b=1, s=8)
    model = make_model().eval()
    before = model(ids, positions, None)
    ids[0, position] = (ids[0, position] + 1) % 64
    after = model(ids, positions, None)
    assert torch.equal(before[0, :position], after[0, :position])
    assert not torch.equal(before[0, position], after[0, position])


def test_skip_identity_adds_the_weighted_input(make_model, batch):
    ids, positions, _ = batch()
    logits = {}
    for output in ("zero", "identity"):
        model = make_model(skip_output=output)
        for layer in model.decoder.layers:
            layer.mlp.router.balancing_biases[-1] = 9.0
        mlp = model.decoder.layers[1].mlp
        x, state = torch.randn(12, 2, 32), torch.randn(12, 2, 16)
        y, _ = mlp(x, state)
        weights, _, _ = mlp.router(x, state)
        torch.testing.assert_close(y, torch.zeros_like(x) if output == "zero" else x * weights.unsqueeze(-1))
        logits[output] = model(ids, positions, None)
        logits[output].sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        for name, p in model.named_parameters():
            assert "experts" not in name or not p.grad.any(), name
    assert (logits["zero"] - logits["identity"]).abs().max() > 1e-3


def test_bf16_is_finite_and_near_fp32(make_model, batch):
    forced = torch.randint(0, 4, (4, 12, 2))  # routing fixed, so that rounding moves values and not tokens
    results = []
    for model in (make_model(), make_model(params_dtype=torch.bfloat16, bf16=True)):
        ids, positions, labels = batch()
        loss = model(ids, positions, None, labels=labels, extra_block_kwargs={"context_mask": forced}).mean()
        loss.backward()
        results.append((loss.item(), torch.cat([p.grad.float().flatten() for p in model.parameters()])))
        assert results[-1][1].isfinite().all()
    (loss, gradient), (loss_bf16, gradient_bf16) = results
    assert model.decoder.layers[0].self_attention.linear_q.weight.dtype == torch.bfloat16
    assert loss_bf16 == pytest.approx(loss, rel=2e-2)
    assert 1e-4 < (gradient_bf16 - gradient).norm() / gradient.norm() < 0.1


def test_stream_between_layers_is_fp32_under_bf16(make_model, batch):
    model = make_model(params_dtype=torch.bfloat16, bf16=True)
    seen = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda m, i, out: seen.append((out[0].dtype, out[1])))
    ids, positions, _ = batch()
    logits = model(ids, positions, None)
    *handed_over, last = [context for _, context in seen]
    assert [dtype for dtype, _ in seen] == [torch.float32] * 4 and logits.dtype == torch.bfloat16
    assert (
        {t.dtype for context in handed_over for t in (context.router_state, context.normed)}
        == {last.dtype}
        == {torch.bfloat16}
    )


def test_whole_model_counts_the_published_parameters(make_config):
    with torch.device("meta"):
        model = build_zaya_model(
            make_config(**ZAYA1, perform_initialization=False, params_dtype=torch.bfloat16),
            vocab_size=262_272,
            max_sequence_length=4096,
        )
    assert all(p.is_meta for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == 8_840_488_784
    embedding = model.embedding.word_embeddings.weight.numel()
    assert embedding == 537_133_056
    experts = sum(p.numel() for name, p in model.named_parameters() if "experts" in name)
    assert experts == 8_053_063_680


def test_initial_values(make_config):
    def build():
        torch.manual_seed(11)
        return build_zaya_model(
            make_config(hidden_size=128, temperature_init=1.5, init_method_std=0.02, router_init_std=0.1),
            vocab_size=64,
            max_sequence_length=16,
        )

    model, again = build(), build()
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
        if name.endswith("temperature"):
            assert (p == 1.5).all()
        elif name.endswith("bias"):
            assert not p.any(), name
        elif p.dim() == 1:
            assert (p == 1).all(), name
        elif p.numel() > 2000:
            assert p.std().item() == pytest.approx(0.1 if "router" in name else 0.02, rel=0.1), name


def test_gpu_style_initialisation_draws_from_the_tracker(make_config):
    """Without use_cpu_initialization values come from Megatron's model-parallel stream, not from the global one."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    models = []
    for global_seed in (1, 2):
        model_parallel_cuda_manual_seed(5, force_reset_rng=True)
        torch.manual_seed(global_seed)
        models.append(build_zaya_model(make_config(use_cpu_initialization=False), vocab_size=64, max_sequence_length=8))
    for (name, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("percent", [0.0, 1.5, 0.375])
def test_rotary_percent_is_checked(make_config, percent):
    with pytest.raises(ValueError, match="rotary_percent"):
        build_zaya_model(make_config(), vocab_size=64, max_sequence_length=8, rotary_percent=percent)


def test_packing_and_decoding_are_refused(make_model):
    attention = make_model().decoder.layers[0].self_attention
    with pytest.raises(ValueError, match="packed_seq_params"):
        attention(torch.randn(4, 1, 32), packed_seq_params=object())
    with pytest.raises(ValueError, match="inference_context"):
        attention(torch.randn(4, 1, 32), inference_context=object())

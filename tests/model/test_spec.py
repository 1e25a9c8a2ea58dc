# SPDX-License-Identifier: Apache-2.0
"""The three routes to a model: our block spec, the layer spec in Megatron's own block, and Transformer Engine's parts.

Transformer Engine is not installed where these tests run. Stand-ins with the signatures of Megatron's wrappers show
that the spec passes what the wrappers take and that the results agree; the real kernels are not run here.
"""

import ast
import inspect

import pytest
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import nn

from zaya_plugin import compat
from zaya_plugin.model import spec

GPT = dict(
    vocab_size=64,
    max_sequence_length=64,
    share_embeddings_and_output_weights=True,
    position_embedding_type="rope",
    rotary_percent=0.5,
)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_layer_spec_gives_the_logits_of_the_block_spec(make_config, batch, dtype, tolerance):
    config = make_config(num_layers=3, params_dtype=dtype, bf16=dtype == torch.bfloat16)
    bare = GPTModel(config, spec.get_zaya_layer_spec(config), **GPT)
    block = GPTModel(config, spec.zaya_block_spec(config), **GPT)
    perturbed = {
        k: v + 0.1 * torch.randn_like(v) if v.is_floating_point() else v
        for k, v in block.state_dict().items()
        if v is not None
    }
    block.load_state_dict(perturbed)
    bare.load_state_dict(perturbed)
    ids, positions, labels = batch()
    a, b = bare(ids, positions, None), block(ids, positions, None)
    assert a.dtype == b.dtype == dtype
    assert (a - b).float().norm() <= tolerance * b.float().norm()
    bare(ids, positions, None, labels=labels).mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in bare.parameters())
    assert isinstance(bare.decoder.final_layernorm, nn.RMSNorm)


def test_layer_spec_by_configuration(make_config):
    layer_spec = spec.get_zaya_layer_spec(make_config())
    assert layer_spec.submodules.input_layernorm is spec.ZayaRMSNorm
    assert len(spec.zaya_block_spec(make_config(num_layers=7)).layer_specs) == 7


def test_missing_transformer_engine_is_named(make_config):
    with pytest.raises(ValueError, match="Fix: cluster.transformer_impl=local"):
        spec.get_zaya_layer_spec(make_config(transformer_impl="transformer_engine"))


class Linear(nn.Module):
    def __init__(self, input_size, output_size, config, init_method):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        init_method(self.weight)

    def forward(self, x):
        return F.linear(x, self.weight), None


class ColumnStandIn(Linear):
    def __init__(
        self,
        input_size,
        output_size,
        *,
        config,
        init_method,
        gather_output,
        bias,
        skip_bias_add,
        is_expert,
        skip_weight_param_allocation=False,
        tp_comm_buffer_name=None,
        tp_group=None,
        stride=1,
        name=None,
    ):
        assert not (gather_output or bias or skip_bias_add or is_expert)
        super().__init__(input_size, output_size, config, init_method)


class RowStandIn(Linear):
    def __init__(
        self,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        input_is_parallel,
        skip_bias_add,
        is_expert,
        tp_comm_buffer_name=None,
        tp_group=None,
        name=None,
    ):
        assert input_is_parallel and not (bias or skip_bias_add or is_expert)
        super().__init__(input_size, output_size, config, init_method)


class NormStandIn(nn.RMSNorm):
    """Answers in the stream's dtype, as an old Transformer Engine may."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)


class AttentionStandIn(nn.Module):
    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        num_splits=None,
        cp_comm_type="p2p",
        pg_collection=None,
    ):
        super().__init__()
        assert attn_mask_type.name == "causal" and attention_type == "self" and pg_collection is not None

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type,
        attention_bias=None,
        packed_seq_params=None,
        num_splits=None,
    ):
        s = query.shape[0]
        key, value = (x.repeat_interleave(query.shape[2] // key.shape[2], dim=2) for x in (key, value))
        scores = torch.einsum("sbhd,tbhd->bhst", query, key) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        return torch.einsum("bhst,tbhd->sbhd", scores.softmax(-1), value).flatten(2)


class GroupedStandIn(nn.Module):
    def __init__(
        self,
        num_gemms,
        input_size,
        output_size,
        *,
        config,
        init_method,
        bias,
        skip_bias_add,
        is_expert,
        tp_comm_buffer_name=None,
        pg_collection=None,
        name=None,
    ):
        super().__init__()
        assert is_expert and not (bias or skip_bias_add)
        for i in range(num_gemms):
            weight = nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            init_method(weight)
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x, m_splits):
        assert isinstance(m_splits, list) and sum(m_splits) == len(x)
        parts = x.split(m_splits)
        return torch.cat([F.linear(part, getattr(self, f"weight{i}")) for i, part in enumerate(parts)]), None


STAND_INS = {
    "TEColumnParallelLinear": ColumnStandIn,
    "TERowParallelLinear": RowStandIn,
    "TENorm": NormStandIn,
    "TEDotProductAttention": AttentionStandIn,
    "TEColumnParallelGroupedLinear": GroupedStandIn,
    "TERowParallelGroupedLinear": GroupedStandIn,
}


@pytest.fixture
def transformer_engine(monkeypatch):
    from megatron.core.extensions import transformer_engine as te

    monkeypatch.setattr(te, "HAVE_TE", True)
    for name, stand_in in STAND_INS.items():
        monkeypatch.setattr(te, name, stand_in)
    return te


def wrapper_arguments(name, method):
    """Argument names of a wrapper in Megatron's source: without Transformer Engine the classes cannot be asked."""
    from megatron.core.extensions import transformer_engine as te

    tree = ast.parse(inspect.getsource(te))
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    found = [f for f in classes[0].body if isinstance(f, ast.FunctionDef) and f.name == method]
    return [a.arg for a in found[0].args.posonlyargs + found[0].args.args], [a.arg for a in found[0].args.kwonlyargs]


@pytest.mark.parametrize(
    "name",
    [
        "TEColumnParallelLinear",
        "TERowParallelLinear",
        "TEDotProductAttention",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    ],
)
def test_stand_ins_have_the_wrappers_signatures(name):
    parameters = inspect.signature(STAND_INS[name].__init__).parameters.values()
    names = [p.name for p in parameters if p.kind != p.KEYWORD_ONLY]
    keywords = [p.name for p in parameters if p.kind == p.KEYWORD_ONLY]
    if not compat.at_least("0.17"):  # wrappers take a name since then; nobody gives one
        names, keywords = ([each for each in some if each != "name"] for some in (names, keywords))
    assert (names, keywords) == wrapper_arguments(name, "__init__")


def test_stand_ins_are_called_like_the_wrappers():
    forward = list(inspect.signature(AttentionStandIn.forward).parameters)
    assert forward == wrapper_arguments("TEDotProductAttention", "forward")[0]
    assert wrapper_arguments("TENorm", "__new__")[0][:4] == ["cls", "config", "hidden_size", "eps"]
    assert wrapper_arguments("TEGroupedLinear", "forward")[0] == ["self", "x", "m_splits"]


@pytest.mark.parametrize("grouped", [True, False])
def test_transformer_engine_spec_gives_the_local_results(transformer_engine, make_model, batch, monkeypatch, grouped):
    local = make_model()
    if not grouped:
        monkeypatch.setattr(transformer_engine, "TEColumnParallelGroupedLinear", None)
    remote = make_model(transformer_impl="transformer_engine")
    state = {k: v for k, v in local.state_dict().items() if v is not None}
    state["decoder.layers.2.mlp.router.balancing_biases"][-1] = 0.1  # some tokens skip
    local.load_state_dict(state)
    remote.load_state_dict(state)
    assert isinstance(remote.decoder.layers[0].mlp.experts, spec.GroupedExperts) != grouped
    ids, positions, labels = batch()
    losses = [m(ids, positions, None, labels=labels) for m in (local, remote)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.mean().backward()
    gradients = dict(remote.named_parameters())
    for name, p in local.named_parameters():
        assert (gradients[name].grad - p.grad).norm() <= 1e-4 * p.grad.norm() + 1e-9, name


def test_transformer_engine_spec_in_bf16(transformer_engine, make_model, batch):
    """The layer casts the norm's result to bf16 for the linears, also if the norm returns the stream's fp32."""
    model = make_model(transformer_impl="transformer_engine", params_dtype=torch.bfloat16, bf16=True)
    ids, positions, labels = batch()
    loss = model(ids, positions, None, labels=labels).mean()
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())

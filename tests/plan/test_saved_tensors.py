# SPDX-License-Identifier: Apache-2.0
"""Tensors that the model keeps for its backward pass, counted one by one and compared with zaya_plugin.plan.memory.

On an accelerator the functions between matrix products are compiled, and what they keep is the compiler's choice. In
this test the same partitioner makes that choice on the CPU, without making kernels.
"""

import weakref
from dataclasses import replace

import pytest
import torch

import hip_ops
from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.memory import Recompute, ends_bytes, layers_bytes
from zaya_plugin.plan.parallelism import Batch, ParallelSizes

LAYERS, SIZE, LENGTH, VOCABULARY = 2, 2, 64, 512
SHAPE = Shape(LAYERS, 64, 4, 2, 16, 4, 96, 32, VOCABULARY)
BATCH = Batch(LENGTH, SIZE)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The formulas between operators as an accelerator would have them, partitioned for the backward pass and then run
    as they are.
    """
    torch._dynamo.reset()  # other tests of this process may have used up its limit of versions a function
    for name in ("rms_norm", "layer_norm", "affine", "affine_rms_norm", "affine_layer_norm", "scale_residual"):
        plain = getattr(hip_ops, name).__wrapped__
        monkeypatch.setattr(hip_ops, name, torch.compile(plain, dynamic=False, backend="aot_eager_decomp_partition"))


def build(**options):
    from zaya_plugin.model.build import build_zaya_model
    from zaya_plugin.model.config import ZayaConfig

    config = ZayaConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=16,
        ffn_hidden_size=96,
        moe_ffn_hidden_size=96,
        num_moe_experts=4,
        router_hidden_size=32,
        use_cpu_initialization=True,
        calculate_per_token_loss=True,
        params_dtype=torch.bfloat16,
        bf16=True,
        **options,
    )
    model = build_zaya_model(config, vocab_size=VOCABULARY, max_sequence_length=LENGTH).train()
    for parameter in model.parameters():  # as under Megatron's DDP, which the fused gradients ask for
        parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros(parameter.shape), False
    return model


def kept_bytes(model) -> int:
    """Bytes of all tensors that the graph of a forward pass holds, each storage once; parameters, their gradients and
    the batch left out.
    """
    ids = torch.randint(1, VOCABULARY, (SIZE, LENGTH))
    labels, mask = torch.randint(1, VOCABULARY, (SIZE, LENGTH)), torch.ones(SIZE, LENGTH)
    positions = torch.arange(LENGTH).expand(SIZE, -1)

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor

    saved = []

    def pack(tensor):
        held = Held(tensor)
        saved.append(weakref.ref(held))  # a node that goes takes what it holds with it
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        loss = (model(ids, positions, None, labels=labels, loss_mask=mask) * mask).sum()
    tensors = [held.tensor for ref in saved if (held := ref()) is not None]
    nodes, seen = [loss.grad_fn], set()
    while nodes:  # what functions keep in addition to their saved tensors
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [other for other, _ in node.next_functions]
        for value in getattr(node, "__dict__", {}).values():
            values = (
                vars(value).values()
                if hasattr(value, "__dataclass_fields__")
                else value
                if isinstance(value, (tuple, list))
                else [value]
            )
            tensors += [each for each in values if isinstance(each, torch.Tensor)]
    outside = [ids, labels, mask, positions, *model.buffers()]
    outside += [each for parameter in model.parameters() for each in (parameter, parameter.main_grad)]
    known = {tensor.untyped_storage().data_ptr() for tensor in outside}
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(size for pointer, size in storages.items() if pointer not in known)


def planned_bytes(recompute: Recompute, shape: Shape = SHAPE) -> float:
    layout = ParallelSizes()
    return layers_bytes(shape, layout, BATCH, recompute, LAYERS) + ends_bytes(shape, layout, BATCH)


MODULES = (
    (),
    ("layernorm",),
    ("core_attn",),
    ("layernorm", "permute"),
    ("layernorm", "moe", "core_attn"),
    ("permute",),  # a difference of two above, as the next
    ("moe",),
)


@pytest.mark.first_cases(5)
@pytest.mark.parametrize("modules", MODULES, ids=lambda modules: "_".join(modules) or "nothing")
def test_the_plan_counts_what_the_model_keeps(modules):
    options = dict(recompute_granularity="selective", recompute_modules=list(modules)) if modules else {}
    counted, planned = kept_bytes(build(**options)), planned_bytes(Recompute(frozenset(modules)))
    print(f"{modules}: planned {planned:,.0f}, counted {counted:,.0f} bytes, {planned / counted - 1:+.2%}")
    assert planned == pytest.approx(counted, rel=0.005)


def test_layer_norm_keeps_a_mean_besides():
    planned = [planned_bytes(Recompute(), replace(SHAPE, normalization=name)) for name in ("RMSNorm", "LayerNorm")]
    assert planned[1] - planned[0] == (2 * LAYERS + 1) * 4 * SIZE * LENGTH
    assert planned[1] == pytest.approx(kept_bytes(build(normalization="LayerNorm")), rel=0.005)


def test_adapters_keep_their_inner_products():
    """Not counted in the plan: A of four projections as one matrix; and that no frozen vector needs the first and the last
    stream and the last output.
    """
    counted = kept_bytes(build(lora_rank=16, lora_targets=["attention", "experts"]))
    planned = planned_bytes(Recompute(), replace(SHAPE, lora_rank=16, lora_targets=("attention", "experts")))
    assert planned - planned_bytes(Recompute()) == LAYERS * 7 * 16 * 2 * SIZE * LENGTH
    assert planned - counted == (2 * 4 + 2) * 64 * SIZE * LENGTH - LAYERS * 4 * 16 * 64 * 2


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "method"), [(1, "uniform"), (2, "uniform"), (1, "block")])
def test_layers_that_are_recomputed_whole(layers, method):
    model = build(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)
    recompute = Recompute(full_layers=LAYERS, unit=layers) if method == "uniform" else Recompute(full_layers=layers)
    counted, planned = kept_bytes(model), planned_bytes(recompute)
    print(f"{method} {layers}: planned {planned:,.0f}, counted {counted:,.0f} bytes, {planned / counted - 1:+.2%}")
    assert planned == pytest.approx(counted, rel=0.005)

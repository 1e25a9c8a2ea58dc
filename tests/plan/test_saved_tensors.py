# SPDX-License-Identifier: Apache-2.0
"""What the model keeps for its backward pass, counted tensor by tensor, beside zaya_plugin.plan.memory.

On an accelerator the functions between matrix products are compiled, and what they keep is the compiler's choice. Here the same partitioner
makes that choice on the CPU, without making kernels.
"""

import importlib
import sys
import weakref
from dataclasses import replace

import pytest
import torch

from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.memory import Kernels, Recompute, ends_bytes, layers_bytes
from zaya_plugin.plan.parallelism import Batch, Layout

LAYERS, SIZE, LENGTH, VOCABULARY = 2, 2, 64, 512
SHAPE = Shape(LAYERS, 64, 4, 2, 16, 4, 96, 32, VOCABULARY)
BATCH = Batch(LENGTH, SIZE)


@pytest.fixture(autouse=True)
def compiled(monkeypatch):
    """The model's fused functions as an accelerator would have them, partitioned for the backward pass and then run as they are."""
    importlib.import_module(
        "zaya_plugin.model.build"
    )  # with it every module of the model, some of which have taken functions from others
    from zaya_plugin.model import loss

    torch._dynamo.reset()  # other tests of this process may have used up its limit of versions a function
    made = {}
    for module in [module for name, module in sys.modules.items() if name.startswith("zaya_plugin.model.")]:
        for name, function in list(vars(module).items()):
            plain = getattr(function, "__wrapped__", None)
            if (
                plain is not None
                and hasattr(function, "__code__")
                and "fused_on_accelerator" in function.__code__.co_qualname
            ):
                made.setdefault(plain, torch.compile(plain, dynamic=False, backend="aot_eager_decomp_partition"))
                monkeypatch.setattr(module, name, made[plain])
    # The loss that an accelerator gets; Megatron's is for a CPU.
    monkeypatch.setattr(
        loss.ZayaGPTModel,
        "compute_language_model_loss",
        lambda self, labels, logits: loss.cross_entropy(logits, labels),
    )
    return made


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
    """Bytes of all tensors that the graph of a forward pass holds, each storage once; parameters, their gradients and the batch left out."""
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
    while nodes:  # what functions keep beside their saved tensors
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


def planned_bytes(kernels: Kernels, recompute: Recompute) -> float:
    layout = Layout()
    return layers_bytes(SHAPE, layout, BATCH, kernels, recompute, LAYERS) + ends_bytes(SHAPE, layout, BATCH, kernels)


ALL = Kernels()
CASES = {
    "fused": (ALL, ()),
    "residual_norm": (replace(ALL, residual_norm=False), ()),
    "prologue": (replace(ALL, prologue=False), ()),
    "experts": (replace(ALL, experts=False), ()),
    "head": (replace(ALL, head=False), ()),
    "router": (replace(ALL, router=True), ()),
    "router_selective": (replace(ALL, router=True), ("layernorm", "permute")),
    "layernorm": (ALL, ("layernorm",)),
    "permute": (ALL, ("permute",)),
    "permute_experts": (replace(ALL, experts=False), ("permute",)),
    "moe": (ALL, ("moe",)),
    "core_attn": (ALL, ("core_attn",)),
    "selective": (ALL, ("layernorm", "moe", "core_attn")),
}


QUICK = ("fused", "router", "layernorm", "permute", "core_attn")  # the others compile further functions


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in QUICK)) for case in CASES])
def test_the_plan_counts_what_the_model_keeps(case):
    kernels, modules = CASES[case]
    options = dict(recompute_granularity="selective", recompute_modules=list(modules)) if modules else {}
    model = build(
        fused_residual_norm=kernels.residual_norm,
        fused_cca_prologue=kernels.prologue,
        fused_expert_path=kernels.experts,
        fused_linear_cross_entropy=kernels.head,
        fused_router=kernels.router,
        **options,
    )
    counted, planned = kept_bytes(model), planned_bytes(kernels, Recompute(frozenset(modules)))
    print(f"{case}: planned {planned:,.0f}, counted {counted:,.0f} bytes, {planned / counted - 1:+.2%}")
    assert planned == pytest.approx(counted, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "method"), [(1, "uniform"), (2, "uniform"), (1, "block")])
def test_layers_that_are_recomputed_whole(layers, method):
    model = build(
        fused_residual_norm=True,
        fused_cca_prologue=True,
        fused_expert_path=True,
        fused_linear_cross_entropy=True,
        recompute_granularity="full",
        recompute_method=method,
        recompute_num_layers=layers,
    )
    recompute = Recompute(full_layers=LAYERS, unit=layers) if method == "uniform" else Recompute(full_layers=layers)
    counted, planned = kept_bytes(model), planned_bytes(ALL, recompute)
    print(f"{method} {layers}: planned {planned:,.0f}, counted {counted:,.0f} bytes, {planned / counted - 1:+.2%}")
    assert planned == pytest.approx(counted, rel=0.005)

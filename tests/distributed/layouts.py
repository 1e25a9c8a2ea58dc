# SPDX-License-Identifier: Apache-2.0
"""The grid of parallel layouts: ranks and recipe overrides of each, and which of them `make test` runs."""

from __future__ import annotations

from dataclasses import dataclass

SIZES = {
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "stages": "virtual_pipeline_stages",
}


@dataclass(frozen=True)
class Layout:
    """One layout: `ranks` processes that run the recipe with `overrides`."""

    name: str
    ranks: int
    overrides: tuple[str, ...]


def layout(name: str, ranks: int, *extra: str, **sizes: int) -> Layout:
    """A layout by its sizes, such as layout("cp2ep2", 2, cp=2, ep=2); ranks that are left are data-parallel."""
    return Layout(name, ranks, (*(f"parallel.{SIZES[key]}={size}" for key, size in sizes.items()), *extra))


FULL = ("parallel.recompute_granularity=full", "parallel.recompute_method=uniform", "parallel.recompute_num_layers=1")
SELECTIVE = ("parallel.recompute_granularity=selective", "parallel.recompute_modules=[core_attn,moe,layernorm]")
OVERLAP = ("parallel.overlap_grad_reduce=true", "parallel.overlap_param_gather=true")
TWO_OPTIMIZERS = "parallel.num_distributed_optimizer_instances=2"
ONE = layout("one", 1)

# In `make test`: every kind, two of them in one layout.
QUICK = (layout("dp2", 2), layout("cp2ep2", 2, cp=2, ep=2), layout("tp2", 2, tp=2), layout("pp2", 2, pp=2))

# In `make test-all` besides.
SLOW = (
    layout("cp2", 2, cp=2),
    layout("ep2", 2, ep=2),
    layout("dp2-overlap", 2, *OVERLAP),
    layout("cp4", 4, cp=4),
    layout("cp2-contiguous", 2, "parallel.context_parallel_order=contiguous", cp=2),
    layout("ep4", 4, ep=4),
    layout("ep8", 8, "stage.micro_batch_size=1", ep=8),
    layout("ep2-allgather", 2, "parallel.moe_token_dispatcher=allgather", ep=2),
    layout("pp4", 4, pp=4),
    layout("pp2-interleaved", 2, pp=2, stages=2),
    layout("pp2dp2-overlap", 4, *OVERLAP, pp=2),
    layout("pp2-interleaved-dp2-overlap", 4, *OVERLAP, pp=2, stages=2),
    layout("pp2ep2", 4, pp=2, ep=2),
    layout("pp2cp2", 4, pp=2, cp=2),
    layout("tp2pp2", 4, tp=2, pp=2),
    layout("tp2cp2", 4, tp=2, cp=2),
    layout("tp2ep2", 2, tp=2, ep=2),
    layout("dp4-two_optimizers", 4, TWO_OPTIMIZERS),
    layout("dp4-two_optimizers-overlap", 4, TWO_OPTIMIZERS, *OVERLAP),
    layout("cp2ep2-two_optimizers-overlap", 4, TWO_OPTIMIZERS, *OVERLAP, cp=2, ep=2),
)
BY_NAME = {each.name: each for each in QUICK + SLOW}

# Full and selective recomputation in each kind.
RECOMPUTED = tuple(
    Layout(f"{name}-{kind}", BY_NAME[name].ranks, (*BY_NAME[name].overrides, *overrides))
    for name in ("cp2", "ep2", "tp2", "pp2")
    for kind, overrides in (("full", FULL), ("selective", SELECTIVE))
) + (layout("pp2-interleaved-full", 2, *FULL, pp=2, stages=2), layout("tp2pp2-full", 4, *FULL, tp=2, pp=2))

# Several documents in a sequence, each as if it were alone; RoPE counts from its start. Every second layer has a sliding
# window, the others see their whole document.
WINDOWS = ("model.sliding_window=3", "model.window_attn_skip_freq=2", "model.swa_rotary_base=500")
PACKED = ("data.packing=documents", "data.reset_position_ids=true", *WINDOWS)

# Documents change attention, positions and what travels between pipeline stages: the layouts that divide sequences or
# layers, and one of each other kind.
PACKED_LAYOUTS = QUICK + tuple(
    layout
    for layout in SLOW + RECOMPUTED
    if "cp" in layout.name or layout.name in ("ep2", "pp2-interleaved", "tp2pp2", "pp2-full", "pp2-selective")
)

# ZAYA1-74B made small: 24 experts and the skip class, eight query heads a key/value head, windows of 8 previous tokens in
# layers 0 and 2.
OF_74B = (
    "model.num_experts=24",
    "model.num_attention_heads=16",
    "model.sliding_window=8",
    "model.window_attn_skip_freq=2",
)
LAYOUTS_OF_74B = (layout("ep4", 4, ep=4), layout("cp2ep4", 4, cp=2, ep=4))

# Adapters on a frozen base.
ADAPTERS = (
    "optim.lora.rank=8",
    "optim.lora.alpha=16",
    "optim.lora.targets=[attention,experts,router]",
    "optim.lr=2e-3",  # with 1e-2 rounding of the first step grows tenfold by the third, on some CPUs beyond the bound
)
ADAPTER_LAYOUTS = tuple(each for each in QUICK + RECOMPUTED if "tp2" not in each.name) + tuple(
    each for each in SLOW if each.name in ("cp2", "ep2", "dp2-overlap", "ep2-allgather", "pp2ep2")
)

# With every rank's optimizer state whole; one rank is run the same way, since the two kinds of checkpoints differ.
PLAIN_OPTIMIZER = "parallel.use_distributed_optimizer=false"
PLAIN = tuple(BY_NAME[name] for name in ("dp2", "cp2", "ep2", "tp2", "pp2"))

# SPDX-License-Identifier: Apache-2.0
"""Kernels for ZAYA1 that need only torch: norms, the CCA prologue, router, experts, linear + cross-entropy, Muon and
Newton-Schulz.

Public names are imported at first use, so that `import hip_ops` is fast and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # EXPORTS, for editors and type checkers
    from hip_ops.ops.cca_prologue import cca_prologue as cca_prologue, rope_table as rope_table
    from hip_ops.ops.embedding_gradient import add_rows_ as add_rows_
    from hip_ops.ops.expert_permutation import (
        permute_to_experts as permute_to_experts,
        sort_by_expert as sort_by_expert,
        unpermute_from_experts as unpermute_from_experts,
    )
    from hip_ops.ops.grouped_product import grouped_outer_ as grouped_outer_, grouped_rows as grouped_rows
    from hip_ops.ops.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
    from hip_ops.ops.muon import (
        MatrixBatches as MatrixBatches,
        muon_momentum_ as muon_momentum_,
        muon_update_ as muon_update_,
    )
    from hip_ops.ops.newton_schulz import newton_schulz as newton_schulz
    from hip_ops.ops.rms_norm import (
        add_layer_norm as add_layer_norm,
        add_rms_norm as add_rms_norm,
        affine as affine,
        affine_layer_norm as affine_layer_norm,
        affine_rms_norm as affine_rms_norm,
        layer_norm as layer_norm,
        rms_norm as rms_norm,
        scale_residual as scale_residual,
        scaled_residual_layer_norm as scaled_residual_layer_norm,
        scaled_residual_rms_norm as scaled_residual_rms_norm,
    )
    from hip_ops.ops.router_mlp import (
        RouterParameters as RouterParameters,
        router_mlp as router_mlp,
        router_mlp_backward as router_mlp_backward,
    )
    from hip_ops.ops.weighted_swiglu import (
        weighted_swiglu as weighted_swiglu,
        weighted_swiglu_backward as weighted_swiglu_backward,
    )
    from hip_ops.runtime.compiled import formula as formula
    from hip_ops.runtime.launch import wide as wide
    from hip_ops.runtime.operator import warm_up as warm_up
    from hip_ops.versions import set_kernels as set_kernels, use_kernels as use_kernels

# public name -> the module that defines it
EXPORTS = {
    "rms_norm": "ops.rms_norm",
    "affine": "ops.rms_norm",
    "affine_rms_norm": "ops.rms_norm",
    "layer_norm": "ops.rms_norm",
    "affine_layer_norm": "ops.rms_norm",
    "scale_residual": "ops.rms_norm",
    "add_rms_norm": "ops.rms_norm",
    "scaled_residual_rms_norm": "ops.rms_norm",
    "add_layer_norm": "ops.rms_norm",
    "scaled_residual_layer_norm": "ops.rms_norm",
    "cca_prologue": "ops.cca_prologue",
    "rope_table": "ops.cca_prologue",
    "muon_momentum_": "ops.muon",
    "muon_update_": "ops.muon",
    "MatrixBatches": "ops.muon",
    "newton_schulz": "ops.newton_schulz",
    "sort_by_expert": "ops.expert_permutation",
    "permute_to_experts": "ops.expert_permutation",
    "unpermute_from_experts": "ops.expert_permutation",
    "grouped_rows": "ops.grouped_product",
    "grouped_outer_": "ops.grouped_product",
    "weighted_swiglu": "ops.weighted_swiglu",
    "weighted_swiglu_backward": "ops.weighted_swiglu",
    "RouterParameters": "ops.router_mlp",
    "router_mlp": "ops.router_mlp",
    "router_mlp_backward": "ops.router_mlp",
    "linear_cross_entropy": "ops.linear_cross_entropy",
    "add_rows_": "ops.embedding_gradient",
    "wide": "runtime.launch",
    "formula": "runtime.compiled",
    "set_kernels": "versions",
    "use_kernels": "versions",
    "warm_up": "runtime.operator",
}
__all__ = list(EXPORTS)


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted((*globals(), *EXPORTS))

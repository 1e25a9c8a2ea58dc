# SPDX-License-Identifier: Apache-2.0
"""Kernels for ZAYA1 that need only torch: norms, the CCA prologue, router, experts, linear + cross-entropy, Muon and
Newton-Schulz.

Public names are imported at first use, so that `import hip_ops` is fast and needs no torch.
"""

import importlib

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
    "MatrixBatches": "ops.muon.matrix_batches",
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
    "wide": "runtime.declaration",
    "formula": "runtime.compiled",
    "set_kernels": "runtime.selection",
    "use_kernels": "runtime.selection",
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

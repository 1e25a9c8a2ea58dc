# SPDX-License-Identifier: Apache-2.0
"""Kernels for ZAYA1 that need only torch: norms, the CCA prologue, router, experts, linear + cross-entropy, Muon and
Newton-Schulz.

Public names are imported at first use, so that `import hip_ops` is fast and needs no torch.
"""

import importlib
import sys
from types import ModuleType

# public name -> the module that defines it
EXPORTS = {
    "rms_norm": "rms_norm",
    "affine": "rms_norm",
    "affine_rms_norm": "rms_norm",
    "layer_norm": "rms_norm",
    "affine_layer_norm": "rms_norm",
    "scale_residual": "rms_norm",
    "add_rms_norm": "rms_norm",
    "scaled_residual_rms_norm": "rms_norm",
    "add_layer_norm": "rms_norm",
    "scaled_residual_layer_norm": "rms_norm",
    "cca_prologue": "cca_prologue",
    "rope_table": "cca_prologue",
    "muon_momentum_": "muon",
    "muon_update_": "muon",
    "MatrixBatches": "muon.matrix_batches",
    "newton_schulz": "newton_schulz",
    "sort_by_expert": "expert_permutation",
    "permute_to_experts": "expert_permutation",
    "unpermute_from_experts": "expert_permutation",
    "grouped_rows": "grouped_product",
    "grouped_outer_": "grouped_product",
    "weighted_swiglu": "weighted_swiglu",
    "weighted_swiglu_backward": "weighted_swiglu",
    "router_mlp": "router_mlp",
    "router_mlp_backward": "router_mlp",
    "linear_cross_entropy": "linear_cross_entropy",
    "add_rows_": "embedding_gradient",
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


class _Package(ModuleType):
    """Keeps a public function where Python would replace it by the submodule of the same name, after the import of that
    submodule.
    """

    def __setattr__(self, name: str, value) -> None:
        if not (name in EXPORTS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

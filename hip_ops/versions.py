# SPDX-License-Identifier: Apache-2.0
"""The operators and the versions that each has, best first. Needs no torch: recipes are checked against it.

A new version is one name here and one file `hip_ops/<operator>/<name>.py` with functions named like those of reference.py.
`compiled` is torch.compile of the reference and needs no file. Every operator also has the version `reference`.
"""

VERSIONS = {
    "rms_norm": ("hip", "triton", "compiled"),
    "cca_prologue": ("hip", "triton", "compiled"),
    "router_mlp": ("triton", "compiled"),
    "expert_permutation": ("hip", "triton", "compiled"),
    "weighted_swiglu": ("hip", "triton", "compiled"),
    "grouped_product": ("quack", "triton", "grouped_mm"),
    "newton_schulz": ("hip", "quack", "triton"),
    "muon": ("hip", "triton"),
    "linear_cross_entropy": ("hip", "triton", "compiled"),
    "embedding_gradient": ("hip", "triton"),
}
# Versions that multiply 16-bit matrices only: calls in fp32 run another version. Of newton_schulz by its argument dtype.
NO_FP32 = {
    "cca_prologue": ("hip",),
    "router_mlp": ("triton",),
    "grouped_product": ("quack", "triton", "grouped_mm"),
    "newton_schulz": ("hip", "quack", "triton"),
}
KERNELS = ("auto", "hip", "triton", "compiled", "reference")  # of which one is asked for all operators


def check_selection(kernels: str, overrides: dict[str, str], group: str = "") -> None:
    """Raises ValueError that names the key, the value and what is allowed. group: of both keys in messages, such as "cluster."."""
    if kernels not in KERNELS:
        allowed = ", ".join(KERNELS)
        raise ValueError(f"{group}kernels={kernels!r}: no such version. Allowed: {allowed}. Fix: {group}kernels=auto")
    for operator, version in overrides.items():
        key = f"{group}kernel_overrides.{operator}"
        if operator not in VERSIONS:
            raise ValueError(f"{key}={version!r}: no such operator. Allowed: {', '.join(VERSIONS)}. Fix: remove it")
        allowed = ("auto", *VERSIONS[operator], "reference")
        if version not in allowed:
            raise ValueError(f"{key}={version!r}: no such version. Allowed: {', '.join(allowed)}. Fix: {key}=auto")

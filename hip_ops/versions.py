# SPDX-License-Identifier: Apache-2.0
"""The operators and the versions that each has, best first. Needs no torch: recipes are checked against it.

A new version is one name here and one file `hip_ops/ops/<operator>/<name>.py` with functions named like those of
reference.py. `compiled` is torch.compile of the reference and needs no file. Every operator also has the version
`reference`.
"""

from hip_ops.errors import mistake

VERSIONS = {
    "rms_norm": ("hip", "triton", "compiled"),
    "cca_prologue": ("hip", "triton", "compiled"),
    "router_mlp": ("triton", "compiled"),
    "expert_permutation": ("hip", "triton", "compiled"),
    "weighted_swiglu": ("hip", "triton", "compiled"),
    "grouped_product": ("quack", "triton", "grouped_mm", "aiter"),
    "newton_schulz": ("hip", "quack", "triton"),
    "muon": ("hip", "triton"),
    "linear_cross_entropy": ("hip", "triton", "compiled"),
    "embedding_gradient": ("hip", "triton"),
}
# Versions that multiply 16-bit matrices only: calls in fp32 run another version. For newton_schulz its argument `dtype`
# counts.
NO_FP32 = {
    "cca_prologue": ("hip",),
    "router_mlp": ("triton",),
    "grouped_product": ("quack", "triton", "grouped_mm", "aiter"),
    "newton_schulz": ("hip", "quack", "triton"),
}
# Versions that this project has run on no device. Only a request by name takes them; one that fails its self-check is
# skipped with a warning there too, because the request could not know it.
NOT_RUN = ("aiter",)
# Versions that may sum in another order at every call. All others give the same bits, which the self-check compares.
ANY_ORDER = ("aiter",)
KERNELS = ("auto", "hip", "triton", "compiled", "reference")  # what can be requested for all operators


def check_selection(kernels: str, overrides: dict[str, str], group: str = "") -> None:
    """Raise ValueError for unknown names. group: the prefix of both keys in messages, such as "cluster."."""
    if kernels not in KERNELS:
        raise mistake(f"{group}kernels={kernels}", "no such version", ", ".join(KERNELS), f"{group}kernels=auto")
    for operator, version in overrides.items():
        key = f"{group}kernel_overrides.{operator}"
        if operator not in VERSIONS:
            raise mistake(f"{key}={version}", "no such operator", ", ".join(VERSIONS), "remove it")
        allowed = ("auto", *VERSIONS[operator], "reference")
        if version not in allowed:
            raise mistake(f"{key}={version}", "no such version", ", ".join(allowed), f"{key}=auto")


def read_selection(text: str) -> tuple[str, dict[str, str]]:
    """Return the version for all operators and those for single ones in a text such as `auto,router_mlp=compiled`.
    Raises ValueError for unknown names."""
    kernels, *entries = (part.strip() for part in text.split(","))
    overrides = dict(entry.partition("=")[::2] for entry in entries)
    check_selection(kernels, overrides)
    return kernels, overrides

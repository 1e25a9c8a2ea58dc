# SPDX-License-Identifier: Apache-2.0
"""The sizes of the model whose kernels the self-checks run. Triton compiles other code, and HIP's launchers choose other
kernels, for another hidden size, number of experts or group of heads.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelSizes:
    """Of one rank; the defaults are ZAYA1-base's on one device. num_experts: of the rank, by expert parallelism; classes:
    of the router, all experts and the skip class; heads and groups: of the rank, by tensor parallelism.
    """

    hidden_size: int = 2048
    moe_ffn_hidden_size: int = 2048
    num_experts: int = 16
    classes: int = 17
    num_attention_heads: int = 8
    num_query_groups: int = 2


_current = ModelSizes()


def model_sizes() -> ModelSizes:
    """Return the sizes that the operators' examples have."""
    return _current


def set_model_sizes(sizes: ModelSizes) -> None:
    """Set the sizes that the operators' examples have. Operators that were checked before are not checked again."""
    global _current
    _current = sizes

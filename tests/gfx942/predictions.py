# SPDX-License-Identifier: Apache-2.0
"""Times that derived figures predict for an MI300X. None of these was measured on one: every result says so."""

from collections.abc import Mapping
from dataclasses import dataclass

from hip_ops.runtime.tile_choice import COMPUTE_UNITS
from tests.gfx942.inner_loop import CYCLES_A_PASS, mfma_passes

HBM_BYTES_A_SECOND = 4.33e12  # sustained, of a peak of 5.3e12
BF16_FLOPS_A_SECOND = 600e12  # of large products, as recipes/cluster/mi300x_8.yaml; the peak is 1307e12
CYCLES_A_SECOND = 2.1e9
SIMDS = 4 * COMPUTE_UNITS["gfx942"]
MFMA_FLOPS = {"32x32x8": 2 * 32 * 32 * 8, "16x16x16": 2 * 16 * 16 * 16}
MFMA_FLOPS |= {"32x32x16": 2 * 32 * 32 * 16, "16x16x32": 2 * 16 * 16 * 32}  # gfx950


@dataclass(frozen=True)
class Prediction:
    """Seconds by memory and by matrix pipe; the larger bounds the kernel when both overlap fully."""

    memory_seconds: float
    matrix_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.matrix_seconds)

    @property
    def bound_by(self) -> str:
        return "memory" if self.memory_seconds >= self.matrix_seconds else "matrix"

    def __str__(self) -> str:
        return (
            f"{self.seconds * 1e6:.1f} us, bound by {self.bound_by} (prediction for MI300X from bytes and flops, not "
            "measured)"
        )


def predict(global_bytes: float, mfma_flops: float = 0.0) -> Prediction:
    """global_bytes moved to and from HBM, mfma_flops executed (multiply and add count as two)."""
    if global_bytes < 0 or mfma_flops < 0:
        raise ValueError(f"global_bytes={global_bytes}, mfma_flops={mfma_flops}: both must be at least 0")
    return Prediction(global_bytes / HBM_BYTES_A_SECOND, mfma_flops / BF16_FLOPS_A_SECOND)


def instruction_seconds(per_opcode: Mapping[str, float], overlap: bool) -> float:
    """Seconds of a launch's wave instructions, the same number on every SIMD: the MFMAs' passes, and an issue slot for
    any other. overlap: whether MFMAs of one wave hide the other instructions of another one, as the second wave of a
    SIMD allows; otherwise one comes after the other.
    """
    matrix = sum(mfma_passes(name) * count for name, count in per_opcode.items() if name.startswith("v_mfma"))
    others = sum(count for name, count in per_opcode.items() if not name.startswith("v_mfma"))
    slots = max(matrix, others) if overlap else matrix + others
    return CYCLES_A_PASS * slots / SIMDS / CYCLES_A_SECOND


def predict_from_counters(counters) -> Prediction:
    """From what a launch in the emulator counted: distinct bytes (each moved once, caches hold the rest) and MFMAs."""
    flops = sum(
        count * next(flops for shape, flops in MFMA_FLOPS.items() if shape in name)
        for name, count in counters.mfma_by_opcode.items()
    )
    return predict(counters.distinct_load_bytes + counters.distinct_store_bytes, flops)

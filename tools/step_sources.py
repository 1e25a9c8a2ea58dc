# SPDX-License-Identifier: Apache-2.0
"""Share out the time of a predicted step by the source of its kernels.

A record of `zaya bench step` has the longest kernels of each part by name, and a name gives the kernel's source: an
operator of hip_ops, or the job of a library. `by_source` carries the shares inside each part over to a prediction of
`zaya plan run`; there another version of the operator, or another library with the same job, takes the kernel's
place. The result for 8 MI300X is zaya_plugin/bench/mi300x_step.json, which is written by

    ZAYA_UPDATE_GOLDEN=1 python -m pytest tests/bench/test_step_code.py
"""

import re
from collections import Counter
from collections.abc import Mapping

from zaya_plugin.bench.step_code import TORCH, UNLISTED
from zaya_plugin.plan.step_source import PARTS_WITHOUT_COLLECTIVES

# Names of kernels -> their source: a folder of hip_ops/ops, or the job of a library; the first row that matches counts.
SOURCES = tuple(
    (re.compile(pattern, re.IGNORECASE), source)
    for pattern, source in (
        (r"^triton_(poi|per|red|tem|for)_", "formulas"),
        (r"grouped_|quack.*gemm", "grouped_product"),
        (r"rms_norm_\w*kernel|^ho_\w*(rms|layer)_norm", "rms_norm"),
        (r"cca_prologue", "cca_prologue"),
        (r"router_mlp", "router_mlp"),
        (r"expert_\w*kernel|^ho_(expert|gather_rows)_", "expert_permutation"),
        (r"weighted_swiglu", "weighted_swiglu"),
        (r"row_(gradient|statistics)_|exponentials_kernel|finish_gradient|^ho_overwrite_with_", "linear_cross_entropy"),
        (r"symmetric_product|pointer_product|^normalise_kernel|^ho_(symmetric|general|start)_", "newton_schulz"),
        (r"muon_", "muon"),
        (r"(add|join)_runs", "embedding_gradient"),
        (r"add_gradient_", "gradient_addition"),
        (r"cudnn|flash|fmha|sdpa|attn", "attention"),
        (r"nvjet|cublas|cutlass|gemm|splitK|^Cijk_", "matrix products"),
        (r"^nccl|ncclDevKernel|rccl|Memcpy PtoP", "collectives"),
    )
)


def source_of(kernel: str) -> str:
    """Return the source of a kernel by its name in a trace."""
    return next((source for pattern, source in SOURCES if pattern.search(kernel)), TORCH)


def shares_of(row: Mapping) -> dict[str, float]:
    """Return the share of each source in the time of a record's part; they add up to 1."""
    times: Counter[str] = Counter()
    for kernel in row["longest"]:
        times[source_of(kernel["name"])] += kernel["ms"]
    whole = max(row["ms"], sum(times.values()))  # kernels that run at once add up to more than the part
    times[UNLISTED] = whole - sum(times.values())
    return {source: ms / whole for source, ms in times.items()}


def by_source(result: Mapping, record: Mapping) -> dict[str, float]:
    """Return the milliseconds of a predicted step by source, the longest first; they add up to the step.

    result: of `prediction.predict` from `record`, as JSON values. What has no part in the record (kernels slowed by collectives, recomputation) is
    spread over the kernels of the passes.
    """
    shares = {row["part"]: shares_of(row) for row in record["parts"] if row["ms"]}
    times: Counter[str] = Counter()
    passes: Counter[str] = Counter()
    spread = 0.0
    for row in result["parts"]:
        if row["part"] not in shares:
            spread += row["ms"]
            continue
        for source, share in shares[row["part"]].items():
            times[source] += row["ms"] * share
            if row["part"] not in PARTS_WITHOUT_COLLECTIVES:
                passes[source] += row["ms"] * share
    whole = sum(passes.values())
    for source, ms in passes.items():
        times[source] += spread * ms / whole
    times["collectives"] += result["step"]["exposed_communication_ms"]
    return dict(times.most_common())


def to_store(result: Mapping, record: Mapping) -> dict:
    """Return what `zaya_plugin.bench.step_code.stored` reads, in hundredths of a millisecond."""
    times = {source: round(ms, 2) for source, ms in by_source(result, record).items()}
    return {
        "prediction": True,
        "from": {name: result["from"][name] for name in ("device", "date", "commit")},
        "on": {name: result["on"][name] for name in ("cluster", "devices")},
        "step_ms": round(result["step"]["ms"], 2),
        "ms": times,
    }

# SPDX-License-Identifier: Apache-2.0
"""Rules over a recipe, before an hour of a device is spent: sizes, memory, products, links, layout, hazards of many
ranks, checkpoints. No torch import.

A rule is a row of RULES (zaya_plugin.plan.setting has its form): what it looks at, why, a source, and the changes that
may help. A change is named if it is valid and fits into memory; its effect is the difference of two predictions. A rule
about speed has a finding only where its best change gains MIN_GAIN.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import ceil, gcd, inf

from zaya_plugin.config.schedule import step_count
from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.ground.durations import duration
from zaya_plugin.plan.bucket_plan import with_bucket_plan
from zaya_plugin.plan.memory import tokens_of_rank
from zaya_plugin.plan.parallelism import sent_bytes
from zaya_plugin.plan.product_rate import processor_of
from zaya_plugin.plan.products import products
from zaya_plugin.plan.recipe_plan import GIB, RESERVED_SHARE
from zaya_plugin.plan.setting import DOES_NOT_FIT, MIN_GAIN, Rule, Setting, Values

MIN_TILE_GAIN = 0.03  # of the matrix units' rate
# Of a run's time, lost to failures and saves beyond the least loss: for a finding, and with the interval that it names,
# which needs fewer checkpoints than the least loss.
MIN_RUN_SHARE, AMPLE_RUN_SHARE = 0.0025, 0.001
SATURATION_FLOPS, SATURATED_TFLOPS = 200e9, 600.0  # of a product on an MI300X, and the rate there of a large one
MANY_RANKS, MANY_RANKS_MINUTES, LINK_SECONDS = 256, 30, 60.0
SAVE_INTERVALS = sorted(round(n * 10**k) for n in (1, 1.5, 2, 3, 5, 7) for k in range(1, 6))  # steps that are named
NO_RECOMPUTE = {
    "parallel.recompute_granularity": None,
    "parallel.recompute_method": None,
    "parallel.recompute_num_layers": None,
    "parallel.recompute_modules": [],
}
AUTO_RECOMPUTE = {**NO_RECOMPUTE, "parallel.recompute_granularity": "auto"}
ROCM_BLOG = "sizing rules of the ROCm blog on ZAYA1, November 2025"
QUOTED = "AMD, arXiv 2511.17127, as others quote it"
TILE_MODEL = "`zaya_plugin/plan/product_rate.py`, errors in docs/predictions.md"


def _memory(problem: str, least: float, most: float, setting: Setting) -> str | bool:
    gib = (
        {name: size / GIB for name, size in setting.prediction.memory.components.items()}
        if setting.memory_share
        else {}
    )
    largest = max(gib, key=gib.__getitem__, default="")
    return least < setting.memory_share <= most and (
        f"the step {problem}: {sum(gib.values()):,.1f} of {setting.recipe.cluster.memory_gib:g} GiB of a device, "
        f"{gib[largest]:,.1f} of them for {largest}"
    )


def _less_memory(setting: Setting) -> list[Values]:
    size, experts = setting.recipe.stage.micro_batch_size, setting.recipe.parallel.expert_model_parallel_size
    smaller = [{"stage.micro_batch_size": size // n} for n in (2, 4, 8, 16, 32, 64) if size % n == 0]
    recomputed = [AUTO_RECOMPUTE, *({**AUTO_RECOMPUTE, **values} for values in smaller)]
    shared = [{**recomputed[-1], "parallel.expert_model_parallel_size": experts * n} for n in (2, 4, 8)]
    changes = ((values, setting.changed(values)) for values in (AUTO_RECOMPUTE, *smaller, *recomputed, *shared))
    return [values for values, after in changes if after and after.memory_share <= 1 - RESERVED_SHARE]


def _unaligned(setting: Setting, size: int, what: str) -> str | bool:
    return size % setting.unit > 0 and f"{what}, a multiple of {size & -size} and not of {setting.unit}"


def _padding(setting: Setting, size: int) -> str:
    loaded = gcd(setting.batch.dtype_bytes * size, 16)
    narrow = f", a row of {size:,} numbers is loaded {loaded} bytes at a time instead of 16" if loaded < 16 else ""
    return f"{1 - size / (ceil(size / setting.unit) * setting.unit):.1%} of the tiles are padding{narrow}"


def _near(size: int, steps: Iterable[int], share: float) -> list[int]:
    """Return multiples of the steps within a share of a size, the nearest first."""
    least, most = (1 - share) * size, (1 + share) * size
    numbers = {n * step for step in steps for n in range(1, int(most / step) + 1) if n * step >= least}
    return sorted(numbers, key=lambda n: (abs(n - size), -n))


def _width(name: str) -> Rule:
    key = f"model.{name}"

    def options(setting: Setting) -> list[Values]:
        size, unit = get(setting.recipe, key), setting.unit
        near = [{key: n} for n in _near(size, (unit, 2 * unit, 4 * unit), 0.1)]
        return near or [{key: ceil(size / unit) * unit}]

    return Rule(
        name,
        "sizes of the model, by powers of two up to 64 (on a CPU by lines of 64 bytes)",
        "partial tiles and narrow loads; the experts' product has a slower tile for sides that are no multiples of 64",
        f"{ROCM_BLOG}; `hip_ops/ops/grouped_product/configs.py`",
        lambda setting: _unaligned(setting, get(setting.recipe, key), f"{key}={get(setting.recipe, key)}"),
        options,
        figures=lambda setting, values: _padding(setting, get(setting.recipe, key)),
    )


def _volume(setting: Setting) -> str | bool:
    listed = products(setting.shape, setting.layout, setting.batch)
    flops = next(product.flops for product in listed if product.name == "gate and up")
    least = SATURATION_FLOPS * setting.recipe.machine.gemm_tflops / SATURATED_TFLOPS
    return flops < least and (
        f"the experts' products have {flops / 1e9:,.0f} GFLOP, and the rate of a large one needs {least / 1e9:,.0f}"
    )


def _tile_share(setting: Setting) -> float:
    """Return the mean share that whole tiles in whole rounds of all units leave to a step's forward products. Products
    of the backward pass sum over many rows or classes, and libraries divide such sums among units.
    """
    processor = processor_of(setting.recipe.machine.name)
    listed = [item for item in products(setting.shape, setting.layout, setting.batch) if item.direction == "forward"]
    assert processor is not None  # its step is predicted
    times = (item.flops * item.calls / processor.share(item.m, item.n, item.k, item.batch) for item in listed)
    whole = (item.flops * item.calls / processor.share(64 * item.m, 64 * item.n, item.k, item.batch) for item in listed)
    return sum(whole) / sum(times)


def _fuller_rounds(setting: Setting) -> list[Values]:
    """Return the micro-batch up to twice as large whose tiles fill the units best, if it is faster too."""
    options = [{"stage.micro_batch_size": n} for n in _near(setting.recipe.stage.micro_batch_size, [1], 1.0)[:32]]
    after = {values["stage.micro_batch_size"]: setting.changed(values) for values in options}
    shares = {n: _tile_share(other) for n, other in after.items() if other and other.tflops > setting.tflops}
    best = max(shares, key=shares.__getitem__, default=0)
    return [{"stage.micro_batch_size": best}] if best and shares[best] > _tile_share(setting) + MIN_TILE_GAIN else []


def _waits(setting: Setting) -> str:
    exposed = sum(link["exposed_ms"] for link in setting.prediction.communication.values()) / 1e3
    return f"a step waits {1e3 * exposed:,.0f} ms for collectives, {exposed / setting.step_seconds:.1%} of it"


def _group(name: str) -> Rule:
    """Neighbours form a group: tensor-parallel ranks first, then the context-parallel ones; experts' groups alone."""
    key = "parallel.context_parallel_size" if name == "context" else f"parallel.{name}_model_parallel_size"

    def leaves(setting: Setting, size: int) -> bool:
        neighbours = size * (setting.layout.tensor if name == "context" else 1)
        return setting.several_nodes and size > 1 and setting.recipe.machine.devices_per_node % neighbours > 0

    return Rule(
        f"{name}_group",
        "groups of neighbouring ranks inside a node",
        "layers wait for their collectives, and the network has a fraction of the links' rate",
        "arXiv 2605.05365, section III (2 and 8 ranks a sequence); docs/long-context.md",
        lambda setting: (
            leaves(setting, get(setting.recipe, key))
            and f"{key}={get(setting.recipe, key)}: a group "
            f"leaves a node of {setting.recipe.machine.devices_per_node} devices"
        ),
        lambda setting: [{key: n} for n in range(get(setting.recipe, key) - 1, 0, -1) if not leaves(setting, n)],
    )


def _split(name: str) -> Rule:
    key = f"parallel.{name}_model_parallel_size"
    whole = {key: 1} | ({"parallel.virtual_pipeline_stages": 1} if name == "pipeline" else {})
    return Rule(
        f"{name}_split",
        "parallelism of a model that fits without it",
        "rows are sent for every layer, or stages wait",
        "ZAYA1 was trained with data parallelism alone (ROCm blog, November 2025); docs/parallelism.md",
        lambda setting: (
            setting.accelerated
            and get(setting.recipe, key) > 1
            and setting.changed(whole) is not None
            and f"{key}={get(setting.recipe, key)}, and the model fits without it"
        ),
        lambda setting: [whole],
        0.0 if name == "pipeline" else MIN_GAIN,  # a pipeline's time is not predicted
    )


def _retry_seconds(setting: Setting, **names: str) -> float:
    """Return the seconds for which NCCL tries a failed link: 4.096 us x 2^timeout, times the retries."""
    environment = {"NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "7", **setting.recipe.cluster.environment, **names}
    return 4.096e-6 * 2 ** int(environment["NCCL_IB_TIMEOUT"]) * int(environment["NCCL_IB_RETRY_CNT"])


def _lost(setting: Setting, steps: int, way: str | None = None) -> float:
    """Return the share of the run's time that failures and saves cost with a checkpoint every `steps` steps."""
    cost = setting.checkpoints.costs[way or setting.recipe.checkpoint.save]
    return setting.checkpoints.lost_share(steps * setting.step_seconds, cost)


def _sensible_interval(setting: Setting) -> int:
    """Return the largest interval, in steps, that loses at most AMPLE_RUN_SHARE more than the best one."""
    written = [n for n in SAVE_INTERVALS if n * setting.step_seconds >= setting.checkpoints.drain]
    lost = {n: _lost(setting, n) for n in written or SAVE_INTERVALS[-1:]}
    return max(n for n, share in lost.items() if share <= min(lost.values()) + AMPLE_RUN_SHARE)


def _saves(problem: str, setting: Setting) -> str | bool:
    """Return what is remarkable about checkpoints: problem, "rare", "queued" or "waiting"."""
    steps, plan = setting.recipe.checkpoint.save_interval, setting.checkpoints
    if not setting.accelerated or steps is None:
        return False
    least = "" if setting.tflops else "at least "  # an unknown device
    every, sensible = f"a checkpoint every {least}{duration(steps * setting.step_seconds)}", _sensible_interval(setting)
    problems = {
        "rare": steps > sensible
        and _lost(setting, steps) > _lost(setting, sensible) + MIN_RUN_SHARE
        and f"{every}, and a failure every {duration(plan.failures)}",
        "queued": setting.tflops > 0
        and steps * setting.step_seconds < plan.drain
        and f"{every}, and machine.storage_gb_per_s={setting.recipe.machine.storage_gb_per_s:g} needs "
        f"{duration(plan.drain)} for one",
        "waiting": _lost(setting, steps) > _lost(setting, steps, "async") + MIN_RUN_SHARE
        and f"training waits {duration(plan.costs['sync'])} for each checkpoint",
    }
    return problems[problem]


def _save_figures(setting: Setting, values: Values) -> str:
    after, before = with_values(setting.recipe, values).checkpoint, setting.recipe.checkpoint
    then, now = _lost(setting, after.save_interval, after.save), _lost(setting, before.save_interval)
    hours = step_count(setting.recipe) * setting.step_seconds * setting.world / 3600
    shares = f"failures and saves cost {then:.2%} of the run instead of {now:.2%}"
    return (
        f"{shares}, which gains {(now - then) * hours:,.0f} of {hours:,.0f} device hours" if setting.tflops else shares
    )


RULES = (
    Rule(
        "memory",
        "the memory plan against `cluster.memory_gib`",
        "the first step ends with an out-of-memory error",
        "`zaya_plugin/plan/memory.py`, compared with measured peaks in docs/plan.md",
        partial(_memory, "does not fit", 1.0, inf),
        _less_memory,
        severity=DOES_NOT_FIT,
    ),
    Rule(
        "tight_memory",
        f"a plan above {1 - RESERVED_SHARE:.0%} of the memory",
        "contexts, buffers of NCCL or RCCL and fragments of the allocator are not in the plan",
        "the same",
        partial(_memory, "leaves too little for libraries", 1 - RESERVED_SHARE, 1.0),
        _less_memory,
    ),
    Rule(
        "vocabulary",
        "rows of the embedding, by 64",
        "the head's products end in partial tiles and narrow loads",
        ROCM_BLOG,
        lambda setting: _unaligned(
            setting, setting.shape.vocab_size, f"the embedding has {setting.shape.vocab_size:,} rows"
        ),
        lambda setting: [{"model.make_vocab_size_divisible_by": 64}],
        figures=lambda setting, values: _padding(setting, setting.shape.vocab_size),
    ),
    *map(_width, ("hidden_size", "moe_ffn_hidden_size", "kv_channels", "router_hidden_size")),
    Rule(
        "tokens",
        "tokens of a rank's micro-batch, by powers of two up to 64",
        "they are the rows of every product",
        ROCM_BLOG,
        lambda setting: _unaligned(
            setting,
            tokens_of_rank(setting.layout, setting.batch),
            f"a rank's micro-batch has {tokens_of_rank(setting.layout, setting.batch):,} tokens",
        ),
        lambda setting: [
            {"stage.seq_length": ceil(setting.recipe.stage.seq_length / unit) * unit}
            for unit in [setting.unit * setting.layout.context * setting.layout.tensor]
        ],
        figures=lambda setting, values: _padding(setting, tokens_of_rank(setting.layout, setting.batch)),
    ),
    Rule(
        "product_volume",
        "operations of the experts' products against 200 GFLOP, scaled with `machine.gemm_tflops`",
        "an MI300X reaches its rate with about 200 GFLOP a product",
        f"{QUOTED}; {TILE_MODEL}",
        _volume,
        lambda setting: [{"stage.micro_batch_size": setting.recipe.stage.micro_batch_size * n} for n in (2, 4, 8, 16)],
        MIN_GAIN,
    ),
    Rule(
        "tiles",
        "whole tiles in whole rounds on 304 (MI300X), 256 (MI355X) or 132 (H100, H200) units, for other micro-batches",
        "units without a tile in the last round are idle, and a last tile computes rows that do not exist",
        TILE_MODEL,
        lambda setting: (
            _fuller_rounds(setting) != []
            and f"tiles and rounds leave {_tile_share(setting):.1%} of the matrix units' rate to the forward products"
        ),
        _fuller_rounds,
        figures=lambda setting, values: f"{_tile_share(setting.changed(values)):.1%} of that rate",
    ),
    Rule(
        "overlap",
        "`overlap_grad_reduce` and `overlap_param_gather`",
        "collectives outside the passes are exposed",
        "docs/log.md, steps on four H200s",
        _waits,
        lambda setting: [{"parallel.overlap_grad_reduce": True, "parallel.overlap_param_gather": True}],
        MIN_GAIN,
    ),
    Rule(
        "buckets",
        "`ddp_bucket_size`, with the latency of a ring's hops and the work that hides a bucket",
        "small buckets pay the latency of every hop, large ones are sent when the pass is over",
        "`zaya_plugin/plan/expected_step.py`; AMD chose buffers from the saturation size (ROCm blog)",
        lambda setting: setting.recipe.parallel.bucket_plan is None and _waits(setting),  # measured sizes stay
        lambda setting: [{"parallel.ddp_bucket_size": 2**n} for n in range(24, 30)],
        MIN_GAIN,
    ),
    Rule(
        "optimizer_instances",
        "instances of the optimizer over several nodes",
        "a shard holds whole matrices: a large number of shards makes one large bucket, exposed at both ends of a step",
        "docs/optimizer.md, docs/predictions.md",
        lambda setting: (
            setting.several_nodes
            and f"{setting.layout.expert_shards:,} shards of the experts' state; {_waits(setting)}"
        ),
        lambda setting: [{"parallel.num_distributed_optimizer_instances": 2**n} for n in range(10)],
        MIN_GAIN,
    ),
    *map(_group, ("tensor", "context", "expert")),
    *map(_split, ("tensor", "expert", "pipeline")),
    Rule(
        "recomputation",
        "recomputation of a step that fits without it",
        "the recomputed passes cost time",
        "`zaya_plugin/plan/recipe_plan.py`",
        lambda setting: (
            setting.asked.parallel.recompute_granularity not in (None, "auto")
            and "activations are recomputed, and the step fits without"
        ),
        lambda setting: [NO_RECOMPUTE],
        MIN_GAIN,
    ),
    Rule(
        "optimizer_copies",
        "`use_distributed_optimizer=false` with several replicas",
        "each rank keeps the whole state",
        "docs/parallelism.md",
        lambda setting: (
            setting.accelerated
            and setting.layout.replicas > 1
            and not setting.layout.distributed_optimizer
            and f"{setting.layout.replicas} ranks hold the same state of the optimizer"
        ),
        lambda setting: [{"parallel.use_distributed_optimizer": True}],
    ),
    Rule(
        "partial_node",
        "fewer ranks than MI300X or MI355X devices of a node",
        "xGMI joins each pair of devices by one link",
        QUOTED,
        lambda setting: (
            (setting.recipe.machine.name or "").startswith("MI")
            and 1 < setting.world < setting.recipe.machine.devices_per_node
            and f"{setting.world} of the node's {setting.recipe.machine.devices_per_node} devices"
        ),
        lambda setting: [{"nproc": setting.recipe.machine.devices_per_node}],
        figures=lambda setting, values: (
            f"a device has {setting.world - 1} links to the others instead of "
            f"{setting.recipe.machine.devices_per_node - 1}, {(setting.world - 1) / (setting.recipe.machine.devices_per_node - 1):.0%} "
            f"of machine.link_gb_per_s={setting.recipe.machine.link_gb_per_s:g}"
        ),
    ),
    Rule(
        "fabric",
        "several nodes without `NCCL_IB_HCA`",
        "NCCL and RCCL take every device of /sys/class/infiniband, the storage's too, which is slower and in every ring",
        "arXiv 2605.05365, table XIV; NCCL user guide",
        lambda setting: (
            setting.several_nodes
            and "NCCL_IB_HCA" not in setting.recipe.cluster.environment
            and "cluster.environment does not name the network's devices"
        ),
        lambda setting: [{"cluster.environment.NCCL_IB_HCA": "<device>"}],
        figures=lambda setting, values: (
            "these devices carry "
            f"{sum(sent_bytes(setting.shape, setting.layout, setting.batch).values()) / 1e9:,.1f} GB of a rank and step"
        ),
    ),
    Rule(
        "link_retries",
        f"`NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`: {LINK_SECONDS:.0f} s or more from {MANY_RANKS} ranks",
        "links of a large job fail for moments",
        "ROCm blog: timeouts were raised so that short faults do not end the run; NCCL user guide",
        lambda setting: (
            setting.several_nodes
            and setting.world >= MANY_RANKS
            and _retry_seconds(setting) < LINK_SECONDS
            and f"a link that fails for {_retry_seconds(setting):.0f} s ends the run of {setting.world:,} ranks"
        ),
        lambda setting: [{"cluster.environment.NCCL_IB_TIMEOUT": "22"}],
        figures=lambda setting, values: f"a link may fail for {_retry_seconds(setting, NCCL_IB_TIMEOUT='22'):.0f} s",
    ),
    Rule(
        "timeout",
        f"`distributed_timeout_minutes`: {MANY_RANKS_MINUTES} or more from {MANY_RANKS} ranks",
        "in the first collective all ranks wait for the slowest one's imports, compilation and connections",
        "ROCm blog, as above; recipes/cluster/mi300x_8.yaml",
        lambda setting: (
            setting.several_nodes
            and setting.world >= MANY_RANKS
            and setting.recipe.cluster.distributed_timeout_minutes < MANY_RANKS_MINUTES
            and f"{setting.world:,} ranks have {setting.recipe.cluster.distributed_timeout_minutes} minutes for their first "
            "collective"
        ),
        lambda setting: [{"cluster.distributed_timeout_minutes": 60}],
        figures=lambda setting, values: (
            "a start that one slow rank ends costs "
            f"{setting.world * setting.recipe.cluster.distributed_timeout_minutes / 60:,.0f} device hours"
        ),
    ),
    Rule(
        "save_interval",
        f"an interval that loses {MIN_RUN_SHARE:.2%} of the run more than a sensible one",
        "a failure loses half an interval on average",
        "J. W. Young 1974, J. T. Daly 2006; rates in docs/checkpoints.md",
        partial(_saves, "rare"),
        lambda setting: [{"checkpoint.save_interval": _sensible_interval(setting)}],
        figures=_save_figures,
    ),
    Rule(
        "queued_saves",
        "an interval shorter than the storage needs for a checkpoint",
        "all ranks write at the same time, and a save waits for the one before",
        "docs/checkpoints.md",
        partial(_saves, "queued"),
        lambda setting: [{"checkpoint.save_interval": _sensible_interval(setting)}],
        figures=_save_figures,
    ),
    Rule(
        "waiting_saves",
        f"`checkpoint.save=sync` that costs {MIN_RUN_SHARE:.2%} of the run more than async",
        "all devices wait until a checkpoint is written",
        "docs/checkpoints.md",
        partial(_saves, "waiting"),
        lambda setting: [{"checkpoint.save": "async"}],
        figures=_save_figures,
    ),
)


def setting_of(recipe: Recipe, world: int) -> Setting:
    """Return the setting of a valid recipe with the values of its bucket plan, where that can be read, and without
    recomputation where none that auto may choose makes it fit.
    """
    with contextlib.suppress(ValueError):
        recipe, _ = with_bucket_plan(recipe, world)
    try:
        return Setting.of(recipe, world)
    except ValueError:
        return Setting.of(with_values(recipe, NO_RECOMPUTE), world)


def findings_of(setting: Setting) -> list[dict[str, str]]:
    """Return the findings, what does not fit first."""
    return [finding for rule in RULES if (finding := rule.finding(setting))]


def text(findings: Sequence[Mapping[str, str]]) -> list[str]:
    """Return findings as lines, with their number first."""
    return [
        f"findings     {len(findings) or 'none'}",
        *(
            line
            for finding in findings
            for line in (
                f"  {finding['rule']}: {finding['what']}",
                f"    why     {finding['why']}",
                f"    source  {finding['source']}",
                f"    change  {finding['change'] or 'no override helps: more devices or a smaller model'}",
                f"    effect  prediction: {finding['effect'] or 'none'}",
            )
        ),
    ]

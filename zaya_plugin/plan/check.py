# SPDX-License-Identifier: Apache-2.0
"""Rules over a recipe, before an hour of a device is spent: sizes, memory, products, links, layout, hazards of many
ranks, checkpoints. No torch import.

A rule is a row of RULES: what it looks at, why, a source, and the changes that may help. A change is named if it is
valid and fits into memory; its effect is the difference of two predictions. A size that is no multiple is a finding
whatever it gains; another rule about speed has one only where its best change gains MIN_GAIN.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil, gcd, inf

from zaya_plugin.config.schedule import step_count
from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.plan.bucket_plan import with_bucket_plan
from zaya_plugin.plan.expected_step import link_rate
from zaya_plugin.plan.memory import tokens_of_rank
from zaya_plugin.plan.parallelism import sent_bytes
from zaya_plugin.plan.prediction import Prediction, predict
from zaya_plugin.plan.products import processor_of, products
from zaya_plugin.plan.recipe_plan import GIB, NO_RECOMPUTE, RESERVED_SHARE
from zaya_plugin.plan.run_costs import checkpoint_plan

DOES_NOT_FIT, ADVICE = "does not fit", "advice"  # severities
# Of predicted TFLOP/s: what a finding's change gains, which is how far predictions are off on a known device
# (docs/plan.md); and the difference below which the first of two changes is taken.
MIN_GAIN, EQUAL_GAIN = 0.03, 0.01
MIN_TILE_GAIN = 0.03  # of the matrix units' rate
# Of a run's time, lost to failures and saves beyond the least loss: for a finding, and with the interval that it names,
# which needs fewer checkpoints than the least loss.
MIN_RUN_SHARE, AMPLE_RUN_SHARE = 0.0025, 0.001
SATURATION_FLOPS, SATURATED_TFLOPS = 200e9, 600.0  # of a product on an MI300X, and the rate there of a large one
MANY_RANKS, MANY_RANKS_MINUTES, LINK_SECONDS = 256, 30, 60.0
SAVE_INTERVALS = sorted(round(n * 10**k) for n in (1, 1.5, 2, 3, 5, 7) for k in range(1, 6))  # steps that are named
AUTO_RECOMPUTE = {**NO_RECOMPUTE, "parallel.recompute_granularity": "auto"}
ROCM_BLOG = "sizing rules of the ROCm blog on ZAYA1, November 2025"
QUOTED = "arXiv 2511.17127 (AMD), as other texts quote it"
MEMORY_PLAN = "`zaya_plugin/plan/memory.py`, compared with measured peaks in docs/plan.md"
TILE_MODEL = "`zaya_plugin/plan/products.py`, errors in docs/predictions.md"


Values = Mapping[str, object]  # recipe keys and other values for them


@dataclass(frozen=True)
class Rule:
    """A rule, and a row of docs/plan.md.

    Attributes:
        what: returns what is remarkable about a step, or nothing.
        options: returns the changes that may help, the smallest first.
        gain: least gain of the fastest one for a finding; 0: a finding in any case.
        figures: returns computed figures of a change that the prediction of a step does not have.
    """

    name: str
    looks_at: str
    why: str
    source: str
    what: Callable[[Prediction], str | bool]
    options: Callable[[Prediction], Iterable[Values]]
    gain: float = 0.0
    figures: Callable[[Prediction, Values], str] = lambda step, values: ""
    severity: str = ADVICE

    def finding(self, step: Prediction) -> dict[str, str] | None:
        """Return the finding about a recipe: rule, severity, what, why, source, change (overrides), effect."""
        if self.gain > 0 and not step.tflops or not (what := self.what(step)):
            return None
        if (values := _best(step, self.options(step), self.gain)) is None:
            return None
        changes = [key for key in values if with_values(step.asked, {key: values[key]}) != step.asked]
        effect = [self.figures(step, values), *_compared(step, _changed(step, values))]
        return {
            "rule": self.name,
            "severity": self.severity,
            "what": str(what),
            "why": self.why,
            "source": self.source,
            "change": " ".join(f"{key}={as_typed(values[key])}" for key in changes),
            "effect": ", ".join(filter(None, effect)),
        }


def _changed(step: Prediction, values: Values) -> Prediction | None:
    """Return the prediction with other values of the recipe, None if they are invalid or fit less."""
    recipe = with_values(step.asked, values)
    with suppress(ValueError):
        validate(recipe, step.world)
        after = predict(recipe, step.world)
        return after if after.memory_share <= max(1 - RESERVED_SHARE, step.memory_share) else None


def _best(step: Prediction, options: Iterable[Values], gain: float) -> Values | None:
    """Return the first of the values within EQUAL_GAIN of the highest predicted rate (on an unknown device the first),
    {} if none is valid; with a `gain` above 0 None if they gain less.
    """
    candidates = [(after.tflops, values) for values in options if (after := _changed(step, values))]
    most = max((rate for rate, _ in candidates), default=0.0)
    if gain > 0 and most < (1 + gain) * step.tflops:
        return None
    return next((values for rate, values in candidates if rate >= (1 - EQUAL_GAIN) * most), {})


def _compared(step: Prediction, after: Prediction | None) -> list[str]:
    """Return the figures of another prediction that differ from this one's."""
    figures = []
    if after and after.seconds and step.seconds and after.seconds != step.seconds:
        time = f"{1e3 * after.seconds:,.0f} ms a step instead of {1e3 * step.seconds:,.0f}"
        rate = f"{after.tflops:,.0f} TFLOP/s a device instead of {step.tflops:,.0f}"
        figures.append(f"{time} ({after.seconds / step.seconds - 1:+.1%})" if after.shape == step.shape else rate)
    if after and after.memory and step.memory and abs(after.memory.total - step.memory.total) > 0.05 * GIB:
        figures.append(f"{after.memory.total / GIB:.1f} GiB instead of {step.memory.total / GIB:.1f}")
    return figures


def _accelerated(step: Prediction) -> bool:
    return step.recipe.cluster.device != "cpu"


def _several_nodes(step: Prediction) -> bool:
    return _accelerated(step) and step.world > step.recipe.machine.devices_per_node


def _unit(step: Prediction) -> int:
    """Return the smallest tile of a matrix unit; on a CPU the fp32 numbers of a cache line of 64 bytes."""
    return 64 if _accelerated(step) else 16


def _memory(step: Prediction, problem: str, least: float, most: float) -> str | bool:
    if not least < step.memory_share <= most:
        return False
    largest, size = max(step.memory.components.items(), key=lambda component: component[1])
    return (
        f"the step {problem}: {step.memory.total / GIB:,.1f} of {step.recipe.cluster.memory_gib:g} GiB of a device, "
        f"{size / GIB:,.1f} of them for {largest}"
    )


def _less_memory(step: Prediction) -> list[Values]:
    size, experts = step.recipe.stage.micro_batch_size, step.recipe.parallel.expert_model_parallel_size
    smaller = [{"stage.micro_batch_size": size // n} for n in (2, 4, 8, 16, 32, 64) if size % n == 0]
    recomputed = [AUTO_RECOMPUTE, *({**AUTO_RECOMPUTE, **values} for values in smaller)]
    shared = [{**recomputed[-1], "parallel.expert_model_parallel_size": experts * n} for n in (2, 4, 8)]
    changes = ((values, _changed(step, values)) for values in (AUTO_RECOMPUTE, *smaller, *recomputed, *shared))
    return [values for values, after in changes if after and after.memory_share <= 1 - RESERVED_SHARE]


def _size(
    name: str, looks_at: str, why: str, source: str, size: Callable[[Prediction], int], title: str, options: Callable
) -> Rule:
    """Return a rule about a size that is no multiple of the unit. title: a sentence with the size in it."""

    def what(step: Prediction) -> str | bool:
        number, unit = size(step), _unit(step)
        return number % unit > 0 and f"{title.format(number)}, a multiple of {number & -number} and not of {unit}"

    def padding(step: Prediction, values: Values) -> str:
        number, unit = size(step), _unit(step)
        text = f"{1 - number / (ceil(number / unit) * unit):.1%} of the tiles are padding"
        narrow = f", a row of {number:,} numbers is loaded {{}} bytes at a time instead of 16"
        return text + (narrow.format(loaded) if (loaded := gcd(step.batch.dtype_bytes * number, 16)) < 16 else "")

    return Rule(name, looks_at, why, source, what, options, figures=padding)


def near_sizes(size: int, multiples: Sequence[int], share: float) -> list[int]:
    """Return multiples of the numbers that differ from a size by at most a share of it, or by the first of the numbers;
    the nearest first.
    """
    reach = max(share * size, multiples[0])
    sizes = {n * factor for factor in multiples for n in range(1, int((size + reach) / factor) + 1)}
    return sorted((n for n in sizes if n >= size - reach), key=lambda n: (abs(n - size), -n))


def _width(name: str) -> Rule:
    key = f"model.{name}"
    return _size(
        name,
        "sizes of the model, by powers of two up to 64 (on a CPU by lines of 64 bytes)",
        "partial tiles and narrow loads; the experts' product has a slower tile for sides that are no multiples of 64",
        f"{ROCM_BLOG}; `hip_ops/ops/grouped_product/configs.py`",
        lambda step: get(step.recipe, key),
        key + "={}",
        lambda step: [
            {key: n} for n in near_sizes(get(step.recipe, key), [factor * _unit(step) for factor in (1, 2, 4)], 0.1)
        ],
    )


def _volume(step: Prediction) -> str | bool:
    sizes = step.shape, step.layout, step.batch
    flops = next(product.flops for product in products(*sizes) if product.name == "gate and up")
    least = SATURATION_FLOPS * step.recipe.machine.gemm_tflops / SATURATED_TFLOPS
    return flops < least and (
        f"the experts' products have {flops / 1e9:,.0f} GFLOP, and the rate of a large one needs {least / 1e9:,.0f}"
    )


def _tile_share(step: Prediction) -> float:
    """Return the mean share that whole tiles in whole rounds of all units leave to a step's forward products. Products
    of the backward pass sum over many rows or classes, and libraries divide such sums among units.
    """
    processor = processor_of(step.recipe.machine.name)
    listed = [item for item in products(step.shape, step.layout, step.batch) if item.direction == "forward"]
    assert processor is not None  # its step is predicted
    times = (item.flops * item.calls / processor.share(item.m, item.n, item.k, item.batch) for item in listed)
    whole = (item.flops * item.calls / processor.share(64 * item.m, 64 * item.n, item.k, item.batch) for item in listed)
    return sum(whole) / sum(times)


def _fuller_rounds(step: Prediction) -> list[Values]:
    """Return the micro-batch up to twice as large whose tiles fill the units best, if it is faster too."""
    size = step.recipe.stage.micro_batch_size
    after = {n: _changed(step, {"stage.micro_batch_size": n}) for n in near_sizes(size, [1], 1.0)[:32]}
    shares = {n: _tile_share(other) for n, other in after.items() if other and other.tflops > step.tflops}
    best = max(shares, key=shares.__getitem__, default=0)
    return [{"stage.micro_batch_size": best}] if best and shares[best] > _tile_share(step) + MIN_TILE_GAIN else []


def _waits(step: Prediction) -> str:
    return f"a step waits {1e3 * step.exposed:,.0f} ms for collectives, {step.exposed / step.seconds:.1%} of it"


def _group(name: str) -> Rule:
    """Neighbours form a group: tensor-parallel ranks first, then the context-parallel ones; experts' groups alone."""
    key = "parallel.context_parallel_size" if name == "context" else f"parallel.{name}_model_parallel_size"

    def leaves(step: Prediction, size: int) -> bool:
        neighbours = size * (step.layout.tensor if name == "context" else 1)
        return _several_nodes(step) and size > 1 and step.recipe.machine.devices_per_node % neighbours > 0

    return Rule(
        f"{name}_group",
        "groups of neighbouring ranks inside a node",
        "layers wait for their collectives, and the network has a fraction of the links' rate",
        "arXiv 2605.05365, section III (2 and 8 ranks a sequence); docs/parallelism.md",
        lambda step: (
            leaves(step, get(step.recipe, key))
            and f"{key}={get(step.recipe, key)}: a group "
            f"leaves a node of {step.recipe.machine.devices_per_node} devices"
        ),
        lambda step: [{key: n} for n in range(get(step.recipe, key) - 1, 0, -1) if not leaves(step, n)],
    )


def _split(name: str) -> Rule:
    key = f"parallel.{name}_model_parallel_size"
    whole = {key: 1} | ({"parallel.virtual_pipeline_stages": 1} if name == "pipeline" else {})
    return Rule(
        f"{name}_split",
        "parallelism of a model that fits without it",
        "rows are sent for every layer, or stages wait",
        "ZAYA1 was trained with data parallelism alone (ROCm blog, November 2025); docs/parallelism.md",
        lambda step: (
            _accelerated(step)
            and get(step.recipe, key) > 1
            and _changed(step, whole) is not None
            and f"{key}={get(step.recipe, key)}, and the model fits without it"
        ),
        lambda step: [whole],
        0.0 if name == "pipeline" else MIN_GAIN,  # a pipeline's time is not predicted
    )


def _retry_seconds(step: Prediction, **names: str) -> float:
    """Return the seconds for which NCCL tries a failed link: 4.096 us x 2^timeout, times the retries."""
    environment = {"NCCL_IB_TIMEOUT": "20", "NCCL_IB_RETRY_CNT": "7", **step.recipe.cluster.environment, **names}
    return 4.096e-6 * 2 ** int(environment["NCCL_IB_TIMEOUT"]) * int(environment["NCCL_IB_RETRY_CNT"])


def _saves(step: Prediction) -> tuple[int, str, str]:
    """Return the largest interval between checkpoints, in steps, that loses at most AMPLE_RUN_SHARE more of the run than
    the best one; what is remarkable about the recipe's; and the shares of the run that both lose.
    """
    plan, checkpoint = checkpoint_plan(step.recipe, step.world), step.recipe.checkpoint
    seconds, own = step.seconds or plan.least_step, checkpoint.save_interval
    if not _accelerated(step) or own is None:
        return 0, "", ""
    lost = {n: plan.lost_share(n * seconds, checkpoint.save) for n in (*SAVE_INTERVALS, own)}
    options = [n for n in SAVE_INTERVALS if n * seconds >= plan.drain] or SAVE_INTERVALS[-1:]
    best = max(n for n in options if lost[n] <= min(lost[one] for one in options) + AMPLE_RUN_SHARE)
    time = f"{'' if step.seconds else 'at least '}{duration(own * seconds)}"
    what = f"a checkpoint every {time}, and a failure every {duration(plan.failures)}"
    gain, hours = lost[own] - lost[best], step_count(step.recipe) * (step.seconds or 0.0) * step.world / 3600
    figures = f"failures and saves cost {lost[best]:.2%} of the run instead of {lost[own]:.2%}" + (
        f", which gains {gain * hours:,.0f} of {hours:,.0f} device hours" if hours else ""
    )
    return best, what if own > best and gain > MIN_RUN_SHARE else "", figures


RULES = (
    Rule(
        "memory",
        "the memory plan against `cluster.memory_gib`",
        "the first step ends with an out-of-memory error",
        MEMORY_PLAN,
        lambda step: _memory(step, "does not fit", 1.0, inf),
        _less_memory,
        severity=DOES_NOT_FIT,
    ),
    Rule(
        "tight_memory",
        f"a plan above {1 - RESERVED_SHARE:.0%} of the memory",
        "contexts, buffers of NCCL or RCCL and fragments of the allocator are not in the plan",
        MEMORY_PLAN,
        lambda step: _memory(step, "leaves too little for libraries", 1 - RESERVED_SHARE, 1.0),
        _less_memory,
    ),
    _size(
        "vocabulary",
        "rows of the embedding, by 64",
        "the head's products end in partial tiles and narrow loads",
        ROCM_BLOG,
        lambda step: step.shape.vocab_size,
        "the embedding has {:,} rows",
        lambda step: [{"model.make_vocab_size_divisible_by": 64}],
    ),
    *map(_width, ("hidden_size", "moe_ffn_hidden_size", "kv_channels", "router_hidden_size")),
    _size(
        "tokens",
        "tokens of a rank's micro-batch, by powers of two up to 64",
        "they are the rows of every product",
        ROCM_BLOG,
        lambda step: tokens_of_rank(step.layout, step.batch),
        "a rank's micro-batch has {:,} tokens",
        lambda step: [
            {"stage.seq_length": ceil(step.batch.seq_length / unit) * unit}
            for unit in [_unit(step) * step.layout.context * step.layout.tensor]
        ],
    ),
    Rule(
        "product_volume",
        "operations of the experts' products against 200 GFLOP, scaled with `machine.gemm_tflops`",
        "an MI300X reaches its rate with about 200 GFLOP a product",
        f"{QUOTED}; {TILE_MODEL}",
        _volume,
        lambda step: [{"stage.micro_batch_size": step.recipe.stage.micro_batch_size * n} for n in (2, 4, 8, 16)],
        MIN_GAIN,
    ),
    Rule(
        "tiles",
        "whole tiles in whole rounds on 304 (MI300X), 256 (MI355X) or 132 (H100, H200) units, for other micro-batches",
        "units without a tile in the last round are idle, and a last tile computes rows that do not exist",
        TILE_MODEL,
        lambda step: (
            _fuller_rounds(step) != []
            and f"tiles and rounds leave {_tile_share(step):.1%} of the matrix units' rate to the forward products"
        ),
        _fuller_rounds,
        figures=lambda step, values: f"{_tile_share(_changed(step, values)):.1%} of that rate",
    ),
    Rule(
        "overlap",
        "`overlap_grad_reduce` and `overlap_param_gather`",
        "collectives outside the passes are exposed",
        "docs/log.md, steps on four H200s",
        _waits,
        lambda step: [{"parallel.overlap_grad_reduce": True, "parallel.overlap_param_gather": True}],
        MIN_GAIN,
    ),
    Rule(
        "buckets",
        "`ddp_bucket_size`, with the latency of a ring's hops and the work that hides a bucket",
        "small buckets pay the latency of every hop, large ones are sent when the pass is over",
        "`zaya_plugin/plan/expected_step.py`; AMD chose buffers from the saturation size (ROCm blog)",
        lambda step: step.recipe.parallel.bucket_plan is None and _waits(step),  # measured sizes stay
        lambda step: [{"parallel.ddp_bucket_size": 2**n} for n in range(24, 30)],
        MIN_GAIN,
    ),
    Rule(
        "optimizer_instances",
        "instances of the optimizer over several nodes",
        "a shard holds whole matrices: a large number of shards makes one large bucket, exposed at both ends of a step",
        "docs/another-part.md, docs/predictions.md",
        lambda step: (
            _several_nodes(step) and f"{step.layout.expert_shards:,} shards of the experts' state; {_waits(step)}"
        ),
        lambda step: [{"parallel.num_distributed_optimizer_instances": 2**n} for n in range(10)],
        MIN_GAIN,
    ),
    *map(_group, ("tensor", "context", "expert")),
    *map(_split, ("tensor", "expert", "pipeline")),
    Rule(
        "recomputation",
        "recomputation of a step that fits without it",
        "the recomputed passes cost time",
        "`zaya_plugin/plan/recipe_plan.py`",
        lambda step: (
            step.asked.parallel.recompute_granularity not in (None, "auto")
            and "activations are recomputed, and the step fits without"
        ),
        lambda step: [NO_RECOMPUTE],
        MIN_GAIN,
    ),
    Rule(
        "optimizer_copies",
        "`use_distributed_optimizer=false` with several replicas",
        "each rank keeps the whole state",
        "docs/parallelism.md",
        lambda step: (
            _accelerated(step)
            and step.layout.replicas > 1
            and not step.layout.distributed_optimizer
            and f"{step.layout.replicas} ranks hold the same state of the optimizer"
        ),
        lambda step: [{"parallel.use_distributed_optimizer": True}],
    ),
    Rule(
        "partial_node",
        "fewer ranks than MI300X or MI355X devices of a node",
        "xGMI joins each pair of devices by one link",
        QUOTED,
        lambda step: (
            1 < step.world < step.recipe.machine.devices_per_node
            and link_rate(step.recipe.machine, step.world) < step.recipe.machine.link_gb_per_s
            and f"{step.world} of the node's {step.recipe.machine.devices_per_node} devices"
        ),
        lambda step: [{"nproc": step.recipe.machine.devices_per_node}],
        figures=lambda step, values: (
            f"a device sends at most {link_rate(step.recipe.machine, step.world):,.0f} GB/s instead of "
            f"machine.link_gb_per_s={step.recipe.machine.link_gb_per_s:g}"
        ),
    ),
    Rule(
        "fabric",
        "several nodes without `NCCL_IB_HCA`",
        "NCCL and RCCL take every device of /sys/class/infiniband, the storage's too, which is slower and in every ring",
        "arXiv 2605.05365, table XIV; NCCL user guide",
        lambda step: (
            _several_nodes(step)
            and "NCCL_IB_HCA" not in step.recipe.cluster.environment
            and "cluster.environment does not name the network's devices"
        ),
        lambda step: [{"cluster.environment.NCCL_IB_HCA": "<device>"}],
        figures=lambda step, values: (
            "a rank sends {gradients:,.1f} GB of gradients, {weights:,.1f} of weights and {instances:,.1f} between "
            "instances in a step, over these devices where the neighbour is on another node"
        ).format_map({use: sent / 1e9 for use, sent in sent_bytes(step.shape, step.layout, step.batch).items()}),
    ),
    Rule(
        "link_retries",
        f"`NCCL_IB_TIMEOUT` and `NCCL_IB_RETRY_CNT`: {LINK_SECONDS:.0f} s or more from {MANY_RANKS} ranks",
        "links of a large job fail for moments",
        "ROCm blog: timeouts were raised so that short faults do not end the run; NCCL user guide",
        lambda step: (
            _several_nodes(step)
            and step.world >= MANY_RANKS
            and _retry_seconds(step) < LINK_SECONDS
            and f"a link that fails for {_retry_seconds(step):.0f} s ends the run of {step.world:,} ranks"
        ),
        lambda step: [{"cluster.environment.NCCL_IB_TIMEOUT": "22"}],
        figures=lambda step, values: f"a link may fail for {_retry_seconds(step, NCCL_IB_TIMEOUT='22'):.0f} s",
    ),
    Rule(
        "timeout",
        f"`distributed_timeout_minutes`: {MANY_RANKS_MINUTES} or more from {MANY_RANKS} ranks",
        "in the first collective all ranks wait for the slowest one's imports, compilation and connections",
        "ROCm blog on ZAYA1, November 2025; recipes/cluster/mi300x_8.yaml",
        lambda step: (
            _several_nodes(step)
            and step.world >= MANY_RANKS
            and step.recipe.cluster.distributed_timeout_minutes < MANY_RANKS_MINUTES
            and f"{step.world:,} ranks have {step.recipe.cluster.distributed_timeout_minutes} minutes for their first "
            "collective"
        ),
        lambda step: [{"cluster.distributed_timeout_minutes": 60}],
        figures=lambda step, values: (
            "a start that one slow rank ends costs "
            f"{step.world * step.recipe.cluster.distributed_timeout_minutes / 60:,.0f} device hours"
        ),
    ),
    Rule(
        "save_interval",
        f"an interval that loses {MIN_RUN_SHARE:.2%} of the run more than a sensible one",
        "a failure loses half an interval on average",
        "J. W. Young 1974, J. T. Daly 2006; rates in docs/checkpoints.md",
        lambda step: _saves(step)[1],
        lambda step: [{"checkpoint.save_interval": _saves(step)[0]}],
        figures=lambda step, values: _saves(step)[2],
    ),
)


def step_of(recipe: Recipe, world: int) -> Prediction:
    """Return the prediction of a valid recipe with the values of its bucket plan, where that can be read, and without
    recomputation where none that auto may choose makes it fit.
    """
    with suppress(ValueError):
        recipe, _ = with_bucket_plan(recipe, world)
    try:
        return predict(recipe, world)
    except ValueError:
        return predict(with_values(recipe, NO_RECOMPUTE), world)


def findings_of(step: Prediction) -> list[dict[str, str]]:
    """Return the findings, what does not fit first."""
    return [finding for rule in RULES if (finding := rule.finding(step))]


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

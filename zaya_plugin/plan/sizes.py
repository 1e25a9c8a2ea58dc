# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model near a recipe's, by the rate of its matrix products; and widths of experts, by the rate of training
and the latency of decoding together. No torch import.

Rates are those of zaya_plugin.plan.product_rate for the products of a step (zaya_plugin.plan.products), forward and
backward. Decoding reads every weight that its tokens use and their keys and values once for each token, so it takes
those bytes at the copy rate, or the operations at the matrix-product rate if that is longer; launches are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.flops import Shape, active_parameters, cache_bytes, count_parameters, forward_flops_by_part
from zaya_plugin.plan.prediction import Prediction, predict
from zaya_plugin.plan.product_rate import PROCESSORS, processor_of
from zaya_plugin.plan.products import products

HEADS, VOCABULARY = "model.num_attention_heads", "model.make_vocab_size_divisible_by"
# Key -> multiples that are tried near it; heads also need a multiple of the key/value heads.
STEPS = {
    "model.hidden_size": (64, 128, 256),
    "model.moe_ffn_hidden_size": (64, 128, 256),
    "model.kv_channels": (32, 64),
    HEADS: (1,),
    VOCABULARY: (64, 128, 256),
}
NEAR = 0.15  # of a size
SHOWN, LEAST_GAIN = 3, 0.002  # sizes of a key, and what they gain
WIDTH_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the recipe's, at the same number of expert parameters
DECODE_BATCHES, DECODE_CONTEXT = (1, 64), 4096  # sequences, and tokens of each that are in the cache
WEIGHT_BYTES = 2


@dataclass(frozen=True)
class Size:
    """A recipe with a value of a key. rate: FLOP/s of all its matrix products."""

    key: str
    value: int
    recipe: Recipe
    shape: Shape
    rate: float


@dataclass(frozen=True)
class Width:
    """A width of experts at the same number of expert parameters.

    rate: FLOP/s of the experts' products. step: the prediction. decode: seconds of a token, for each of DECODE_BATCHES.
    """

    width: int
    experts: int
    active: int
    rate: float
    step: Prediction
    decode: tuple[float, ...]


def product_rate(recipe: Recipe, world: int, part: str | None = None) -> float:
    """Return the FLOP/s of a step's matrix products, of all parts or of one.

    Raises ValueError for a device whose tiles are not known.
    """
    processor = processor_of(recipe.machine.name)
    if processor is None:
        problem, allowed = "is not a device whose tiles are known", ", ".join(PROCESSORS)
        raise mistake("machine.name", recipe.machine.name, problem=problem, allowed=allowed, fix="cluster=mi300x_8")
    listed = products(
        recipe_plan.shape_of(recipe), recipe_plan.layout_of(recipe, world), recipe_plan.batch_of(recipe, world)
    )
    listed = [item for item in listed if part in (None, item.part)]
    time = sum(
        item.calls * item.flops / processor.relative_rate(item.m, item.n, item.k, item.batch, item.out_bytes)
        for item in listed
    )
    return recipe.machine.gemm_tflops * 1e12 * sum(item.calls * item.flops for item in listed) / time


def near_sizes(recipe: Recipe, world: int) -> Iterator[tuple[Size, list[Size]]]:
    """Yield, for each key of STEPS, the recipe's size and faster ones near it, by the rate of the products."""
    for key, steps in STEPS.items():
        value = get(recipe, key)
        steps = (recipe.model.num_query_groups,) if key == HEADS else steps
        reach = max(NEAR * value, steps[0])
        near = {n * step for step in steps for n in range(1, int((value + reach) / step) + 1)} - {value}
        sizes = [_size(recipe, world, key, n) for n in near if abs(n - value) <= reach]
        own = _size(recipe, world, key, value)
        if own:
            better = [size for size in sizes if size and size.rate > (1 + LEAST_GAIN) * own.rate]
            yield own, sorted(better, key=lambda size: (-size.rate, abs(size.value - value)))[:SHOWN]


def _size(recipe: Recipe, world: int, key: str, value: int) -> Size | None:
    changed = with_values(recipe, {key: value})
    try:
        validate(changed, world)
    except ValueError:
        return None
    return Size(key, value, changed, recipe_plan.shape_of(changed), product_rate(changed, world))


def widths(recipe: Recipe, world: int) -> list[Width]:
    """Return widths of experts with as many parameters in all experts as the recipe has, the narrowest first."""
    width, experts = recipe.model.moe_ffn_hidden_size, recipe.model.num_experts
    rows = []
    for factor in WIDTH_FACTORS:
        if width * factor % 1 or experts / factor % 1:
            continue
        values = {"model.moe_ffn_hidden_size": int(width * factor), "model.num_experts": int(experts / factor)}
        changed = with_values(recipe, values)
        try:
            validate(changed, world)
        except ValueError:
            continue
        shape, machine = recipe_plan.shape_of(changed), recipe.machine
        decode = tuple(
            decode_seconds(shape, batch, machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12)
            for batch in DECODE_BATCHES
        )
        rate = product_rate(changed, world, "experts")
        rows.append(Width(*values.values(), active_parameters(shape), rate, predict(changed, world), decode))
    return rows


def decode_seconds(shape: Shape, batch: int, gemm: float, copy: float, context: int = DECODE_CONTEXT) -> float:
    """Return the time in which one device decodes a token of each of `batch` sequences.

    The sequences' tokens take different experts by chance: of n experts, n (1 - (1 - 1/n)^batch) are read.
    """
    parts, n = count_parameters(shape), shape.num_experts
    read = n * (1 - (1 - 1 / n) ** batch)
    weights = sum(parts.values()) - parts["experts"] + parts["experts"] / n * read  # the embedding is the head
    moved = WEIGHT_BYTES * weights + batch * context * cache_bytes(shape, WEIGHT_BYTES)
    flops = batch * sum(forward_flops_by_part(replace(shape), 2 * context).values())  # a token sees all of the cache
    return max(moved / copy, flops / gemm)


def report(sizes: list[tuple[Size, list[Size]]], of_experts: list[Width], recipe: Recipe) -> list[str]:
    """Return both tables as lines."""
    lines = [
        f"rate of a step's matrix products on {recipe.machine.name}, by tiles (prediction, -12 to +21 %: docs/predictions.md)",
        f"  {'key':38}{'value':>20}{'TFLOP/s':>9}{'gain':>8}{'parameters':>17}",
    ]
    for own, near in sizes:
        for size in (own, *near):
            rows = f"{size.value:,}" + (f" ({size.shape.vocab_size:,} rows)" if size.key == VOCABULARY else "")
            gain = "" if size is own else f"{size.rate / own.rate - 1:+.1%}"
            note = "" if near else "  none near it is faster"
            number = sum(count_parameters(size.shape).values())
            lines.append(
                f"  {size.key if size is own else '':38}{rows:>20}{size.rate / 1e12:9.0f}{gain:>8}{number:17,}{note}"
            )
    lines += [
        f"widths of experts with the same parameters in all experts ({of_experts[0].step.error})",
        f"  {'width':>6}{'experts':>9}{'active, M':>11}{'experts TFLOP/s':>17}{'tokens/s a device':>19}"
        + "".join(f"{f'decode ms, batch {batch}':>22}" for batch in DECODE_BATCHES),
    ]
    for row in of_experts:
        rate = f"{row.step.tokens_per_second:,.0f}" if row.step.seconds else "-"
        lines.append(
            f"  {row.width:>6,}{row.experts:>9}{row.active / 1e6:11,.1f}{row.rate / 1e12:17,.0f}{rate:>19}"
            + "".join(f"{1e3 * seconds:22.3f}" for seconds in row.decode)
        )
    return [*lines, f"  decoding: weights and the cache of {DECODE_CONTEXT:,} tokens read once a token, no launches"]


def percentages(of_experts: list[Width], width: int) -> list[tuple[str, list[float], list[float]]]:
    """Return the lines of a picture: name, widths, and per cent of what the recipe's width reaches."""
    own = next(row for row in of_experts if row.width == width)
    lines = [("rate of the experts' products", [100 * row.rate / own.rate for row in of_experts])]
    if own.step.seconds:
        speed = [100 * row.step.tokens_per_second / own.step.tokens_per_second for row in of_experts]
        lines.append(("training, tokens/s", speed))
    for place, batch in enumerate(DECODE_BATCHES):
        speed = [100 * own.decode[place] / row.decode[place] for row in of_experts]
        lines.append((f"decoding, tokens/s, {batch} sequence{'s' * (batch > 1)}", speed))
    return [(name, [row.width for row in of_experts], values) for name, values in lines]

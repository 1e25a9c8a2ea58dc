# SPDX-License-Identifier: Apache-2.0
"""Sizes of a model near a recipe's, by the rate of its matrix products; and widths of experts, by the rate of training
and the latency of decoding together. No torch import.

Rates are those of the products of a step (zaya_plugin.plan.products), forward and backward. Decoding reads every weight
that its tokens use and their keys and values once for each token, so it takes those bytes at the copy rate, or the
operations at the matrix-product rate if that is longer; launches are not counted.
"""

from math import nan

from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.check import near_sizes
from zaya_plugin.plan.flops import Shape, attention_flops, cache_bytes, count_parameters, forward_flops_by_part
from zaya_plugin.plan.parallelism import WEIGHT_BYTES
from zaya_plugin.plan.prediction import predict
from zaya_plugin.plan.products import PROCESSORS, processor_of, products

HEADS = "model.num_attention_heads"
# Key -> multiples that are tried near it; heads also need a multiple of the key/value heads.
STEPS = {
    "model.hidden_size": (64, 128, 256),
    "model.moe_ffn_hidden_size": (64, 128, 256),
    "model.kv_channels": (32, 64),
    HEADS: (1,),
    "model.make_vocab_size_divisible_by": (64, 128, 256),
}
NEAR = 0.15  # of a size
SHOWN, LEAST_GAIN = 3, 0.002  # sizes of a key, and what they gain
WIDTH_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the recipe's, at the same number of expert parameters
DECODE_BATCHES, DECODE_CONTEXT = (1, 64), 4096  # sequences, and tokens of each that are in the cache


def product_rate(recipe: Recipe, world: int, part: str | None = None) -> float:
    """Return the FLOP/s of a step's matrix products, of all parts or of one.

    Raises ValueError for a device whose tiles are not known.
    """
    processor = processor_of(recipe.machine.name)
    if processor is None:
        problem, allowed = "is not a device whose tiles are known", ", ".join(PROCESSORS)
        raise mistake("machine.name", recipe.machine.name, problem=problem, allowed=allowed, fix="cluster=mi300x_8")
    listed = [item for item in products(*recipe_plan.sizes_of(recipe, world)) if part in (None, item.part)]
    flops = [item.calls * item.flops for item in listed]
    rates = [processor.relative_rate(item.m, item.n, item.k, item.batch, item.out_bytes) for item in listed]
    return (
        recipe.machine.gemm_tflops
        * 1e12
        * sum(flops)
        / sum(number / rate for number, rate in zip(flops, rates, strict=True))
    )


def faster_sizes(recipe: Recipe, world: int) -> dict[str, list[dict]]:
    """Return by key of STEPS the recipe's size and at most SHOWN faster ones near it, by the rate of the products.

    Returns:
        rows with value, vocabulary (rows of the embedding), tflops, gain over the recipe's size, and parameters.
    """
    result = {}
    for key, multiples in STEPS.items():
        value = get(recipe, key)
        near = near_sizes(value, (recipe.model.num_query_groups,) if key == HEADS else multiples, NEAR)
        recipes = {size: with_values(recipe, {key: size}) for size in (value, *near)}
        rates = {size: product_rate(row, world) for size, row in recipes.items() if recipe_plan.is_valid(row, world)}
        better = sorted((size for size in rates if rates[size] > (1 + LEAST_GAIN) * rates[value]), key=rates.get)[::-1]
        shapes = {size: recipe_plan.shape_of(recipes[size]) for size in (value, *better[:SHOWN])}
        result[key] = [
            {
                "value": size,
                "vocabulary": shape.vocab_size,
                "parameters": sum(count_parameters(shape).values()),
                "tflops": rates[size] / 1e12,
                "gain": rates[size] / rates[value] - 1,
            }
            for size, shape in shapes.items()
        ]
    return result


def widths(recipe: Recipe, world: int) -> list[dict]:
    """Return widths of experts with as many parameters in all experts as the recipe has, the narrowest first.

    Returns:
        rows with width, experts, active parameters, tflops of the experts' products, tokens_per_second of training a
        device (None where it is not predicted), and decode_<sequences>: ms of a token, for each of DECODE_BATCHES.
    """
    width, experts, machine = recipe.model.moe_ffn_hidden_size, recipe.model.num_experts, recipe.machine
    values = [
        {"model.moe_ffn_hidden_size": int(width * factor), "model.num_experts": int(experts / factor)}
        for factor in WIDTH_FACTORS
        if width * factor % 1 == experts / factor % 1 == 0
    ]
    rows, rates = [], (machine.gemm_tflops * 1e12, machine.copy_tb_per_s * 1e12)
    for changed in [row for row in (with_values(recipe, one) for one in values) if recipe_plan.is_valid(row, world)]:
        step = predict(changed, world)
        decode = {f"decode_{batch}": 1e3 * decode_seconds(step.shape, batch, *rates) for batch in DECODE_BATCHES}
        row = {"width": step.shape.moe_ffn_hidden_size, "experts": step.shape.num_experts, "active": step.active}
        row |= {"tflops": product_rate(changed, world, "experts") / 1e12, "tokens_per_second": step.tokens_per_second}
        rows.append(row | decode)
    return rows


def decode_seconds(shape: Shape, batch: int, gemm: float, copy: float, context: int = DECODE_CONTEXT) -> float:
    """Return the time in which one device decodes a token of each of `batch` sequences.

    The sequences' tokens take different experts by chance: of n experts, n (1 - (1 - 1/n)^batch) are read.
    """
    parts, n = count_parameters(shape), shape.num_experts
    read = n * (1 - (1 - 1 / n) ** batch)
    weights = sum(parts.values()) - parts["experts"] + parts["experts"] / n * read  # the embedding is the head
    keys = shape.cached_tokens(context)
    moved = WEIGHT_BYTES * weights + batch * keys / shape.num_layers * cache_bytes(shape, WEIGHT_BYTES)
    operations = forward_flops_by_part(shape, context) | {"attention": attention_flops(shape, keys)}
    flops = batch * sum(operations.values())
    return max(moved / copy, flops / gemm)


def percentages(rows: list[dict], width: int) -> dict[str, list[float]]:
    """Return the lines of a picture: per cent of the rates that the recipe's width reaches, by name; NaN where no rate is
    predicted, since the step does not fit.
    """
    own = next(row for row in rows if row["width"] == width)
    names = {"tflops": "rate of the experts' products", "tokens_per_second": "training, tokens/s"}
    lines = {name: [100 * (row[key] or nan) / own[key] for row in rows] for key, name in names.items() if own[key]}
    decoding = {f"decode_{n}": f"decoding, tokens/s, {n} sequence{'s' * (n > 1)}" for n in DECODE_BATCHES}
    return lines | {name: [100 * own[key] / row[key] for row in rows] for key, name in decoding.items()}

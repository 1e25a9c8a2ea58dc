# SPDX-License-Identifier: Apache-2.0
"""`zaya bench gemm`: rates of a recipe's matrix products, of better sizes, and of square products up to saturation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zaya_plugin.bench.options import with_data_path
from zaya_plugin.bench.probes import ON_ACCELERATOR, ON_CPU, Measured, product
from zaya_plugin.bench.results import WRONG, Column, Line, any_wrong, device_name, dtype_of, finish, only_device
from zaya_plugin.ground.progress import bar
from zaya_plugin.plan.products import DIRECTIONS, Product, square_product

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe

MULTIPLES = (64, 128, 256)  # of the sizes that are measured next to a recipe's own
SATURATED = 0.95  # share of the highest rate of a square product
SQUARES = {"cpu": (64, 128, 256, 512), "cuda": (256, 512, 1024, 2048, 4096, 8192, 16384)}
CALLS = {"cpu": 3, "cuda": 20}
MOST_REPEATED = {"cpu": 1e9, "cuda": 1e14}  # operations of a call that is measured more than once


def products_of(overrides: list[str]) -> tuple[list[Product], Recipe]:
    """Return the products of a recipe's step and the recipe. Raises ValueError for one that cannot run.

    The head has the vocabulary of the recipe's data where that can be read, else ZAYA1's.
    """
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.plan import products, recipe_plan
    from zaya_plugin.run.rank_plan import planned_ranks

    try:
        recipe = compose(overrides)
    except ValueError:  # of data.path, or one that the second attempt raises too
        recipe = compose(with_data_path(overrides))
    world = planned_ranks(recipe)
    validate(recipe, world)
    shape, layout, optim = recipe_plan.shape_of(recipe), recipe_plan.layout_of(recipe, world), recipe.optim
    listed = products.products(shape, layout, recipe_plan.batch_of(recipe, world))
    if optim.name == "muon":
        dtype_bytes = 4 if optim.muon_dtype == "fp32" else 2
        listed += products.update_products(shape, layout, dtype_bytes, optim.muon_split_gate_up, optim.muon_steps)
    return listed, recipe


def product_rates(listed: Sequence[Product], device, dtype) -> Iterator[Measured]:
    """Measure one product after the other, with a progress bar."""
    with bar("matrix products", len(listed), " products") as progress:
        for one in listed:
            yield product(one, device, dtype, 1 if one.flops > MOST_REPEATED[device.type] else CALLS[device.type])
            progress.update()


def run(options) -> int:
    """Measure; return 1 where a result is wrong. options: overrides of the recipe, output, commit and command."""
    listed, recipe = products_of(options.overrides)
    device, dtype = only_device(recipe.cluster.device), dtype_of(recipe)
    extent = (ON_CPU if device.type == "cpu" else ON_ACCELERATOR)[0]
    sizes = [(square_product(extent), None) for extent in SQUARES[device.type]]
    for own in listed:
        others = {own.rounded(multiple): multiple for multiple in reversed(MULTIPLES)}
        sizes += [(own, None), *((other, others[other]) for other in reversed(others) if other != own)]
    large, *results = product_rates([square_product(extent), *(sized for sized, _ in sizes)], device, dtype)
    rows = [
        {
            "name": sized.name,
            "direction": sized.direction,
            "multiple": multiple,
            **{key: getattr(sized, key) for key in ("m", "n", "k", "batch", "calls")},
            "gflop": sized.flops / 1e9,
            "ms": 1e3 * result.seconds,
            "tflops": result.rate / 1e12,
            "share": result.rate / large.rate,
            "wrong": result.wrong,
        }
        for (sized, multiple), result in zip(sizes, results, strict=True)
    ]
    squares = rows[: len(SQUARES[device.type])]
    own_rows = [row for row in rows[len(squares) :] if row["multiple"] is None]
    points = {"square products": squares}
    for row in own_rows:
        direction = row["direction"]
        points.setdefault(direction if direction in DIRECTIONS else f"Newton-Schulz, {direction}", []).append(row)
    best = max(squares, key=lambda row: row["tflops"])
    reached = (row["gflop"] for row in squares[:-1] if row["tflops"] >= SATURATED * best["tflops"])
    saturated = next(reached, None)  # not at the largest size, since larger ones may be faster
    finish(
        "gemm",
        options,
        device,
        rows,
        [
            Column("name", "product"),
            Column("direction", "direction"),
            Column("multiple", "rounded up to"),
            *(Column(key, key, ",") for key in ("m", "n", "k", "batch", "calls")),
            Column("gflop", "GFLOP", ".4g"),
            Column("ms", "ms", ".4f"),
            Column("tflops", "TFLOP/s", ".4g"),
            Column("share", f"of {extent:,} cubed", ".0%"),
            WRONG,
        ],
        title=f"Matrix products of {recipe.name}, {recipe.cluster.dtype}, {device_name(device)}",
        lines=[
            Line(name, [row["gflop"] for row in some], [row["tflops"] for row in some], some is squares)
            for name, some in points.items()
        ],
        x="GFLOP of a call",
        y="TFLOP/s",
        limit=(f"{extent:,} cubed", large.rate / 1e12),
        more={"large_tflops": large.rate / 1e12, "saturation_gflop": saturated},
    )
    text = f"square products: {best['tflops']:.4g} TFLOP/s at {best['gflop']:,.4g} GFLOP; they "
    rising = f"still rise at {squares[-1]['gflop']:,.4g} GFLOP, the largest that was measured"
    print(text + (f"reach {SATURATED:.0%} of that at {saturated:,.4g} GFLOP" if saturated else rising))
    return any_wrong(rows)

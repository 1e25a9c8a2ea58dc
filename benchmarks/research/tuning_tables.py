# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of Triton configurations that hip_ops ships, and counts the shared memory of a configuration."""

import json
from dataclasses import asdict
from pathlib import Path

from hip_ops.ops.grouped_product import configs as grouped_configs
from hip_ops.ops.grouped_product.configs import GroupedConfig
from hip_ops.ops.newton_schulz import product_configs
from hip_ops.ops.newton_schulz.product_configs import ProductConfig

SHARED_MEMORY = {"sm_90": 232448, "gfx942": 65536, "gfx950": 163840}  # maximum bytes of a block


def shared_memory(config: GroupedConfig | ProductConfig, out_size: int = 2, element_size: int = 2) -> int:
    """Return the bytes of operands in flight and, with descriptors, of one part of the results; the compiler adds
    barriers and may overlap them.
    """
    stages = config.num_stages * (config.block_m + config.block_n) * config.block_k * element_size
    return stages + config.block_m * config.block_n // config.parts * out_size * getattr(config, "descriptors", True)


def write_grouped(architecture: str, rows: list[dict], measured_on: str, path: Path = grouped_configs.TABLE) -> None:
    """Replace one device's rows, {"kind", "rows", "k", "n", "config": GroupedConfig, "ms"}; a new file starts from the
    shipped table.
    """
    table = grouped_configs.read_table(path if path.exists() else grouped_configs.TABLE)
    parts = [
        f'  {json.dumps(name)}: {{"measured_on": {json.dumps(part["measured_on"])}, "rows": [\n'
        f"{_lines(part['rows'], GroupedConfig())}\n  ]}}"
        for name, part in {**table, architecture: {"measured_on": measured_on, "rows": rows}}.items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    grouped_configs.read_table.cache_clear()
    grouped_configs._nearest.cache_clear()


def write_products(rows: list[dict], measured_on: str, path: Path = product_configs.TABLE) -> None:
    """Write the table of Newton-Schulz's products. rows: {"kind", "batch", "n", "m", "config": ProductConfig, "ms"}."""
    lines = _lines(rows, ProductConfig())
    path.write_text(f'{{\n  "measured_on": {json.dumps(measured_on)},\n  "rows": [\n{lines}\n  ]\n}}\n')
    product_configs._rows.cache_clear()


def _lines(rows: list[dict], default: GroupedConfig | ProductConfig) -> str:
    """Return the rows as JSON text, a line each, with the settings that differ from the defaults."""
    defaults, lines = asdict(default), []
    for row in rows:
        config = {key: value for key, value in asdict(row["config"]).items() if value != defaults[key]}
        lines.append("    " + json.dumps({**row, "config": config}))
    return ",\n".join(lines)

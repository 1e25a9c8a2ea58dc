# SPDX-License-Identifier: Apache-2.0
"""The rates of a device by its name in torch: those of the recipe (`machine.*`) that names it. No torch import."""

from functools import lru_cache

from zaya_plugin.config.schema import MachineConfig, Recipe

# A floor for any CPU core that is not shared with something else, this project's choice.
CPU = MachineConfig(
    name="CPU", gemm_tflops=0.005, copy_tb_per_s=0.001, link_gb_per_s=0.02, sources="a floor for one CPU core"
)

# TB/s of memory in the vendors' data sheets, by part of the device's name in torch.
DATA_SHEET_TB_PER_S = {"H100": 3.35, "H200": 4.8, "MI300X": 5.3, "MI325X": 6.0, "MI350X": 8.0, "MI355X": 8.0}


def named(name: str, architecture: str, units: int, gib: float) -> str:
    """Return torch's name of a device, with the model where the name lacks it.

    Containers often lack libdrm's table of names (amdgpu.ids), and an MI300X is then an "AMD Radeon Graphics".
    architecture: as in gcnArchName. units: compute units. gib: of the device's memory (an MI325X has 256). An MI350X
    has the units and the memory of an MI355X.
    """
    if architecture.startswith("gfx942") and units == 304 and gib < 200:
        model, known = "MI300X", "MI300X" in name
    else:
        model, known = "MI355X or MI350X", "MI35" in name or not architecture.startswith("gfx950") or units != 256
    return name if known else f"{name} ({model})"


@lru_cache
def recipe_of(name: str) -> Recipe:
    """Return the recipe of one node of the device called `name` in torch: that whose machine.name is part of `name`, or
    cluster=gpu.
    """
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.train_help import options

    for cluster in options("cluster"):
        recipe = compose([f"cluster={cluster}", "data.path=none"])
        if recipe.cluster.num_nodes == 1 and recipe.machine.name and recipe.machine.name in name:
            return recipe
    return compose(["cluster=gpu", "data.path=none"])


def machine_of(name: str) -> MachineConfig | None:
    """Return the expected rates of the device called `name` in torch; None for a device that no recipe names."""
    machine = CPU if name.startswith("CPU") else recipe_of(name).machine
    return machine if machine.name else None

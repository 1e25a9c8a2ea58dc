# SPDX-License-Identifier: Apache-2.0
"""Packaging of zaya_plugin: names, extras and the console script.

What is unusual here: `patches/` and `recipes/` lie at the top of the repository but install *inside* `zaya_plugin`, so no module
called `patches` or `recipes` ever lands in site-packages; and the plain install names none of torch, megatron-core,
transformer-engine and aiter, because on a ROCm machine those are builds that no index holds. Nothing is compiled at install time.
"""

import ast
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent

# import name -> folder; sub-packages follow their parent.
ROOM_DIRS = {
    "zaya_plugin": "zaya_plugin",
    "zaya_plugin.patches": "patches",
    "zaya_plugin.recipes": "recipes",
    "hip_ops": "hip_ops",
}

# Small, pure Python or already there under torch, and bounded from below only where an older one would not work:
# whatever a populated environment has must satisfy these as it is.
INSTALL_REQUIRES = ["hydra-core>=1.3", "omegaconf>=2.3", "numpy", "packaging", "PyYAML", "tqdm", "xxhash"]

EXTRAS = {
    # Everything that an empty Python >= 3.12 needs to train on the CPU. Never use it in an environment with a ROCm build of torch.
    "cpu": [
        "torch>=2.6",
        "megatron-core[training]>=0.19.2,<0.20",
        "triton; platform_system == 'Linux'",  # megatron-core 0.19 imports it unconditionally; the CPU builds of torch omit it
        "transformers>=5.13",  # the first with the Zaya classes
        "tokenizers",
        "safetensors",
        "wandb",
        "tensorboard",
        "psutil",  # megatron.core.dist_checkpointing needs it to save and does not declare it
        "einops",
    ],
    # `zaya data prepare`, with inputs of all formats; --tokenizer needs transformers too.
    "data": ["tokenizers", "zstandard", "pyarrow"],
    # Tasks of `zaya eval --tasks`.
    "eval": ["lm_eval>=0.4.9", "tokenizers"],
    "dev": [
        "zstandard",
        "pyarrow",
        "pytest>=8",
        "pytest-timeout",
        "pytest-xdist",
        "hypothesis",  # random shapes and parameter sets in the tests
        "ruff",
        "pre-commit",
        "setuptools>=70.1",  # the packaging tests build wheels without isolation
        "matplotlib",
        "emerging-optimizers; python_version >= '3.12'",  # compared against in the optimizer tests
    ],
}


def version() -> str:
    """Reads `__version__` without importing the package, so that building needs none of its requirements."""
    for node in ast.parse((ROOT / "zaya_plugin" / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__version__":
            return ast.literal_eval(node.value)
    raise ValueError("zaya_plugin/__init__.py assigns no __version__")


def packages() -> list[str]:
    found = []
    for name, folder in ROOM_DIRS.items():
        found += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]
    return found


setup(
    name="zaya_plugin",
    version=version(),
    description="ZAYA1 pretraining on AMD MI300X as a Megatron-core plugin, with a CPU demo",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    package_dir=ROOM_DIRS,
    packages=packages(),
    package_data={
        "zaya_plugin.recipes": ["**/*.yaml"],
        "zaya_plugin.aegis": ["rules.yaml"],
        "hip_ops": ["**/*.hip", "**/*.h", "**/*.json", "shipped/*/*.so"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["zaya = zaya_plugin.cli:main"]},
    zip_safe=False,
)

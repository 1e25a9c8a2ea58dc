# SPDX-License-Identifier: Apache-2.0
"""The packages of zaya_plugin; pyproject.toml holds the rest. Nothing is compiled at install time.

`patches/` and `recipes/` lie at the top of the repository but install *inside* `zaya_plugin`, so no module called `patches` or
`recipes` ever lands in site-packages.
"""

from setuptools import find_packages, setup

# import name -> folder; sub-packages follow their parent.
PACKAGE_DIRS = {
    "zaya_plugin": "zaya_plugin",
    "zaya_plugin.patches": "patches",
    "zaya_plugin.recipes": "recipes",
    "hip_ops": "hip_ops",
}

setup(
    package_dir=PACKAGE_DIRS,
    packages=[
        name
        for package, folder in PACKAGE_DIRS.items()
        for name in (package, *(f"{package}.{inner}" for inner in find_packages(folder)))
    ],
)

# SPDX-License-Identifier: Apache-2.0
"""Print the constraints of `zaya_plugin[cpu,dev,docs]` as installed in the Python that runs this: `.venv/bin/python
tools/pins.py`.

Unlike `pip freeze` it starts from the package's own requirements, so packages installed for other reasons are not in
constraints.txt. To upgrade: install the new versions into .venv, run the tests, then `.venv/bin/python tools/pins.py >
constraints.txt`.
"""

import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = """\
# The exact versions that `make demo` and `make test` install: zaya_plugin[cpu,dev,docs] and all its requirements.
# Written by `.venv/bin/python tools/pins.py > constraints.txt`. Constraints choose versions; they install nothing.
"""
# They build and install the other packages; no requirement names them.
BUILDERS = ("pip", "setuptools")


def closure(
    root: str = "zaya_plugin", extras: tuple[str, ...] = ("cpu", "dev", "docs")
) -> tuple[dict[str, str], set[str]]:
    """Return the installed requirements of `root[extras]`, canonical name -> version (without `root`), and the names
    that are not installed.
    """
    versions, missing = {}, set()
    todo, seen = [(root, ""), *((root, extra) for extra in extras), *((name, "") for name in BUILDERS)], set()
    while todo:
        name, extra = todo.pop()
        name = canonicalize_name(name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            missing.add(name)
            continue
        versions[name] = distribution.version.partition("+")[0]  # 2.13.0 also admits the build 2.13.0+cpu
        for line in distribution.requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                todo += [(requirement.name, ""), *((requirement.name, each) for each in requirement.extras)]
    versions.pop(canonicalize_name(root), None)
    return versions, missing


def main() -> int:
    versions, missing = closure()
    if missing:
        print(f"required but not installed: {', '.join(sorted(missing))}; run `make setup` first", file=sys.stderr)
        return 1
    print(HEADER + "\n".join(f"{name}=={version}" for name, version in sorted(versions.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())

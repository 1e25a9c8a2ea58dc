# SPDX-License-Identifier: Apache-2.0
"""Packages of the extras, which a command may require."""

from importlib.util import find_spec

from zaya_plugin.ground.errors import mistake


def require_packages(extra: str, *names: str) -> None:
    """Raise ValueError if a package of an extra is not installed; the message has the command that installs it."""
    if missing := [name for name in names if find_spec(name) is None]:
        problem = f"requires the package {' and '.join(missing)}, which is not installed"
        raise mistake(extra, problem=problem, fix=f"pip install 'zaya_plugin[{extra}]'")

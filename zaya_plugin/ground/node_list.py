# SPDX-License-Identifier: Apache-2.0
"""SLURM's notation of node lists."""

import re

from zaya_plugin.ground.option_numbers import MOST_RANKS

_ONE_HOST = r"(?:[^,\[\]]|\[\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*\])+"


def node_names(hosts: str) -> list[str]:
    """Return the names of a SLURM node list such as n[1-3,08],m1; raises ValueError for other text."""
    if not re.fullmatch(rf"{_ONE_HOST}(,{_ONE_HOST})*", hosts):
        raise ValueError("must be a node list such as n[1-3,08],m1")
    names = []
    for name in re.findall(_ONE_HOST, hosts):
        if (inner := re.search(r"\[([^\]]*)\]", name)) is None:
            names.append(name)
            continue
        for part in inner[1].split(","):
            low, _, high = part.partition("-")
            if not 0 <= int(high or low) - int(low) < MOST_RANKS:
                raise ValueError(f"{part}: must be a range of 1 to {MOST_RANKS:,} nodes")
            for number in range(int(low), int(high or low) + 1):
                names += node_names(f"{name[: inner.start()]}{number:0{len(low)}d}{name[inner.end() :]}")
    return names

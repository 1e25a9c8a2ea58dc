# SPDX-License-Identifier: Apache-2.0
"""The environment of the MI300X recipes differs from Primus' where primus_environment.yaml has a reason, and nowhere else;
docs/environment.md has the same table (ZAYA_UPDATE_GOLDEN=1 writes it).
"""

from pathlib import Path

import pytest
import yaml

from tests.generated_table import check_table
from zaya_plugin.config.compose import compose

FACTS = yaml.safe_load((Path(__file__).parent / "primus_environment.yaml").read_text())
PAGE = Path(__file__).parents[2] / "docs" / "environment.md"
BEGIN, END = "<!-- primus: made by tests/config/test_primus_environment.py -->\n", "<!-- end of primus -->\n"


def versions_of(file: str) -> list[str]:
    return FACTS["image_versions" if "Dockerfile" in file else "versions"]


def values_at(file: str, version: str) -> dict[str, str | None]:
    """Return the values of a file at one of its versions; None: the variable is not set there."""
    versions = versions_of(file)
    until = versions[: versions.index(version) + 1]
    return {
        name: [recorded[one] for one in until if one in recorded][-1] if isinstance(recorded, dict) else recorded
        for name, recorded in FACTS["files"][file].items()
    }


def of_primus(recipe: str) -> dict[str, str]:
    """Return the newest values of the files that a recipe is compared with."""
    values: dict[str, str] = {}
    for file in FACTS["recipes"][recipe]:
        at = values_at(file, versions_of(file)[-1])
        values |= {name: value for name, value in at.items() if value is not None}
    return values


def of_recipe(recipe: str) -> dict[str, str]:
    return compose([f"cluster={recipe}", "data.path=none"]).cluster.environment


def complaints(theirs: dict[str, str], ours: dict[str, str], explained: list[str]) -> list[str]:
    """Return a sentence for each difference without one reason, and each reason without a difference."""
    names = sorted(theirs.keys() | ours.keys() | set(explained))
    differ = {name for name in names if theirs.get(name) != ours.get(name)}
    return [
        f"{name}: Primus {theirs.get(name)}, recipe {ours.get(name)}, {explained.count(name)} reasons"
        for name in names
        if explained.count(name) != (name in differ)
    ]


def explained_of(recipe: str) -> list[str]:
    rows = [row for row in FACTS["differences"] if recipe in row["recipes"]]
    return [name for row in rows for name in row["variables"]]


@pytest.mark.parametrize("recipe", FACTS["recipes"])
def test_each_difference_from_primus_has_a_reason(recipe):
    theirs, ours, explained = of_primus(recipe), of_recipe(recipe), explained_of(recipe)
    assert complaints(theirs, ours, explained) == []
    dropped = {name: value for name, value in ours.items() if name != "HSA_KERNARG_POOL_SIZE"}
    more = ours | {"NCCL_IB_TC": "41" if recipe == "mi300x_8" else theirs["NCCL_IB_TC"]}
    for changed, name in (
        (dropped, "HSA_KERNARG_POOL_SIZE"),
        (ours | {"RCCL_MSCCL_ENABLE": "1"}, "RCCL_MSCCL_ENABLE"),
        (ours | {"NCCL_DEBUG": ""}, "NCCL_DEBUG"),
        (more, "NCCL_IB_TC"),
    ):
        assert [text.split(":")[0] for text in complaints(theirs, changed, explained)] == [name]


def test_the_facts_are_complete():
    for file, values in FACTS["files"].items():
        assert any(file in files for files in FACTS["recipes"].values()), file
        for name, recorded in values.items():
            versions = versions_of(file)
            since = recorded if isinstance(recorded, dict) else {versions[0]: recorded}
            assert since.keys() <= {*versions} and versions[0] in since, (file, name)
            assert all(value is None or isinstance(value, str) for value in since.values()), (file, name)
    assert all(row["reason"].endswith(".") and row["variables"] for row in FACTS["differences"])
    # AMD's plugin moved into RCCL; before, the launcher loaded a library
    hook = "runner/helpers/hooks/03_enable_ainic.sh"
    plugin = [values_at(hook, version)["NCCL_NET_PLUGIN"] for version in ("v26.2", "v26.5.1", "fd1eeabb")]
    assert plugin == [None, "librccl-anp.so", "none"]


def table() -> str:
    """Return the differences as a Markdown table, and under it the variables that are as in Primus, each once."""
    lines = ["| in Primus | in the recipe | `cluster` | reason |", "|---|---|---|---|"]
    for row in FACTS["differences"]:
        theirs, ours = of_primus(row["recipes"][-1]), of_recipe(row["recipes"][-1])
        cells = []
        for values in (theirs, ours):
            shown = [f"`{name}={values[name]}`" for name in row["variables"] if name in values]
            cells.append(", ".join(shown) or "not set")
        lines.append(f"| {' | '.join(cells)} | {', '.join(row['recipes'])} | {row['reason']} |")
    known: set[str] = set()
    for recipe in FACTS["recipes"]:
        theirs, ours = of_primus(recipe), of_recipe(recipe)
        same = [name for name, value in ours.items() if theirs.get(name) == value and name not in known]
        known |= set(same)
        lines += ["", f"As in Primus, {recipe}: {', '.join(f'`{name}={ours[name]}`' for name in same)}."]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_table():
    check_table(PAGE, BEGIN, END, table(), "tests/config/test_primus_environment.py")

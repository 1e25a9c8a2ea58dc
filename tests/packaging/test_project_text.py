# SPDX-License-Identifier: Apache-2.0
"""No path of one machine, no package index host and no missing licence line in any file of the project."""

import ast
import re
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]

# In pieces, or this file would be its own first finding.
ROOTS = ("wo" + "rk", "ro" + "ot", "fa" + "rm")
MACHINE_PATH = re.compile(rf"(?<![\w.~\-}})/])/(?:{'|'.join(ROOTS)})(?:/|\b(?=[\s\"'`,:;)]|$))", re.MULTILINE)
INDEX_HOSTS = (
    "py" + "pi.org",
    "pythonhosted" + ".org",
    "download.pytorch" + ".org",
    "conda.anaconda" + ".org",
    "registry.npm" + "js.org",
)
HOST = re.compile("|".join(re.escape(host) for host in INDEX_HOSTS))


def findings(text: str) -> list[str]:
    return [match.group() for pattern in (MACHINE_PATH, HOST) for match in pattern.finditer(text)]


def test_no_machine_path_and_no_index_host(project_files):
    found = []
    for file in project_files:
        try:
            text = (REPO / file).read_text()
        except UnicodeDecodeError:
            continue  # a figure
        for number, line in enumerate(text.splitlines(), 1):
            found += [f"{file}:{number}: {each}" for each in findings(line)]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        f"cd /{ROOTS[0]}/main",
        f'open("/{ROOTS[1]}/.cache/x")',
        f"path=/{ROOTS[2]}/store",
        f"HOME is /{ROOTS[1]}",
        f"pip install --index-url https://{INDEX_HOSTS[2]}/whl/rocm6.4 torch",
        f"https://{INDEX_HOSTS[0]}/simple",
    ],
)
def test_the_check_sees(text):
    assert len(findings(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"runs/{ROOTS[0]}/a",
        f"$HOME/{ROOTS[0]}/x",
        f"~/{ROOTS[1]}/y",
        f"./{ROOTS[2]}/z",
        f"and/or/{ROOTS[1]}/of",
        f"the square {ROOTS[1]} / of",
        f"/{ROOTS[0]}space/megatron",
    ],
)
def test_the_check_lets_pass(text):
    assert findings(text) == []


def test_python_files_open_with_their_licence(project_files):
    files = [file for file in project_files if file.suffix == ".py" and (REPO / file).read_text()]
    assert [
        str(file)
        for file in files
        if not (REPO / file).read_text().startswith("# SPDX-License-Identifier: Apache-2.0\n")
    ] == []


def test_sources_parse_as_python_310(project_files):
    """Grammar only (match, type parameters, except*); `make lint` also knows the newer rules for f-strings."""
    for file in project_files:
        if file.suffix == ".py" and file.parts[0] in ("zaya_plugin", "patches", "recipes", "hip_ops"):
            ast.parse((REPO / file).read_text(), filename=str(file), feature_version=(3, 10))

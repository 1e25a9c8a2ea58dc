# SPDX-License-Identifier: Apache-2.0
"""The pages of docs/: what the code knows is generated, each opens in one way, is listed and short; links and names exist."""

import ast
import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from tools import docs
from zaya_plugin.config.train_help import GROUPS, options

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
LINK = re.compile(r"(?<!!)\[[^]\n]*\]\(([^)\s]+)\)")
# Made by tools/docs.py, by a test, by the fault lab or by the commands of a page, or compared with a file.
GENERATED = re.compile(
    r"<!-- (?:generated|recorded|primus|code|faults|emerging-optimizers)\b.*?<!-- (?:end of|/)[^>]*-->", re.DOTALL
)


def test_generated_parts_are_up_to_date():
    assert docs.outdated() == [], "run: .venv/bin/python -m tools.docs"
    for page, marker in (
        ("keys.md", "| `optim.lr` | `0.0006` | highest learning rate | `--lr` | warns |"),
        ("keys.md", "| `data.path` | must be given |"),
        ("commands.md", "### zaya data pack"),
        ("checks.md", "known problems\n"),
        ("failures.md", " classes ("),
    ):
        assert marker in PAGES[page]


def test_a_change_of_the_code_changes_a_page(monkeypatch):
    from zaya_plugin.commands import table

    monkeypatch.setitem(table.HEADINGS["Train"], "train", ("train:parser", "another purpose"))
    assert "Another purpose." in docs.commands()


@pytest.mark.parametrize("page", [name for name in PAGES if name not in ("index.md", "log.md")])
def test_a_page_opens_in_one_way_and_is_short(page):
    title, opening, *_ = PAGES[page].split("\n\n")
    assert re.fullmatch(r"# [^\n]+", title) and opening.startswith("After this page you ")
    assert "```bash" in "".join(PAGES[page].splitlines(keepends=True)[:24]), "a command to try"
    assert len(GENERATED.sub("", PAGES[page]).splitlines()) <= 200


def test_all_pages_together_are_short():
    written = [GENERATED.sub("", text).splitlines() for name, text in PAGES.items() if name != "log.md"]
    assert sum(map(len, written)) <= 2600, "move history and figures to docs/log.md, and facts of the code to the code"


def test_the_index_lists_every_page_once():
    listed = docs.LINK.findall(PAGES["index.md"])
    assert sorted(file for _, file in listed) == sorted(set(PAGES) - {"index.md"})
    assert re.findall(r"^## (.*)$", PAGES["index.md"], re.MULTILINE) == ["Start", "How-to", "Reference", "Evidence"]


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page, as the repository's web page makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    targets = [target for target in LINK.findall(re.sub(r"`[^`\n]*`", "", text)) if "://" not in target]
    broken = []
    for target in targets:
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or anchor and anchor not in anchors(file.read_text()):
            broken.append(f"{path.name}: {target}")
    return broken


def test_links_of_pages_and_readme_lead_somewhere():
    paths = [
        *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
        *sorted((ROOT / "docs").glob("*.md")),
    ]
    assert [line for path in paths for line in broken_links(path, path.read_text())] == []
    assert broken_links(paths[0], "[a](docs/none.md) [b](docs/data.md#none) [c](docs/data.md#limits)") == [
        "README.md: docs/none.md",
        "README.md: docs/data.md#none",
    ]


def test_the_walks_name_what_exists():
    walks = re.findall(r"^\d+\. `([\w/]+\.py)` (`\w+`.*)$", PAGES["architecture.md"], re.MULTILINE)
    assert len(walks) == 4 * 10
    for file, text in walks:
        names = {getattr(node, "name", None) for node in ast.walk(ast.parse((ROOT / file).read_text()))}
        name, *others = re.findall(r"`([\w.]+)`", text)
        assert name in names, f"{file} has no {name}"
        gone = [other for other in others if other.endswith(".py") and not any((ROOT / "zaya_plugin").rglob(other))]
        assert gone == [], file


def test_the_first_day_has_ten_commands_and_is_a_notebook():
    page = PAGES["first-day.md"]
    fences = re.findall(r"^```bash(?: network)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert sum(len(fence.splitlines()) for fence in fences) == 10
    cells = json.loads((ROOT / "docs" / "first-day.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert sources[1:] == [f"%%bash\n{fence.rstrip()}" for fence in fences[1:]]
    assert 'os.environ["PATH"]' in sources[0]


@pytest.mark.parametrize("package", ["hip_ops", "zaya_plugin"])
def test_every_public_name_has_a_section(package):
    exports = importlib.import_module(package).EXPORTS
    sections = re.findall(rf"^### {package}\.(\w+)$", PAGES["api.md"], re.MULTILINE)
    assert sections == list(exports) and len(sections) > 10


def test_a_public_name_without_docstring_is_refused(monkeypatch):
    monkeypatch.setattr(docs.ast, "get_docstring", lambda node: None)
    with pytest.raises(LookupError, match="ZayaConfig is public and has no docstring"):
        docs.api()


def test_every_option_of_every_group_is_named():
    for group in GROUPS:
        for option in options(group):
            assert f"`{option}`" in PAGES["recipes.md"], f"{group}={option}"


def test_citation_and_changelog_name_the_version():
    from zaya_plugin import __version__

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"], citation["cff-version"]) == (__version__, "Apache-2.0", "1.2.0")
    releases = re.findall(r"^## \[(.*)\](?: - (\d{4}-\d\d-\d\d))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert releases[:2] == [("Unreleased", ""), (__version__, str(citation["date-released"]))]
    for form in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        assert yaml.safe_load(form.read_text()).keys() == {"name", "description", "body"}


def test_the_readme_is_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 110

# SPDX-License-Identifier: Apache-2.0
"""`make docs`: the site is built without a warning, offline, with search; a broken link fails the build."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.pictures.browser import Browser

ROOT = Path(__file__).parents[2]


def build(source: Path, target: Path) -> subprocess.CompletedProcess:
    if importlib.util.find_spec("sphinx") is None:
        if os.environ.get("CI") == "true":
            pytest.fail("sphinx is not installed: run `make setup`", pytrace=False)
        pytest.skip("sphinx is not installed: the extra docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_of_make():
    makefile = (ROOT / "Makefile").read_text()
    assert "-m sphinx -q -W --keep-going -b html docs build/docs\n" in makefile


def test_the_site_is_built_without_a_warning(tmp_path):
    done = build(ROOT / "docs", tmp_path / "site")
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert pages <= {path.stem for path in (tmp_path / "site").glob("*.html")}
    index = (tmp_path / "site" / "index.html").read_text()
    assert all(f'href="{page}.html"' in index for page in pages - {"index"}), "the navigation has every page"
    assert not re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', index), (
        "nothing comes from a network"
    )
    assert "data-theme" in index and 'name="color-scheme" content="light dark"' in index
    assert "context_parallel" in (tmp_path / "site" / "searchindex.js").read_text()
    assert (tmp_path / "site" / "llms.txt").read_text().startswith("# zaya_plugin\n")


@pytest.mark.parametrize(
    "line, message",
    [
        ("[a](none.md)", "cross-reference target not found: 'none.md'"),
        ("[a](index.md#none)", "local id not found in doc 'index': 'none'"),
        ("[a](../benchmarks/none.json)", "'../benchmarks/none.json'"),
    ],
)
@pytest.mark.slow
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path, line, message):
    source = tmp_path / "docs"
    source.mkdir()
    shutil.copy(ROOT / "docs" / "conf.py", source)
    (source / "llms.txt").write_text("")
    (source / "index.md").write_text(f"# Title\n\n## Start\n\n- [one](one.md)\n\n{line}\n")
    (source / "one.md").write_text("# One\n")
    done = build(source, tmp_path / "site")
    assert done.returncode == 1 and message in done.stderr


@pytest.mark.slow
def test_every_page_fits_in_light_and_dark(tmp_path, require_tool):
    """No page is wider than a screen, requests anything or has an error. SCREENSHOTS: a folder for the pictures."""
    build(ROOT / "docs", tmp_path / "site")
    pictures = Path(os.environ.get("SCREENSHOTS", tmp_path))
    browser = Browser(require_tool("chromium-headless-shell"), tmp_path / "browser")
    loaded = "document.readyState == 'complete' ? 1 : null"
    pages = sorted({path.stem for path in (ROOT / "docs").glob("*.md")} - {"log"})
    wrong = []
    for page in pages:
        for width, dark in [(1280, False), (1280, True), (390, False), (390, True)]:
            browser.open(tmp_path / "site" / f"{page}.html", width, dark, ready=loaded)
            shot = f"{page}-{width}-{'dark' if dark else 'light'}"
            back = browser.value("getComputedStyle(document.body).backgroundColor")
            fits = browser.value("document.documentElement.scrollWidth") == width
            local = all(address.startswith("file:") for address in browser.requests)
            if not fits or not local or browser.errors or back != ("rgb(19, 20, 22)" if dark else "rgb(255, 255, 255)"):
                wrong.append((shot, fits, local, browser.errors, back))
            if page in ("index", "first-day", "architecture", "mi300x", "keys"):
                browser.save(pictures / f"{shot}.png")
    browser.open(tmp_path / "site" / "search.html", 390, ready=loaded)
    browser.value("document.querySelector('input[name=q]').value = 'router'")
    browser.value("Search.performSearch('router')")
    results = "document.querySelectorAll('#search-results li').length || null"
    end = time.monotonic() + 60
    while browser.value(results) is None:
        assert time.monotonic() < end, "the search finds nothing"
        time.sleep(0.1)
    browser.close()
    assert wrong == []

# SPDX-License-Identifier: Apache-2.0
"""The site of these pages: `make docs`. Sphinx reads the Markdown as it lies in this folder; the navigation is made of
the lists in index.md, so that the repository's web page and the site have one.
"""

import re
import shutil
from pathlib import Path

HERE = Path(__file__).parent
LINK = re.compile(r"^- \[[^]]+\]\(([\w-]+)\.md\)", re.MULTILINE)

project = "zaya_plugin"
extensions = ["myst_parser"]
html_theme = "furo"  # light and dark; everything it needs is in the built folder, and the search works from a disk
html_title = "zaya_plugin"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["site.css"]
nitpicky = True
myst_heading_anchors = 4


def add_navigation(app, name: str, source: list[str]) -> None:
    """Give index.md a hidden toctree a heading."""
    if name != "index":
        return
    _, *sections = source[0].split("\n## ")
    for section in sections:
        pages = "\n".join(LINK.findall(section))
        source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {section.splitlines()[0]}\n\n{pages}\n```\n"


def copy_markdown(app, error) -> None:
    """Put llms.txt into the site, and the pages to which it leads."""
    if error is None and app.builder.name == "html":
        for path in (HERE / "llms.txt", *HERE.glob("*.md")):
            shutil.copy(path, app.outdir)


def setup(app) -> dict[str, bool]:
    app.connect("source-read", add_navigation)
    app.connect("build-finished", copy_markdown)
    return {"parallel_read_safe": True}

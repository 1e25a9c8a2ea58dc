# SPDX-License-Identifier: Apache-2.0
"""Write a picture as the file that its name asks for."""

from pathlib import Path

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.packages import require_packages
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.pictures.content import Page

LIBRARIES = {".html": "bokeh", ".png": "matplotlib"}  # suffix -> the library that draws it


def check_picture(path: Path) -> None:
    """Check, before work begins, that a picture can be written to `path`.

    Raises:
        ValueError: its suffix is another, its folder does not exist, or the library that draws it is not installed.
    """
    if path.suffix not in LIBRARIES:
        problem = "the name of a picture has another ending"
        raise mistake("--output", path, problem=problem, allowed=", ".join(LIBRARIES), fix="--output run.html")
    if not path.absolute().parent.is_dir():
        raise mistake("--output", path, problem="its folder does not exist", fix=f"--output {path.name}")
    require_packages("pictures", LIBRARIES[path.suffix])


def write_picture(page: Page, path: Path) -> None:
    """Draw `page` as an HTML page or as a PNG, by the suffix of `path`. See `check_picture`."""
    if path.suffix == ".png":
        from zaya_plugin.pictures.still import png as draw
    else:
        from zaya_plugin.pictures.page import html as draw
    write_whole(path, draw(page))

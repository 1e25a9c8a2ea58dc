# SPDX-License-Identifier: Apache-2.0
"""Write a picture as the file that its name asks for."""

from collections.abc import Collection
from pathlib import Path

from zaya_plugin.ground.packages import require_packages
from zaya_plugin.ground.whole_file import check_ending, check_folder, write_whole
from zaya_plugin.pictures.content import Page

LIBRARIES = {".html": "bokeh", ".png": "matplotlib"}  # suffix -> the library that draws it


def check_picture(path: Path, option: str = "--output", endings: Collection[str] = tuple(LIBRARIES)) -> None:
    """Check, before work begins, that a picture can be written to `path`, the value of `option`.

    Raises:
        ValueError: its suffix is none of `endings`, its folder does not exist, or the library that draws it is not
            installed.
    """
    check_ending(path, option, endings)
    check_folder(path, option)
    require_packages("pictures", LIBRARIES[path.suffix])


def write_picture(page: Page, path: Path) -> None:
    """Draw `page` as an HTML page or as a PNG, by the suffix of `path`. See `check_picture`."""
    if path.suffix == ".png":
        from zaya_plugin.pictures.still import png as draw
    else:
        from zaya_plugin.pictures.page import html as draw
    write_whole(path, draw(page))

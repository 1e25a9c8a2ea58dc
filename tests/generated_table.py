# SPDX-License-Identifier: Apache-2.0
"""Compares the generated part of a page with what generates it."""

import os
from pathlib import Path


def check_table(page: Path, begin: str, end: str, table: str, test: str) -> None:
    """Assert that `page` has `table` between the lines `begin` and `end`; ZAYA_UPDATE_GOLDEN=1 writes it there.

    test: the file that generates the table, for the message.
    """
    before, _, rest = page.read_text().partition(begin)
    expected = f"{before}{begin}{table}{end}{rest.partition(end)[2]}"
    if os.environ.get("ZAYA_UPDATE_GOLDEN"):
        page.write_text(expected)
    assert page.read_text() == expected, f"run: ZAYA_UPDATE_GOLDEN=1 python -m pytest {test}"

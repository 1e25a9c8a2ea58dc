# SPDX-License-Identifier: Apache-2.0
"""docs/first-day.md as a notebook, and its recorded outputs: `python -m tools.first_day CHECKOUT` runs the commands of
the page in a fresh clone, which needs nothing but a Python, and writes into the page what they print, their seconds, and
those of the CPU, which other programs do not change.
"""

import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "first-day.md"
CELL = re.compile(
    r"```bash\n(.*?)```\n\n(<!-- recorded -->\n(?:```text\n(.*?)```\n)?<!-- end of recorded -->\n)", re.DOTALL
)
SHOWN = 3, 4  # the first and the last lines of an output
# The kernel of a notebook starts in docs/, and each cell has a shell of its own.
SETTING = """import os

os.chdir("..")
os.environ["PATH"] = os.path.abspath(".venv/bin") + ":" + os.environ["PATH"]
"""


def notebook() -> str:
    """Return the page as a notebook (nbformat 4.5): a cell a fence, with the recorded output."""
    text, cells, end = PAGE.read_text(), [], 0

    def add(kind: str, source: str, **more) -> None:
        lines = source.strip("\n").splitlines(keepends=True)
        cells.append({"cell_type": kind, "id": f"cell-{len(cells)}", "metadata": {}, "source": lines, **more})

    for match in CELL.finditer(text):
        add("markdown", text[end : match.start()])
        if not end:
            add("code", SETTING, execution_count=None, outputs=[])
        printed = {"output_type": "stream", "name": "stdout", "text": (match[3] or "").splitlines(keepends=True)}
        add("code", f"%%bash\n{match[1]}", execution_count=None, outputs=[printed])
        end = match.end()
    add("markdown", text[end:])
    metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def record(checkout: Path) -> None:
    """Run the fences of the page in a checkout, and write their outputs into the page."""
    environment = {**os.environ, "PATH": f"{checkout}/.venv/bin:{os.environ['PATH']}"}

    def run(match: re.Match) -> str:
        begun, cpu = time.monotonic(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        command = ["bash", "-ec", match[1]]
        done = subprocess.run(command, cwd=checkout, env=environment, stdout=-1, stderr=-2, text=True, check=True)
        printed = done.stdout.replace(str(checkout), "/home/me/zaya_plugin").replace(sys.base_prefix, "/usr")
        lines, (first, last) = printed.splitlines(), SHOWN
        if len(lines) > first + last:
            lines[first:-last] = ["..."]
        cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - cpu
        lines.append(f"({time.monotonic() - begun:.0f} s; {cpu:.0f} s of CPU time)")
        print(match[1], *lines, sep="\n", flush=True)
        fence = "```text\n" + "".join(f"{line.rstrip()}\n" for line in lines) + "```\n"
        return f"```bash\n{match[1]}```\n\n<!-- recorded -->\n{fence}<!-- end of recorded -->\n"

    PAGE.write_text(CELL.sub(run, PAGE.read_text()))


if __name__ == "__main__":
    record(Path(sys.argv[1]).resolve())
    print("next: python -m tools.docs")

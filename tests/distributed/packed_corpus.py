# SPDX-License-Identifier: Apache-2.0
"""A prepared data set of short documents, so that a short sequence holds several, and counting them in what was trained
on.
"""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import numpy as np

from tests.running import zaya


def short_documents(folder: Path, tokenizer: Path, lines: int = 1) -> Path:
    """Documents of `lines` lines of the standard library, of at most 24 characters each; the prepared data set."""
    text = [
        line.strip()[:24]
        for name in ("ast.py", "argparse.py", "socket.py", "typing.py")
        for line in (Path(sysconfig.get_paths()["stdlib"]) / name).read_text().splitlines()
        if len(line.strip()) > 8
    ]
    documents = ("\n".join(text[i : i + lines]) for i in range(0, len(text), lines))
    (folder / "short.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    done = zaya(
        "data",
        "prepare",
        "--input",
        str(folder / "short.jsonl"),
        "--output",
        str(folder / "data"),
        "--tokenizer",
        str(tokenizer),
        "--workers",
        "1",
        "--valid-fraction",
        "0",
    )
    assert done.returncode == 0, done.stdout
    return folder / "data"


def boundaries(result: dict, data: Path) -> list[int]:
    """For each step and sequence of a result of layout_run.py: how many documents end in it with another behind
    them.
    """
    eod = json.loads((data / "manifest.json").read_text())["tokenizer"]["eod_id"]
    return [int((np.frombuffer(sequence, dtype=np.int64)[:-1] == eod).sum()) for _, sequence in result["ids"]]

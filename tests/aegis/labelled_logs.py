# SPDX-License-Identifier: Apache-2.0
"""The labelled logs of tests/aegis/corpus/: failures with the cause, node and rank that a person would name."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")
COLLECTED = 1795345200  # 2026-11-22 11:00:00 UTC: when the files were last written


@dataclass
class Case:
    name: str
    cause: str
    node: str | None
    rank: int | None
    files: dict[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            os.utime(path, (COLLECTED, COLLECTED))
        return folder


def cases() -> list[Case]:
    found: list[Case] = []
    for path in sorted(CORPUS.glob("*.txt")):
        for part in re.split(r"(?m)^#### ", path.read_text())[1:]:
            head, *sections = re.split(r"(?m)^==> (?=\S+$)", part)
            name, cause, node, rank = (None if word == "-" else word for word in head.split("\n")[0].split(" | "))
            case = Case(name, cause, node, None if rank is None else int(rank))
            for section in sections:
                file, _, text = section.partition("\n")
                several = re.search(r"\{(\d+)-(\d+)\}", file)
                for number in range(int(several[1]), int(several[2]) + 1) if several else [None]:
                    one = file if number is None else file.replace(several[0], str(number))
                    case.files[one] = text.replace("{rank}", str(number)).rstrip("\n") + "\n"
            found.append(case)
    return found

# SPDX-License-Identifier: Apache-2.0
"""The shell commands of the pages and of README. A fence ```bash runs as printed, a page after the other; a word behind `bash` names
why it cannot run on a CPU, and then its `zaya` lines are read by their parsers, as all lines are, and their recipes
compose. Runs of the demo are made short: the same command with few steps.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from zaya_plugin.commands.table import parser_of, split
from zaya_plugin.config.compose import compose
from zaya_plugin.run.stages import compose_curriculum

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md")) if path.name != "log.md"}
PAGES["README.md"] = (ROOT / "README.md").read_text().replace("\n.venv/bin/zaya ", "\nzaya ")
FENCE = re.compile(r"^```bash *([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCES = [(page, *match.groups()) for page, text in PAGES.items() for match in FENCE.finditer(text)]
WHY_NOT_ON_A_CPU = ("", "gpu", "cluster", "network", "site")
ENDS = (">", ">>", "|", "&&", ";", "do", "done")
RUN_ELSEWHERE = {
    "make demo": ".ci/run",
    "make test": ".ci/run",
    "python -m pytest tests/packaging/test_import_rules.py": "Makefile",
}
# Pages that make by themselves what the others take for granted.
MADE_BY = {"first-day.md": ("exports",), "fine-tune.md": ("exports",)}
# A few seconds of CPU time; the others run in `make test-all`.
QUICK = ("checks.md", "commands.md")
SHORT = """#!{python}
import os, sys
words = sys.argv[1:]
if any(word.startswith("experiment=") and ("_demo" in word or "finetune_chat" in word) for word in words):
    keys = {{"stage.train_iters": 4, "stage.eval_iters": 1, "logger.wandb": "false"}}
    warm_up = ("demo_1:optim.lr_warmup_iters", "demo_3:optim.lr_warmup_iters")
    keys |= dict.fromkeys(warm_up if "curriculum" in words else ("optim.lr_warmup_iters",), 1)
    position = len(words) - words[::-1].index("--") if "--" in words else 0
    words = [word for word in words if word.partition("=")[0] not in keys]
    words += [f"{{key}}={{value}}" for key, value in keys.items()] * (words[position] in ("train", "curriculum", "zaya"))
os.execv({python!r}, [{python!r}, "-m", "zaya_plugin.cli", *words])
"""


def zaya_lines(script: str) -> Iterator[list[str]]:
    """Yield the words behind each `zaya` of a script, also behind srun, `zaya aegis run --` and in `sh -c '...'`."""
    script = re.sub(r"\$\(\([^)]*\)\)", "104", re.sub(r" *\\\n *", " ", script))
    script = re.sub(r'"?\$\([^)]*\)"?', "value", script)
    for line in re.sub(r"\$[A-Za-z_]\w*", "1", script).splitlines():
        words = shlex.split(line, comments=True) if re.search(r"\bzaya\b", line) else []
        for position, word in enumerate(words):
            if "zaya " in word:
                yield from zaya_lines(word)
            elif word == "zaya" and words[position - 1 : position] != ["-t"]:  # a tag of docker build
                behind = words[position + 1 :]
                yield behind[: next((place for place, one in enumerate(behind) if one in ENDS), len(behind))]


LINES = [(page, words) for page, _, script in FENCES for words in zaya_lines(script)]
RECIPES = [(page, words) for page, words in LINES if any(word.startswith("experiment=") for word in words)]


def test_every_fence_says_where_it_runs():
    assert [(page, why) for page, why, _ in FENCES if why not in WHY_NOT_ON_A_CPU] == []
    untold = [
        page
        for page, text in PAGES.items()
        if re.search(r"^```(?:sh|shell|console|)\n(?:zaya|python|srun|pip|make) ", text, re.MULTILINE)
    ]
    assert untold == [], "a shell command stands in a fence ```bash"
    assert len(LINES) > 100 < len(RECIPES) + 60


def test_every_command_is_read_by_its_parser(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("my_recipes", "my"):
        (tmp_path / folder).mkdir()
    for page, words in LINES:
        command, rest = split(words)
        try:
            parser_of(command).read(rest) if "--help" not in rest else None
        except ValueError as error:
            pytest.fail(f"{page}: zaya {shlex.join(words)}: {error}")
    with pytest.raises(ValueError, match="no such option"):
        parser_of("data check").read(["data/web", "--length", "4"])


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("page", "words"), RECIPES, ids=[f"{page}-{number}" for number, (page, _) in enumerate(RECIPES)]
)
def test_the_recipe_of_a_command_composes(page, words):
    command, rest = split(words)
    if {"--config-dir", "--"} & {*rest}:
        return  # a recipe of the reader's, or a command behind `--`, which has a line of its own
    options = parser_of(command).read(rest)
    overrides = [word for word in options.overrides if not (getattr(options, "multirun", False) and "," in word)]
    overrides += ["data.path=nowhere"] * (not any(word.startswith("data.path=") for word in overrides))
    whole = command == "curriculum" or getattr(options, "curriculum", False)
    (compose_curriculum if whole else compose)(overrides)


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with `zaya`, which shortens runs of the demo, `python` and `torchrun`."""
    folder = tmp_path_factory.mktemp("bin")
    for name, text in (
        ("zaya", SHORT.format(python=sys.executable)),
        ("python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'),
        ("torchrun", f'#!/bin/sh\nexec "{sys.executable}" -m torch.distributed.run "$@"\n'),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(script: str, folder: Path, programs: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HOME": str(folder),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # what a notebook hands down, and is not installed here
    }
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def checkout(folder: Path) -> Path:
    """Return a folder that looks like a checkout, whose data/ and runs/ are its own."""
    for name in ("Makefile", "benchmarks", "docs", "examples", "recipes", "tests", "tools", "zaya_plugin", "hip_ops"):
        (folder / name).symlink_to(ROOT / name)
    return folder


CHAT = '{"messages": [{"role": "user", "content": "Say %d"}, {"role": "assistant", "content": "The number %d."}]}\n'


@pytest.fixture(scope="module")
def reader(tmp_path_factory, programs) -> Path:
    """What the pages take for granted: datasets, chats, a trained run and its export."""
    folder = checkout(tmp_path_factory.mktemp("reader"))
    (folder / "chats.jsonl").write_text("".join(CHAT % (number, number) for number in range(60)))
    (folder / "notes.jsonl").write_text("".join(f'{{"text": "note number {n} of many"}}\n' for n in range(60)))
    run(
        "zaya data prepare --input stdlib --output data/stdlib --train-bpe 2048 --valid-fraction 0.1\n"
        "cp -r data/stdlib data/web; cp -r data/stdlib data/code\n"
        "zaya train experiment=cpu_demo run_dir=runs/mine stage.eval_at_start=true\n"
        "zaya checkpoint export runs/mine --output exports/mine\n",
        folder,
        programs,
    )
    return folder


def script_of(page: str) -> str:
    text = "\n".join(script for name, why, script in FENCES if name == page and not why)
    for line, where in RUN_ELSEWHERE.items():
        if line in text:
            assert line.split()[0] in (ROOT / where).read_text()
            text = text.replace(line, ":")
    return text.replace('export PATH="$PWD/.venv/bin:$PATH"', ":")


@pytest.mark.parametrize("page", QUICK)
def test_the_commands_of_a_quick_page_run(page, tmp_path, programs):
    run(script_of(page), checkout(tmp_path), programs)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({page for page, why, _ in FENCES if not why} - {*QUICK}))
def test_the_commands_of_a_page_run(page, tmp_path, programs, reader):
    folder = tmp_path / "reader"
    shutil.copytree(reader, folder, symlinks=True)
    for name in MADE_BY.get(page, ()):
        shutil.rmtree(folder / name)
    run(script_of(page), folder, programs)

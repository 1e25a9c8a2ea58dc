# SPDX-License-Identifier: Apache-2.0
"""A small corpus, and the command run in this process or in one of its own."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from zaya_plugin import cli
from zaya_plugin.data.indexed_dataset import read_index

REPOSITORY = Path(__file__).resolve().parents[1]


def make_texts(count: int, seed: int = 0, words: int = 60) -> list[str]:
    """Texts of made-up words with umlauts, CJK, emoji, code and odd white space."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 8))) for _ in range(300)]
    vocabulary += ["Größe", "日本語", "🙂", "def f(x):\n    return x", "\t", "  ", "<|end", "\r\n", "0.125", "naïve"]
    return [" ".join(rng.choices(vocabulary, k=rng.randint(words // 2, words))) for _ in range(count)]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    return make_texts(300)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory, texts) -> Path:
    """300 documents as jsonl under the field "text"."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_text("".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)))
    return path


@pytest.fixture(scope="session")
def run():
    """Calls the command in this process with one worker by default; returns its exit status."""

    def call(*argv) -> int:
        argv = [str(argument) for argument in argv]
        return cli.main(["data", "prepare", *argv, *([] if "--workers" in argv else ["--workers", "1"])])

    return call


@pytest.fixture(scope="session")
def start():
    """Starts the command in a process of its own and returns it. Its signals have their default dispositions, also where
    these tests run in the background, with SIGINT ignored. before: called in the new process.
    """

    def call(*argv, before=lambda: None) -> subprocess.Popen:
        def begin():
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
                signal.signal(number, signal.SIG_DFL)
            before()

        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "zaya_plugin.cli", "data", "prepare", *map(str, argv)]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=begin
        )

    return call


@pytest.fixture(scope="session")
def prepared(tmp_path_factory, corpus, run) -> Path:
    """The corpus prepared with a BPE of 400 entries and a fifth of it for validation. Not to be changed."""
    output = tmp_path_factory.mktemp("prepared") / "out"
    assert run("--input", corpus, "--output", output, "--train-bpe", 400, "--valid-fraction", 0.2, "--quiet") == 0
    return output


@pytest.fixture(scope="session")
def read_tokens():
    """Lists of token ids, one for each document, of a prefix; read without Megatron."""

    def read(prefix) -> list[list[int]]:
        indexed = read_index(str(prefix))
        raw = np.fromfile(f"{prefix}.bin", indexed.dtype)
        lengths = np.fromfile(f"{prefix}.idx", "<i4", indexed.sequences, offset=34)
        return [part.tolist() for part in np.split(raw, np.cumsum(lengths)[:-1])]

    return read


@pytest.fixture(scope="session")
def contents():
    """Every file of a dataset by name, with the one field taken out that may differ between equal runs."""

    def read(directory) -> dict[str, bytes]:
        found = {
            str(path.relative_to(directory)): path.read_bytes()
            for path in sorted(Path(directory).rglob("*"))
            if path.is_file()
        }
        manifest = json.loads(found["manifest.json"])
        assert manifest.pop("written_at").endswith("+00:00")
        return {**found, "manifest.json": json.dumps(manifest).encode()}

    return read

# SPDX-License-Identifier: Apache-2.0
"""A command says what it is doing while it still imports torch, in this test one whose import does not end."""

import os
import subprocess

import pytest

from tests.running import MICRO, command

TORCH = "import time\ntime.sleep(120)\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("generate", "model", "--prompt", "a"), "zaya: loading torch and Megatron"),
        (("train", *MICRO, "run_dir=run", "data.path={corpus}"), "zaya: starting "),
        pytest.param(
            ("checkpoint", "import", "model", "--output", "out"),
            "zaya: loading torch and Megatron",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["generate", "train", "import"],
)
def test_the_first_line_does_not_wait_for_torch(tmp_path, corpus, words, line):
    for name, text in {"torch/__init__.py": TORCH, "model/config.json": '{"model_type": "zaya"}'}.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    (tmp_path / "model" / "model.safetensors").touch()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command(*(word.format(corpus=corpus) for word in words)),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert any(text.startswith(line) for text in process.stderr), "torch was waited for"
        process.kill()

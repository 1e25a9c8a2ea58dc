# SPDX-License-Identifier: Apache-2.0
"""Test the table, record and picture that the commands of `zaya bench` share."""

import json
import sys
from argparse import Namespace
from pathlib import Path

import torch

from zaya_plugin.bench.results import BYTES, Column, Line, finish, table
from zaya_plugin.pictures.chart import bytes_text, save_of_record

ROWS = [
    {"bytes": 2**20, "name": "copy", "tb_per_s": 1.5, "share": 0.3},
    {"bytes": 2**33, "name": "triad", "tb_per_s": 4.0, "share": None},
]
COLUMNS = [
    Column("bytes", "size", BYTES),
    Column("name", "kernel"),
    Column("tb_per_s", "TB/s", ".2f"),
    Column("share", "of peak", ".0%"),
    Column("absent", "not shown"),
]


def finished(output):
    finish(
        "hbm",
        Namespace(command="zaya bench hbm", commit="abc", output=output),
        torch.device("cpu"),
        ROWS,
        COLUMNS,
        title="Memory",
        lines=[Line("copy", [2**10, 2**20, 2**33], [0.1, 1.5, 4.0])],
        x="bytes of an array",
        y="TB/s",
        limit=("data sheet", 5.0),
        more={"group": 1},
    )


def test_table_puts_text_left_numbers_right_and_leaves_cells_without_a_value_empty():
    assert table(ROWS, COLUMNS).splitlines() == [
        " size  kernel  TB/s  of peak",
        "1 MiB  copy    1.50      30%",
        "8 GiB  triad   4.00",
    ]
    assert [bytes_text(n) for n in (0, 512, 1536, 2**50)] == ["0 B", "512 B", "1.5 KiB", "1024 TiB"]


def test_record_holds_everything_and_draws_its_picture(tmp_path, capsys):
    finished(tmp_path / "bench")
    written = json.loads((tmp_path / "bench/hbm.json").read_text())
    assert written["rows"] == ROWS and written["schema"] == "zaya bench hbm/1"
    assert (written["command"], written["commit"], written["group"]) == ("zaya bench hbm", "abc", 1)
    assert written["device"].startswith("CPU") and written["versions"]["torch"] == torch.__version__
    assert written["picture"]["limit"] == ["data sheet", 5.0] and written["picture"]["lines"][0]["y"][1] == 1.5
    output = capsys.readouterr().out
    assert "ceiling: data sheet, 5 (TB/s)" in output and str(Path("bench") / "hbm.png") in output
    drawn = (tmp_path / "bench/hbm.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    (tmp_path / "bench/hbm.png").unlink()
    assert save_of_record(tmp_path / "bench/hbm.json").read_bytes() == drawn


def test_without_matplotlib_the_line_names_the_command_that_draws_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    finished(tmp_path)
    line = capsys.readouterr().out.splitlines()[-1]
    assert "pip install 'zaya_plugin[pictures]'" in line and f"chart {tmp_path / 'hbm.json'}" in line
    assert [path.name for path in tmp_path.iterdir()] == ["hbm.json"]

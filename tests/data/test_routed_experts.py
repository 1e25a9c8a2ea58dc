# SPDX-License-Identifier: Apache-2.0
"""Routed experts as texts of servers and as files of --routed-experts."""

import base64
import io
import json

import numpy as np
import pytest

from zaya_plugin.config.compose import compose
from zaya_plugin.data.routed_experts import begin_file, check_form, decoded, encoded, open_file, write_sequences

ROWS = np.array([[[0], [-1], [16]], [[3], [2], [1]]], np.int16)


def as_npy(values: np.ndarray) -> bytes:
    np.save(file := io.BytesIO(), values)
    return file.getvalue()


def test_the_forms_of_both_servers():
    stored = np.load(io.BytesIO(base64.b64decode(encoded(ROWS))))
    assert stored.dtype == np.int16 and stored.tolist() == ROWS.tolist()
    of_sglang = base64.b64encode(ROWS.astype(np.int32).tobytes()).decode()
    for text in (encoded(ROWS), of_sglang):
        assert decoded(text, 2, 3).dtype == np.int16 and decoded(text, 2, 3).tolist() == ROWS.tolist()
    short = base64.b64encode(b"12345").decode()
    for text, tokens, layers in ((encoded(ROWS), 2, 4), (encoded(ROWS), 3, 3), ("no base64", 2, 3), (short, 1, 1)):
        with pytest.raises(
            ValueError, match=rf"^routed_experts=.*: cannot be read for {tokens} tokens in {layers} lay"
        ):
            decoded(text, tokens, layers)


@pytest.mark.parametrize(
    "data, layers, found",
    [
        (as_npy(np.zeros((6, 4, 1), np.int16)), 2, r"it holds int16 \[6, 4, 1\]"),
        (as_npy(np.full((2, 3, 1), 0.5)), 3, r"it holds float64 \[2, 3, 1\]"),
        (as_npy(np.full((2, 3, 1), 70000, np.int32)), 3, "it holds numbers from 70000 to 70000"),
        (np.full((2, 3, 1), 70000, np.int32).tobytes(), 3, "it holds numbers from 70000 to 70000"),
        # As int32 these are 5 and 0, a possible routing of one token.
        (np.array([5, 0, 0, 0, 0, 0], np.int16).tobytes(), 3, "it holds 12 bytes; int32 values have 24"),
    ],
)
def test_numbers_that_are_no_routing_of_the_model_are_refused(data, layers, found):
    with pytest.raises(ValueError, match=rf"^routed_experts=.*: cannot be read for 2 tokens in {layers} .*{found}"):
        decoded(base64.b64encode(data).decode(), 2, layers)


def test_a_new_run_begins_its_record_anew_and_one_that_continues_keeps_it(tmp_path):
    path = tmp_path / "routing.npy"
    recipe = compose(["experiment=cpu_demo", f"stage.record_routing={path}"])
    begin_file(recipe, 0)
    open_file(recipe, "stage.record_routing", "r+")[3] = 5
    begin_file(recipe, 10)
    assert (np.load(path)[3] == 5).all()
    begin_file(recipe, 0)
    assert (np.load(path) == -1).all() and not [*tmp_path.glob("*.part")]
    np.save(path, ROWS)
    for resumed_at in (0, 10):
        with pytest.raises(ValueError, match=rf"stage.record_routing={path}: holds int16 \(2, 3, 1\)"):
            begin_file(recipe, resumed_at)
    assert np.array_equal(np.load(path), ROWS)


def test_files(tmp_path):
    write_sequences(tmp_path / "a.npy", [([1, 2, 3], ROWS), ([1, 2], ROWS[:1])])
    assert np.load(tmp_path / "a.npy").tolist() == [*ROWS.tolist(), ROWS[0].tolist()]
    write_sequences(tmp_path / "a.jsonl", [([1, 2, 3], ROWS)])
    (line,) = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert line["tokens"] == [1, 2, 3] and decoded(line["routed_experts"], len(ROWS), 3).tolist() == ROWS.tolist()
    for name in ("a.bin", "nowhere/a.npy"):
        with pytest.raises(ValueError, match="--routed-experts=.*: cannot be written. Allowed: .npy or .jsonl"):
            check_form(tmp_path / name)

# SPDX-License-Identifier: Apache-2.0
"""The classes that routers chose, int16 [tokens, layers, 1]: of each token and layer the expert, -1 where the router is
free in a replay, the number of experts for the class that skips the MoE. As texts of inference servers, and as the file
of a stage's training samples. No torch import.
"""

import base64
import io
import json
from pathlib import Path

import numpy as np

from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.errors import mistake


def encoded(rows: np.ndarray) -> str:
    """Return int16 [tokens, layers, 1] as vLLM sends `routed_experts`: an .npy file in base64."""
    file = io.BytesIO()
    np.save(file, np.ascontiguousarray(rows, np.int16))
    return base64.b64encode(file.getvalue()).decode("ascii")


def decoded(text: str, tokens: int, layers: int) -> np.ndarray:
    """Return int16 [tokens, layers, 1] of a server's `routed_experts`: vLLM's .npy file in base64, or SGLang's int32
    values [tokens, layers, 1] in base64. Values without a header show their width by the number of tokens alone.

    Raises:
        ValueError: it is neither, of other tokens or layers, or with a number outside [-1, 32767].
    """
    try:
        data = base64.b64decode(text, validate=True)
        npy = data.startswith(b"\x93NUMPY")
        values = np.load(io.BytesIO(data), allow_pickle=False) if npy else np.frombuffer(data, np.int32)
        if npy and (values.dtype.kind not in "iu" or values.shape != (tokens, layers, 1)):
            raise ValueError(f"it holds {values.dtype} {list(values.shape)}")
        if not npy and len(values) != tokens * layers:
            raise ValueError(f"it holds {len(data)} bytes; int32 values have {4 * tokens * layers}")
        if values.size and (values.min() < -1 or values.max() > np.iinfo(np.int16).max):
            raise ValueError(f"it holds numbers from {values.min()} to {values.max()}")
        return values.astype(np.int16).reshape(tokens, layers, 1)
    except (ValueError, EOFError) as error:
        problem = f"cannot be read for {tokens} tokens in {layers} layers ({error})"
        allowed = "base64 of an .npy file (vLLM), or of int32 values (SGLang)"
        raise mistake("routed_experts", f"{text[:40]}...", problem=problem, allowed=allowed) from error


def check_form(path: Path) -> None:
    """Raise ValueError for a file of --routed-experts in an unknown form or without a folder."""
    if path.suffix not in (".npy", ".jsonl") or not path.absolute().parent.is_dir():
        raise mistake("--routed-experts", path, problem="cannot be written", allowed=".npy or .jsonl in a folder")


def write_sequences(path: Path, sequences: list[tuple[list[int], np.ndarray]]) -> None:
    """Write the file of --routed-experts. sequences: token ids and classes int16 [tokens, layers, 1] of each."""
    if path.suffix == ".npy":
        np.save(path, np.concatenate([rows for _, rows in sequences]))
    else:
        lines = (json.dumps({"tokens": tokens, "routed_experts": encoded(rows)}) + "\n" for tokens, rows in sequences)
        path.write_text("".join(lines))


def shape_of(recipe: Recipe) -> tuple[int, int, int]:
    """Return the shape of the file of a stage: the tokens of its samples one behind another, its layers, and 1."""
    return sample_count(recipe) * recipe.stage.seq_length, recipe.model.num_layers, 1


def begin_file(recipe: Recipe, resumed_at: int) -> None:
    """Make stage.record_routing with -1 for all tokens. A run that continues keeps what it has written.

    Raises:
        ValueError: the path has another file, which stays.
    """
    path, shape = Path(recipe.stage.record_routing), shape_of(recipe)
    if path.exists():
        open_file(recipe, "stage.record_routing")
        if resumed_at:
            return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    stored = np.lib.format.open_memmap(part, mode="w+", dtype=np.int16, shape=shape)
    for first in range(0, len(stored), 1 << 20):
        stored[first : first + (1 << 20)] = -1
    stored.flush()
    part.rename(path)


def open_file(recipe: Recipe, key: str, mode: str = "r") -> np.memmap:
    """Return the file of stage.record_routing or stage.replay_routing, which `key` names, mapped into memory.

    Raises:
        ValueError: it is missing, or not of this stage's samples and model.
    """
    path, shape = getattr(recipe.stage, key.partition(".")[2]), shape_of(recipe)
    try:
        stored = np.load(path, mmap_mode=mode, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise mistake(key, path, problem=f"cannot be read: {error}", allowed=f"an .npy file int16 {shape}") from error
    if (stored.dtype, stored.shape) != (np.dtype(np.int16), shape):
        problem = f"holds {stored.dtype} {stored.shape}"
        allowed = f"int16 {shape}: tokens of the stage's samples, layers, 1"
        raise mistake(key, path, problem=problem, allowed=allowed, fix=f"{key}=<a file of this stage>")
    return stored

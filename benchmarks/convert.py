# SPDX-License-Identifier: Apache-2.0
"""Time, processor time and memory of `zaya checkpoint import` and `export`, and of the same disk alone.

    python3 benchmarks/convert.py --layers 40 --folder /scratch/convert

Writes published files of random bf16 weights (layers of ZAYA1-base and its embedding), as `zaya checkpoint export` names
them. Each round measures in turns, with the page cache emptied of the files that are read: plain reading, plain writing
with fsync, a plain copy (one piece is read, then written), the import and the export. The share of the disk's rate is
the time of plain writing, and of the plain copy, over that of the command.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
from result_record import described, write

from zaya_plugin.checkpoint.convert import hf_config, safetensors_files
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.exporting import SHARD, ordered
from zaya_plugin.checkpoint.convert.values import TensorContent
from zaya_plugin.checkpoint.direct_file import PIECE

BASE = dict(hidden_size=2048, num_attention_heads=8, num_query_groups=2, kv_channels=128, num_experts=16)
BASE |= dict(moe_ffn_hidden_size=2048, router_hidden_size=256, vocab_size=262272)


def publish(folder: Path, layers: int) -> int:
    """Write published files of random weights, whose skip class cannot be chosen, and return their bytes."""
    folder.mkdir(parents=True)
    model = Description(num_layers=layers, **BASE)
    noise = torch.randn(PIECE // 2, generator=torch.Generator().manual_seed(1)).bfloat16()

    def values(row) -> Iterator[memoryview]:
        count = torch.Size(row.shape).numel()
        if row.name.endswith("balancing_biases"):
            biases = torch.zeros(count, dtype=torch.bfloat16)
            biases[-1] = -1
            yield memoryview(biases.view(torch.uint8).numpy())
            return
        for start in range(0, count, len(noise)):
            yield memoryview(noise[: min(len(noise), count - start)].view(torch.uint8).numpy())

    tensors = [
        TensorContent(row.name, torch.bfloat16, row.shape, partial(values, row)) for row in ordered("native", model)
    ]
    groups = safetensors_files.shards(tensors, SHARD)
    names = safetensors_files.file_names(len(groups))
    for name, group in zip(names, groups, strict=True):
        safetensors_files.write_file(folder / name, group)
    safetensors_files.write_index(folder, groups, names)
    (folder / "config.json").write_text(json.dumps(hf_config.write("native", model, "bfloat16")))
    return sum(tensor.bytes for tensor in tensors)


def forget(folder: Path) -> None:
    """Remove the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def pieces(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(PIECE):
                yield piece


def plain_read(source: Path, _: Path) -> None:
    for _ in pieces(source):
        pass


def plain_write(source: Path, target: Path) -> None:
    size, piece = sum(path.stat().st_size for path in source.glob("*.safetensors")), os.urandom(PIECE)
    _write(target / "plain", (piece[: min(PIECE, size - at)] for at in range(0, size, PIECE)))


def plain_copy(source: Path, target: Path) -> None:
    _write(target / "copy", pieces(source))


def _write(path: Path, parts: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())


def command(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "zaya_plugin.cli", "checkpoint", *map(str, words)], check=True)


def import_(source: Path, target: Path) -> None:
    command("import", source, "--output", target / "checkpoint")


def export(_: Path, target: Path) -> None:
    command("export", target.parent / "imported", "--output", target / "export", "--tokenizer", "none")


MEASURED = {"read": plain_read, "write": plain_write, "copy": plain_copy, "import": import_, "export": export}


def timed(work, source: Path, target: Path) -> dict[str, float]:
    """Run `work` with files that are not cached; a command's start of Python and torch is in its time."""
    forget(source)
    forget(target.parent / "imported")
    target.mkdir()
    before, begun = os.times(), time.perf_counter()
    work(source, target)
    seconds, after = time.perf_counter() - begun, os.times()
    shutil.rmtree(target)
    used = sum(getattr(after, name) - getattr(before, name) for name in USED)
    return {"seconds": seconds, "processor_seconds": used}


USED = ("user", "system", "children_user", "children_system")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=40, help="of ZAYA1-base; default: 40, all")
    parser.add_argument(
        "--folder", type=Path, required=True, help="on the disk to measure; takes three times the bytes"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commit")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        source, target = Path(temporary, "published"), Path(temporary, "work")
        size = publish(source, options.layers)
        command("import", source, "--output", Path(temporary, "imported"))
        rounds = [{name: timed(work, source, target) for name, work in MEASURED.items()} for _ in range(options.rounds)]
    seconds = {name: median(each[name]["seconds"] for each in rounds) for name in MEASURED}
    found = {
        "layers": options.layers,
        "bytes": size,
        "gb_per_second": {name: size / 1e9 / value for name, value in seconds.items()},
        "processor_seconds_per_gb": {
            name: median(each[name]["processor_seconds"] for each in rounds) / (size / 1e9) for name in MEASURED
        },
        "import_share": {plain: seconds[plain] / seconds["import"] for plain in ("write", "copy")},
        "export_share": {plain: seconds[plain] / seconds["export"] for plain in ("write", "copy")},
        "largest_gib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20,
        "rounds": rounds,
    }
    write(described(options.commit, "CPU") | found, f"convert-{options.layers}-cpu")


if __name__ == "__main__":
    main()

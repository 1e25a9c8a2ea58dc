# SPDX-License-Identifier: Apache-2.0
"""Time and memory of `zaya checkpoint reshape` for layers of ZAYA1-base: fp32 weights, momenta and AdamW's moments.

    python3 benchmarks/reshape.py --layers 8 --folder /scratch/reshape

The folder needs room for twice the checkpoint, which is printed and checked before anything is written.

Writes a checkpoint of random values as 8 ranks would: a matrix under Muon whole in one file, other parameters cut into
boxes at the shards' borders, the model's weights under a second name for the same bytes. Then it reshapes it to 64
files, and compares every tensor of both as torch's own loader reads them.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from result_record import described, write
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.ground.errors import mistake
from zaya_plugin.optim.sharding.boxes import boxes
from zaya_plugin.plan.flops import Shape, count_parameters

STEP, RANKS, FILES = 1000, 8, 64
ZAYA1_BASE = dict(
    hidden_size=2048,
    num_attention_heads=8,
    num_query_groups=2,
    kv_channels=128,
    num_experts=16,
    moe_ffn_hidden_size=2048,
    router_hidden_size=256,
    vocab_size=262272,
)
MEASURED = """
import re, sys
from pathlib import Path
from zaya_plugin import cli
code = cli.main(sys.argv[1:])
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
sys.exit(code)
"""


def parameters(layers: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Name, shape and whether Muon updates it, of every parameter."""
    sizes = Shape(num_layers=layers, **ZAYA1_BASE)
    h, r, k = sizes.hidden_size, sizes.router_hidden_size, sizes.key_channels
    q, ffn = sizes.query_channels, sizes.moe_ffn_hidden_size
    yield "embedding.word_embeddings.weight", (sizes.vocab_size, h), False
    for layer in range(layers):
        here = f"decoder.layers.{layer}."
        for name, rows, columns in (("q", q, h), ("k", k, h), ("v_current", k // 2, h), ("v_delayed", k // 2, h)):
            yield f"{here}self_attention.linear_{name}.weight", (rows, columns), True
        yield f"{here}self_attention.linear_proj.weight", (h, q), True
        yield f"{here}self_attention.conv_qk_depthwise.weight", (q + k, 1, 2), False
        yield f"{here}self_attention.conv_qk_depthwise.bias", (q + k,), False
        yield f"{here}self_attention.conv_qk_grouped.weight", (q + k, sizes.kv_channels, 2), False
        yield f"{here}self_attention.conv_qk_grouped.bias", (q + k,), False
        yield f"{here}self_attention.temperature", (sizes.num_query_groups,), False
        for name, rows, columns in (("down_proj", r, h), ("fc1", r, r), ("fc2", r, r)):
            yield f"{here}mlp.router.{name}.weight", (rows, columns), True
            yield f"{here}mlp.router.{name}.bias", (rows,), False
        yield f"{here}mlp.router.out_proj.weight", (sizes.num_experts + 1, r), True
        yield f"{here}mlp.router.norm.weight", (r,), False
        if layer:
            yield f"{here}mlp.router.router_states_scale", (r,), False
        for name in ("input_layernorm", "pre_mlp_layernorm"):
            yield f"{here}{name}.weight", (h,), False
        for name in ("post_attention_residual", "post_mlp_residual"):
            for part in ("output_scale", "output_bias", "residual_scale", "residual_bias"):
                yield f"{here}{name}.{part}", (h,), False
        for expert in range(sizes.num_experts):
            yield f"{here}mlp.experts.linear_fc1.weight{expert}", (2 * ffn, h), True
            yield f"{here}mlp.experts.linear_fc2.weight{expert}", (h, ffn), True
    yield "decoder.layers.0.input_affine.scale", (h,), False
    yield "decoder.layers.0.input_affine.bias", (h,), False
    yield "decoder.final_layernorm.weight", (h,), False


def stored_bytes(layers: int) -> int:
    """Bytes of the tensors of a checkpoint: fp32 weights and momenta, and AdamW's second moments. Every layer but the
    first adds the same.
    """
    one, two = (
        sum(math.prod(shape) * 4 * (2 if muon else 3) for _, shape, muon in parameters(count)) for count in (1, 2)
    )
    return one + (layers - 1) * (two - one)


def check_room(folder: Path, layers: int) -> None:
    """Print how much disk is needed; raise ValueError if that is not free."""
    there = next(each for each in (folder, *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free

    def needed(count: int) -> float:  # source and target; archives, index and manifest take less than a hundredth
        return 2.02 * stored_bytes(count)

    print(
        f"{layers} layers: {stored_bytes(layers) / 1e9:.1f} GB, written twice; {needed(layers) / 1e9:.1f} GB are needed"
    )
    if free < needed(layers):
        fit = max(0, 1 + int((free - needed(1)) // (needed(2) - needed(1))))
        raise mistake(
            "--layers",
            layers,
            problem=f"needs {needed(layers) / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {there}",
            allowed=f"at most {fit} there" if fit else "",
            fix="--folder <on a larger disk>" + f", or --layers {fit}" * bool(fit),
        )


def write_source(folder: Path, layers: int) -> None:
    """The checkpoint of RANKS ranks."""
    count = sum(math.prod(shape) for _, shape, _ in parameters(layers))
    assert count == sum(count_parameters(Shape(num_layers=layers, **ZAYA1_BASE)).values()), "not ZAYA1-base's sizes"
    folder.mkdir(parents=True)
    files = [open(folder / f"__{rank}_0.distcp", "wb") for rank in range(RANKS)]
    described, storage, generator = {}, {}, torch.Generator().manual_seed(0)

    def store(value, rank: int) -> _StorageInfo:
        start, archive = files[rank].tell(), io.BytesIO()
        torch.save(value, archive)
        files[rank].write(archive.getbuffer())
        return _StorageInfo(f"__{rank}_0.distcp", start, archive.tell())

    common = "common_state/shard_0_1"
    described[common], storage[MetadataIndex(common)] = BytesStorageMetadata(), store([{"iteration": STEP}], 0)
    for number, (name, shape, muon) in enumerate(parameters(layers)):
        elements = math.prod(shape)
        shards = [(number % RANKS, 0, elements)]
        if not muon:
            shards = [(rank, elements * rank // RANKS, elements * (rank + 1) // RANKS) for rank in range(RANKS)]
        for state in ("param", "exp_avg") if muon else ("param", "exp_avg", "exp_avg_sq"):
            key, chunks = f"optimizer.state.{state}.{name}", []
            for rank, start, end in shards:
                for offset, sizes in boxes(shape, start, end):
                    chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(sizes)))
                    values = torch.randn(sizes, generator=generator)
                    storage[MetadataIndex(key, torch.Size(offset))] = store(values, rank)
            described[key] = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
        key = f"optimizer.state.param.{name}"
        of = described[key]
        described[name] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), of.size, of.chunks)
        for chunk in of.chunks:
            storage[MetadataIndex(name, chunk.offsets)] = storage[MetadataIndex(key, chunk.offsets)]
    for file in files:
        file.flush()
        os.fsync(file.fileno())
        file.close()
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(described, storage_data=storage)))
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    manifest.write(folder, STEP, {path.name: manifest.describe(path) for path in folder.iterdir()})


def compare(old: Path, new: Path) -> int:
    """Load each tensor of both by torch's loader, and return how many were compared to the bit."""
    index = FileSystemReader(old).read_metadata().state_dict_metadata
    tensors = {key: of for key, of in index.items() if isinstance(of, TensorStorageMetadata)}
    large = [[key] for key in tensors if "embedding" in key]
    small, count = [key for key in tensors if "embedding" not in key], 0
    for some in (*large, *(small[start : start + 60] for start in range(0, len(small), 60))):
        both = []
        for folder in (old, new):
            state = {key: torch.empty(tensors[key].size, dtype=tensors[key].properties.dtype) for key in some}
            dcp.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
            both.append(state)
        for key in some:
            bits = [
                state[key].view(torch.int16 if state[key].dtype == torch.bfloat16 else torch.int32) for state in both
            ]
            assert torch.equal(*bits), key
            count += 1
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, required=True, help="with room for twice the checkpoint")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    options = parser.parse_args()
    try:
        check_room(options.folder, options.layers)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    old, new = options.folder / "old", options.folder / "new"
    source = on_disk.folder(old / "checkpoints", STEP)
    write_source(source, options.layers)
    words = ["checkpoint", "reshape", str(old), "--output", str(new), "--files", str(FILES)]
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], stdout=subprocess.PIPE, text=True, check=True)
    seconds = time.perf_counter() - start
    target = on_disk.folder(new / "checkpoints", STEP)
    files = sorted(path.stat().st_size for path in target.glob("*.distcp"))
    result = {
        **described(options.commit),
        "layers": options.layers,
        "parameters": sum(math.prod(shape) for _, shape, _ in parameters(options.layers)),
        "source": {"files": RANKS, "bytes": sum(path.stat().st_size for path in source.glob("*.distcp"))},
        "target": {"files": len(files), "bytes": sum(files), "smallest": files[0], "largest": files[-1]},
        "seconds": round(seconds, 1),
        "peak_memory_bytes": int(done.stdout.split()[-1]) * 1024,
        "tensors_equal_to_the_bit": compare(source, target),
    }
    for written in (old, new):
        shutil.rmtree(written)
    result["command"] = result["command"].replace(str(options.folder), "FOLDER")
    write(result, "reshape-cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())

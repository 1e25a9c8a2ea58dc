# SPDX-License-Identifier: Apache-2.0
"""Import and export on disk: bit-equal in every direction, from shards, aliases and parts; kills, full disks, bad files."""

import errno
import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.convert.published import TINY, publish, tensors
from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert import exporting, verification
from zaya_plugin.checkpoint.convert.importing import import_model, open_source
from zaya_plugin.checkpoint.convert.tables import DOWN_PROJECTION, LAYOUTS, ROUTER_EPSILON
from zaya_plugin.checkpoint.convert.torch_dist import CheckpointTensors
from zaya_plugin.checkpoint.convert.values import whole


def imported(folder: Path, directory: Path, **options) -> Path:
    return import_model(open_source(folder, **options), directory)


def export(checkpoint: Path, output: Path, shard: int = exporting.SHARD, **options) -> Path:
    return exporting.export_model(exporting.plan(exporting.open_checkpoint(checkpoint), **options), output, shard=shard)


@pytest.fixture
def checkpoint(tmp_path) -> Path:
    return imported(publish(tmp_path / "published"), tmp_path / "checkpoint")


@pytest.mark.parametrize(("layout", "shards"), [("native", 1), ("native", 3), ("legacy", 3), ("smoe", 1)])
def test_round_trip_is_bit_equal(tmp_path, layout, shards):
    folder = publish(tmp_path / "published", layout, shards=shards)
    checkpoint = imported(folder, tmp_path / "checkpoint")
    output = export(checkpoint, tmp_path / "export", layout=layout, shard=4000)
    before, after = tensors(layout), {}
    for path in output.glob("*.safetensors"):
        after |= load_file(path)
    assert after.keys() == before.keys()
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    assert json.loads((output / "config.json").read_text()) == json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_one_model(tmp_path, layout):
    native = open_source(publish(tmp_path / "native"))
    names = {row.name: row.ours for row in exporting.ordered(layout, TINY)}

    def as_native(found):
        for name, ours in names.items():
            parts = [whole(native.tensors[each]) for each in ours]
            found[name] = (
                torch.stack(parts) if layout == "native" and found[name].dim() == 3 and len(parts) > 1 else parts[0]
            )

    source = open_source(publish(tmp_path / layout / "published", layout, change=as_native), TINY)
    # smoe's loaders decide an epsilon, for which an export to native changes weights
    one = replace(native, model=replace(native.model, router_norm_epsilon=ROUTER_EPSILON.get(layout)))
    assert verification.differences(one, source) == []
    checkpoint = import_model(source, tmp_path / "checkpoint")
    again = open_source(export(checkpoint, tmp_path / "export", layout="smoe" if layout == "smoe" else "native"))
    assert verification.differences(one, again) == []


def test_the_router_of_smoe_has_the_epsilon_of_its_loaders(tmp_path):
    """1e-6 in place of 1e-5: logits of an export to smoe, and of one back, are equal; unfolded they would differ."""

    def small(found):  # states for which the epsilon counts
        for name, tensor in found.items():
            tensor.mul_(3e-3 if ".gate.down_proj" in name else 1)

    native = open_source(publish(tmp_path / "published", change=small))
    sources = [native]
    for layout in ("smoe", "native"):
        checkpoint = import_model(sources[-1], tmp_path / f"to_{layout}")
        sources.append(open_source(export(checkpoint, tmp_path / layout, layout=layout, dtype="fp32")))
    _, smoe, back = sources
    assert (smoe.model.router_norm_epsilon, back.model.router_norm_epsilon) == (1e-6, None)
    for name in (part.format(l=1) for part in DOWN_PROJECTION):
        before, folded, again = (whole(source.tensors[name]).float() for source in sources)
        assert torch.equal(folded, before * 0.1**0.5) and torch.allclose(again, before, rtol=1e-6, atol=0)
    ids = [torch.arange(32)[None]]
    models = [(source.model, source.tensors) for source in sources] + [(smoe.model, native.tensors)]
    expected, *others = (verification.our_logits(*model, ids)[0] for model in models)
    errors = [((logits - expected).norm() / expected.norm()).item() for logits in others]
    assert errors[0] < 1e-5 and errors[1] < 1e-5 and errors[2] > 1e-3, errors


def test_what_a_checkpoint_of_an_import_holds(checkpoint):
    stored = CheckpointTensors(checkpoint)
    shapes, arguments = stored.shapes(), stored.arguments()
    assert len(shapes) == 15 * 2 + (15 + 2 * 12) * 2 + 6 - 3 + 3 * 2
    assert on_disk.problems(checkpoint.parent, 0) == [] and manifest.damaged(checkpoint) == []
    assert arguments.padded_vocab_size == 64 and arguments.rotary_base == 1_000_000 and arguments.bf16
    assert arguments.zaya["imported"]["layout"] == "native"
    router = "decoder.layers.1.mlp.router."
    biases = stored.values(router + "balancing_biases")
    assert biases.dtype == torch.float32 and whole(biases)[-1] == -1
    for name, dtype in (("exp_avg", torch.float32), ("exp_avg_sq", torch.float32), ("step", torch.int64)):
        state = whole(stored.values(router + f"balancing_{name}"))
        assert state.dtype == dtype and not state.any()


def test_megatron_reads_the_checkpoint(checkpoint):
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    source = exporting.open_checkpoint(checkpoint)
    wanted = {name: torch.zeros(values.shape) for name, values in source.tensors.items()}  # fp32, as optimizers have it
    asked = {name: ShardedTensor.from_rank_offsets(name, tensor) for name, tensor in wanted.items()}
    loaded = dist_checkpointing.load(asked, str(checkpoint))
    assert loaded["iteration"] == 0 and loaded["args"].num_layers == 2
    assert all(torch.equal(loaded[name], whole(values).float()) for name, values in source.tensors.items())
    tracker = checkpoint.parent / on_disk.TRACKER
    assert tracker.read_text() == "0"


def test_a_run_of_megatron_is_exported_from_parts_and_aliases(tmp_path, checkpoint):
    """A tensor in two parts, and model keys that point at the optimizer's fp32 bytes, as asynchronous saves store it."""
    import pickle

    from torch.distributed.checkpoint import FileSystemReader

    source = exporting.open_checkpoint(checkpoint)
    name = "decoder.layers.0.self_attention.linear_q.weight"
    value = whole(source.tensors[name]).float() + 1e-3  # has digits that bf16 lacks
    parts = [value[:20].clone(), value[20:].clone()]
    metadata = FileSystemReader(checkpoint).read_metadata()
    entry = metadata.state_dict_metadata[name]
    place = next(key for key in metadata.storage_data if key.fqn == name)
    old = metadata.storage_data.pop(place)
    entry.chunks = []
    with open(checkpoint / "extra.distcp", "wb") as file:
        for first, part in zip((0, 20), parts, strict=True):
            start = file.tell()
            torch.save(part, file)
            offset = torch.Size([first, 0])
            for key in (name, f"optimizer.state.param.{name}"):
                index = type(place)(key, offset)
                metadata.storage_data[index] = type(old)("extra.distcp", start, file.tell() - start)
            entry.chunks.append(
                type(metadata.state_dict_metadata["embedding.word_embeddings.weight"].chunks[0])(offset, part.shape)
            )
    metadata.state_dict_metadata[f"optimizer.state.param.{name}"] = entry
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    (checkpoint / manifest.NAME).unlink()
    manifest.write(checkpoint, 0, {path.name: manifest.describe(path) for path in checkpoint.iterdir()})
    output = export(checkpoint, tmp_path / "export", dtype="bf16")
    found = load_file(output / "model.safetensors")
    assert torch.equal(found["model.layers.0.self_attn.qkv_proj.q_proj.weight"], value.bfloat16())
    assert found["model.layers.0.mlp.gate.balancing_biases"].dtype == torch.float32
    output = export(checkpoint, tmp_path / "fp32", dtype="fp32")
    assert torch.equal(
        load_file(output / "model.safetensors")["model.layers.0.self_attn.qkv_proj.q_proj.weight"], value
    )


class Killed(BaseException):
    pass


def kill_after(count: int):
    """A progress function that ends the work after a number of bytes, as SIGKILL would."""
    done = 0

    def progress(size: int) -> None:
        nonlocal done
        done += size
        if done > count:
            raise Killed

    return progress


def test_a_killed_import_continues(tmp_path):
    source = open_source(publish(tmp_path / "published"))
    whole_one = import_model(source, tmp_path / "whole")
    size = sum(path.stat().st_size for path in whole_one.glob("*.distcp"))
    written = []
    for share in (0.1, 0.6, 0.9):
        with pytest.raises(Killed):
            import_model(source, tmp_path / "killed", kill_after(int(share * size)))
        assert on_disk.latest(tmp_path / "killed") == (None, [])
    kept = sorted((tmp_path / "killed").glob("*.unfinished/__*_0.distcp"))
    times = [path.stat().st_mtime_ns for path in kept]
    again = import_model(source, tmp_path / "killed", written.append)
    assert len(kept) == 2 and [(again / path.name).stat().st_mtime_ns for path in kept] == times
    for path in whole_one.glob("*.distcp"):
        assert (again / path.name).read_bytes() == path.read_bytes()
    assert manifest.damaged(again) == [] and not list(again.glob("*.part"))


def test_two_writers_of_one_output(tmp_path, checkpoint):
    """The second one is refused with the first one's process, which goes on; so of an import and of an export."""
    source, planned = open_source(tmp_path / "published"), exporting.plan(exporting.open_checkpoint(checkpoint))
    for write in (
        lambda *progress: import_model(source, tmp_path / "twice", *progress),
        lambda *progress: exporting.export_model(planned, tmp_path / "twice_out", *progress),
    ):
        refused = []

        def second(_: int, write=write, refused=refused) -> None:
            with pytest.raises(ValueError, match=f"another process is writing .* .process {os.getpid()} on ") as error:
                write()
            refused.append(error)

        folder = write(second)
        assert refused and folder.is_dir() and not list(tmp_path.glob("*.lock.*"))


def test_an_import_of_another_source_starts_over(tmp_path):
    one = publish(tmp_path / "one")
    with pytest.raises(Killed):
        import_model(open_source(one), tmp_path / "checkpoint", kill_after(150_000))

    other = open_source(publish(tmp_path / "other", change=lambda found: found["model.norm.weight"].mul_(2)))
    folder = import_model(other, tmp_path / "checkpoint")
    stored = exporting.open_checkpoint(folder).tensors["decoder.final_layernorm.weight"]
    assert torch.equal(whole(stored), whole(other.tensors["decoder.final_layernorm.weight"]))


def test_a_killed_export_continues(tmp_path, checkpoint):
    planned = exporting.plan(exporting.open_checkpoint(checkpoint))
    with pytest.raises(Killed):
        exporting.export_model(planned, tmp_path / "export", kill_after(30_000), shard=9000)
    unfinished = tmp_path / f"export{manifest.UNFINISHED}"
    kept = sorted(unfinished.glob("*.safetensors"))
    times = [path.stat().st_mtime_ns for path in kept]
    assert len(kept) >= 2 and not (tmp_path / "export").exists()
    output = exporting.export_model(planned, tmp_path / "export", shard=9000)
    assert [(output / path.name).stat().st_mtime_ns for path in kept] == times and not unfinished.exists()
    assert verification.differences(open_source(tmp_path / "published"), open_source(output)) == []


def test_a_full_disk_is_reported_and_the_work_continues(tmp_path, monkeypatch):
    source = open_source(publish(tmp_path / "published"))
    stock, count = os.pwrite, [0]

    def full(file, data, place):
        count[0] += 1
        if count[0] == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return stock(file, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        import_model(source, tmp_path / "checkpoint")
    assert import_model(source, tmp_path / "checkpoint").name == "iter_0000000"


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path):
    source, disk = open_source(publish(tmp_path / "published")), tmp_path / "disk"
    whole = exporting.plan(
        exporting.open_checkpoint(import_model(source, tmp_path / "checkpoint")), "native", None, None, None
    )
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", disk], capture_output=True).returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        with pytest.raises(OSError, match="GB more are needed"):
            import_model(source, disk / "checkpoint")
        with pytest.raises(OSError, match="GB more are needed"):
            exporting.export_model(whole, disk / "export")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


def broken(folder: Path, path: str, change) -> Path:
    data = bytearray((folder / path).read_bytes())
    (folder / path).write_bytes(change(data))
    return folder


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:-1], "file not fully covered"),
        (lambda data: data + b"x", "file not fully covered"),
        (lambda data: data[:5], "is not a valid safetensors file of 5 bytes"),
        (lambda data: b"\xff" * 8 + data[8:], "header too large"),
        (lambda data: data[:8] + b"{" + data[8:], "invalid JSON in header"),
        (lambda data: data.replace(b'"BF16"', b'"I16" ', 1), "the dtype I16; allowed are BF16, F16, F32"),
        (lambda data: data.replace(b"[8]", b"[9]", 1), "invalid shape, data type, or offset"),
        (lambda data: b"", "is not a valid safetensors file of 0 bytes"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, problem):
    folder = broken(publish(tmp_path / "published"), "model.safetensors", change)
    with pytest.raises(ValueError, match=problem) as error:
        open_source(folder)
    assert "model.safetensors" in str(error.value)


def test_bad_folders_are_refused(tmp_path):
    folder = publish(tmp_path / "published", shards=3)
    index, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00003.safetensors"
    content = json.loads(index.read_text())
    name, file = next(iter(content["weight_map"].items()))
    for change, problem in (
        ({name: "../../x.safetensors"}, "outside its folder"),
        ({name: "none.safetensors"}, "is missing, and"),
        ({name: second.name}, f"^{name}: .*places it in {second.name}"),
        ({"model.more": file}, "^model.more: .*lies in None"),
        ({name: 5}, "is not an index"),
    ):
        index.write_text(json.dumps({"weight_map": content["weight_map"] | change}))
        with pytest.raises(ValueError, match=problem):
            open_source(folder)
    for text, problem in (
        ("[", "is not JSON"),
        ('{"a":' * 100_000, "is not JSON .maximum recursion"),
        ('{"weight_map": [1]}', "is not an index"),
        (json.dumps(content)[:-1] + ', "weight_map": {}}', "weight_map comes twice"),
    ):
        index.write_text(text)
        with pytest.raises(ValueError, match=f"^{index}: .*{problem}"):
            open_source(folder)
    index.write_text(json.dumps(content))
    left = folder / "model.safetensors"  # transformers would read it, and not the files of the index
    shutil.copyfile(second, left)
    with pytest.raises(ValueError, match=f"^{left}: is not one of the files"):
        open_source(folder)
    left.unlink()
    index.unlink()
    shutil.copyfile(second, folder / "copy.safetensors")
    with pytest.raises(ValueError, match="in more than one file"):
        open_source(folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no"):
        open_source(tmp_path / "empty")
    with pytest.raises(ValueError, match="SOURCE=.*must be a folder or a name on the Hub"):
        open_source(tmp_path / "nowhere")


def with_header(change):
    """A change of a file's bytes by one of its header's entries."""

    def changed(data: bytes) -> bytes:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]

    return changed


def entry(shape=(0,), places=(10, 10)) -> dict:
    return {"dtype": "BF16", "shape": list(shape), "data_offsets": list(places)}


@pytest.mark.parametrize(
    ("layout", "change", "problem"),
    [
        ("native", {"model.norm.weight": entry((16.5,), (0, 32))}, "invalid JSON in header: .*16.5"),
        ("native", {"model.norm.weight": entry((-4, -4), (0, 32))}, "invalid JSON in header: .*-4"),
        ("native", {"model.norm.weight": entry(("16",), (0, 32))}, 'invalid JSON in header: .*"16"'),
        ("native", {"model.norm.weight": entry((16,), (0.0, 32.0))}, "invalid JSON in header: .*0.0"),
        ("native", {"model.norm.weight": entry((16,), (0, 32))}, "invalid offset for tensor"),
        ("native", {"model.norm.weight": entry((16,), (-32, 0))}, "invalid JSON in header: .*-32"),
        ("native", {"model.norm.weight": 5}, "invalid JSON in header"),
        ("native", {"model.layers.1000000000.x": entry()}, "count to 1000000001 layers"),
        (
            "legacy",
            {"model.layers.1.zaya_block.experts.local_experts.99999999.linear_fc1.weight": entry()},
            "count to 100000000 experts",
        ),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, layout, change, problem):
    def changed(header):
        end = max(each["data_offsets"][1] for name, each in header.items() if name != "__metadata__")
        for name, new in change.items():
            header[name] = entry((0,), (end, end)) if new == entry() else new

    fields = dict.fromkeys(("num_hidden_layers", "layer_types", "num_experts"), ...)  # nothing but names counts
    folder = publish(tmp_path / "published", layout, config=fields)
    with pytest.raises(ValueError, match=problem):
        open_source(broken(folder, "model.safetensors", with_header(changed)))


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        (dict(num_attention_heads=3), "3 query heads for 2 key/value heads"),
        (dict(num_query_groups=1), "1 key/value heads, half of which carry the delayed value"),
        (dict(kv_channels=7), "heads have 7 channels, and RoPE rotates pairs"),
    ],
)
def test_sizes_that_no_model_has_are_refused(tmp_path, sizes, problem):
    with pytest.raises(ValueError, match=f"^native tensors: {problem}"):
        open_source(publish(tmp_path / "published", model=replace(TINY, **sizes)))


def test_biases_that_are_no_numbers_are_refused(tmp_path):
    def change(found):
        found["model.layers.1.mlp.gate.balancing_biases"][3] = float("nan")

    with pytest.raises(ValueError, match=r"^decoder.layers.1.mlp.router.balancing_biases: holds NaN"):
        open_source(publish(tmp_path / "published", change=change))


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        ("config.json", '{"a":' * 100_000, "is not JSON .maximum recursion"),
        ("config.json", '{"rms_norm_eps": 1e-5, "rms_norm_eps": 1e-6}', "rms_norm_eps comes twice"),
        ("tokenizer.json", '{"model": {"vocab": {"a": 0, "b": 64}}}', "has 65 entries, and the embedding 64 rows"),
        (
            "tokenizer.json",
            '{"model": {"vocab": {"a": "0"}}}',
            "is not a valid tokenizer file .*'a' must have a number",
        ),
        ("tokenizer.json", "[" * 100_000, "is not JSON .maximum recursion"),
        ("generation_config.json", "{", "is not JSON"),
    ],
)
def test_a_bad_file_next_to_the_weights_is_refused_before_anything_is_written(tmp_path, file, text, problem):
    folder = publish(tmp_path / "published")
    (folder / file).write_text(text)
    with pytest.raises(ValueError, match=f"^{folder / file}: .*{problem}"):
        imported(folder, tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()


def test_missing_and_left_over_tensors_are_named(tmp_path):
    def change(found):
        del found["model.layers.1.mlp.gate.balancing_biases"]
        found["model.layers.0.mlp.gate.router_states_scale"] = torch.ones(8)

    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.gate\.balancing_biases is missing") as error:
        open_source(publish(tmp_path / "published", change=change))
    assert "model.layers.0.mlp.gate.router_states_scale is unknown" in str(error.value)


def test_a_size_of_zero_is_named(tmp_path):
    name = "model.layers.0.self_attn.qkv_proj.conv_qk_grouped.weight"
    folder = publish(tmp_path / "published", change=lambda found: found.update({name: torch.zeros(48, 0, 2)}))
    with pytest.raises(ValueError, match=rf"^{name}: has the shape \[48, 0, 2\]"):
        open_source(folder)


def test_one_missing_expert_is_named(tmp_path):
    name = "model.layers.3.zaya_block.experts.local_experts.10.linear_fc1.weight"
    with pytest.raises(ValueError, match=f"{name} is missing"):
        open_source(publish(tmp_path / "published", "legacy", change=lambda found: found.pop(name)))


def test_a_head_is_left_out_if_it_is_the_embedding(tmp_path):
    def tied(found):
        found["lm_head.weight"] = found["model.embed_tokens.weight"].clone()

    source = open_source(publish(tmp_path / "tied", change=tied))
    assert "lm_head.weight equals model.embed_tokens.weight" in source.notes[0]

    def untied(found):
        tied(found)
        found["lm_head.weight"][-1, -1] += 1

    with pytest.raises(ValueError, match=r"^lm_head\.weight: differs"):
        open_source(publish(tmp_path / "untied", change=untied))


def test_primus_needs_a_recipe_and_leaves_its_own_state(tmp_path):
    def change(found):
        found["decoder.layers.1.zaya_block.router.router_states_scale"] = torch.ones(8)
        for name in ("balance_m", "balance_v", "balance_step"):
            found[f"decoder.layers.3.zaya_block.router.{name}"] = torch.zeros(13)

    folder = publish(tmp_path / "published", "primus", change=change)
    with pytest.raises(ValueError, match="config.json: is missing"):
        open_source(folder)
    source = open_source(folder, replace(TINY, rotary_base=777, num_layers=9))
    assert source.model.rotary_base == 777 and source.model.num_layers == 2


def test_rows_of_padding_are_added_and_left_out(tmp_path):
    folder = publish(tmp_path / "published")
    source = open_source(folder)
    grown = source.with_rows(128)
    table = whole(grown.tensors["embedding.word_embeddings.weight"])
    assert table.shape == (128, 16) and not table[64:].any()
    assert torch.equal(table[:64], whole(source.tensors["embedding.word_embeddings.weight"]))
    with pytest.raises(ValueError, match="no tokenizer shows which rows are padding"):
        source.with_rows(63)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 59}}}))
    with pytest.raises(ValueError, match="has 60 entries"):
        source.with_rows(59)
    checkpoint = import_model(source.with_rows(60), tmp_path / "checkpoint")
    trained = exporting.open_checkpoint(checkpoint)
    assert trained.model.vocab_size == 60
    plan = exporting.plan(trained, tokenizer=folder, vocab_size=64)
    found = load_file(exporting.export_model(plan, tmp_path / "export") / "model.safetensors")
    embedding = found["model.embed_tokens.weight"]
    assert torch.equal(embedding[:60], table[:60].bfloat16()) and not embedding[60:].any()


def with_biases(skip: float, other: float = 0.02):
    def change(found):
        for name, tensor in found.items():
            if name.endswith("balancing_biases"):
                tensor[:-1], tensor[-1] = other, skip

    return change


def test_the_skip_class_is_checked_layer_by_layer(tmp_path):
    folder = publish(tmp_path / "published", change=with_biases(-0.5))
    checkpoint = imported(folder, tmp_path / "checkpoint")
    with pytest.raises(
        ValueError, match="balancing_biases: the skip class's entry is -0.5, transformers sets it to -1"
    ):
        export(checkpoint, tmp_path / "export")
    with pytest.raises(
        ValueError, match=r"model\.skip_output=zero: tokens may choose the skip class in layers \[0, 1\]"
    ):
        export(checkpoint, tmp_path / "export", layout="legacy")
    old = publish(tmp_path / "old", "legacy", change=with_biases(-0.5))
    source = open_source(old)
    assert source.model.skip_output == "identity" and "p * input" not in source.notes[0]
    checkpoint = import_model(source, tmp_path / "of_legacy")
    assert export(checkpoint, tmp_path / "as_legacy", layout="legacy").is_dir()


def test_smoe_is_refused_before_anything_is_written_where_its_loaders_find_no_heads(tmp_path):
    folder = publish(tmp_path / "published", model=replace(TINY, hidden_size=20))
    checkpoint = imported(folder, tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"^model.hidden_size=20: is no multiple of model.kv_channels=8"):
        export(checkpoint, tmp_path / "export", layout="smoe")
    assert not list(tmp_path.glob("export*"))


def test_generation_and_tokenizer_files_go_along(tmp_path):
    folder = publish(tmp_path / "published")
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    checkpoint = imported(folder, tmp_path / "checkpoint")
    arguments = exporting.open_checkpoint(checkpoint).arguments
    assert Path(arguments.tokenizer_model) == tmp_path / "checkpoint" / "tokenizer"
    output = export(checkpoint, tmp_path / "export", tokenizer=Path(arguments.tokenizer_model))
    assert (output / "chat_template.jinja").read_text() == "{{ messages }}" and (output / "tokenizer.json").is_file()
    stated = json.loads((output / "generation_config.json").read_text())
    assert stated == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "use_cache": True}
    for home in (tmp_path / "moved", tmp_path / "another"):  # the tokenizer next to the import is the import's
        shutil.copytree(tmp_path / "checkpoint", home)
        assert Path(exporting.open_checkpoint(home / checkpoint.name).tokenizer) == home / "tokenizer"
    card = (output / "README.md").read_text()
    assert "imported from published (native)" in card and "ran without --verify" in card


def test_an_existing_output_is_kept(tmp_path, checkpoint):
    with pytest.raises(ValueError, match="contains a checkpoint"):
        imported(tmp_path / "published", tmp_path / "checkpoint")
    run = tmp_path / "run"  # whose newest checkpoint would no longer be the one that it resumes from
    shutil.copytree(checkpoint, run / "iter_0000100")
    with pytest.raises(ValueError, match="contains a checkpoint"):
        imported(tmp_path / "published", run)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "mine").touch()
    with pytest.raises(ValueError, match="--output=.*exists"):
        export(checkpoint, tmp_path / "export")


def test_experts_and_biases_of_several_dtypes_are_not_rounded(tmp_path):
    def change(found):
        for name in (
            "model.layers.1.zaya_block.experts.local_experts.3.linear_fc1.weight",
            "model.layers.3.zaya_block.router.balancing_biases",
        ):
            found[name] = found[name].float() * 1.001

    folder = publish(tmp_path / "published", "legacy", change=change)
    checkpoint = imported(folder, tmp_path / "checkpoint")
    here, there = open_source(folder), open_source(export(checkpoint, tmp_path / "export"))
    for name, values in here.tensors.items():
        assert torch.equal(whole(values).float(), whole(there.tensors[name]).float()), name


def test_a_damaged_checkpoint_is_refused(tmp_path, checkpoint):
    part = checkpoint / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is damaged: .*__1_0.distcp has"):
        exporting.open_checkpoint(checkpoint)


def test_verify_finds_a_changed_byte_and_other_logits(tmp_path, checkpoint):
    planned = exporting.plan(exporting.open_checkpoint(checkpoint))
    output = exporting.export_model(planned, tmp_path / "export")
    bits, logits = verification.verify(planned, output)
    assert "67 tensors" in bits and "equal those of transformers" in logits
    path = output / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="it differs from the checkpoint"):
        verification.verify(planned, output)
    found = tensors()
    found["model.layers.0.self_attn.qk_norm.temp"] *= 1.01
    save_file(found, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="logits of 64 tokens differ"):
        verification._logits(planned.trained.model, planned.trained.tensors, output, verification._transformers)

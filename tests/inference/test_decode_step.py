# SPDX-License-Identifier: Apache-2.0
"""The kernels of a decoding step: in Triton's interpreter against the layers of training and transformers, and what the
compilers make of them for Hopper, MI300X and MI355X (no GPU needed).
"""

import re

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.runtime.code_objects import described
from tests.gfx942.triton_objects import compiled_kernel
from tests.hip_ops.compiled_for_hopper import programs
from tests.hip_ops.cpu_kernels import run_python
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.inference import decode_step
from zaya_plugin.model.build import build_zaya_model
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.decode_state import DecodeState, Progress

pytest.importorskip("triton")

SLIDING = "sliding_window=9, window_attn_skip_freq=2, swa_rotary_base=700"
PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file
from triton.runtime import interpreter

import zaya_plugin.patches

zaya_plugin.patches.apply()
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from tests.inference.small import SMALL, open_theirs, publish_small
from tests.inference.test_decoder import apart, prompts
from zaya_plugin.checkpoint.convert.importing import open_source
from zaya_plugin.checkpoint.convert.loading import load_model
from zaya_plugin.inference import decode_check, decode_step, decoder
from zaya_plugin.inference.sampling import generate
from zaya_plugin.model.build import groups_of_one

def numbers(handle):
    bits = handle.data
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32) if bits.dtype == numpy.uint16 else bits


def product(builder, a, b, d, *_):  # the interpreter's own multiplies the bits of bf16
    return interpreter.TensorHandle(numpy.matmul(numbers(a), numbers(b)) + d.data, d.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = product
torch.set_grad_enabled(False)
groups_of_one()
model_parallel_cuda_manual_seed(1, force_reset_rng=True)
folder, dtype, steps, lengths = Path(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3]), eval(sys.argv[4])
fields = eval(f"dict({sys.argv[5]})")
decoder.ROOM = decode_step.BLOCK = 16
decode_check.STARTS, decode_check.STEPS = (1, 20), 3
decode_step.SPLITS = 3
publish_small(folder, model=replace(SMALL, num_layers=3, kv_channels=16, **fields))
tensors = load_file(folder / "model.safetensors")
for name, tensor in tensors.items():
    if fields and name.endswith("balancing_biases"):
        tensor[-1] = 0.05  # tokens choose the skip class
save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
source = open_source(folder)
model = replace(source.model, skip_output=fields.get("skip_output", source.model.skip_output))  # a folder's is "zero"
plain, own = (decoder.Decoder(load_model(model, source.tensors, dtype), routed=not k, kernels=k) for k in (0, 1))
assert not fields or plain.config.skip_output == own.config.skip_output == fields["skip_output"]
given = prompts(*lengths)
tokens = torch.tensor(generate(plain, given, steps))
for each in (plain, own):
    each.begin(given, steps)
assert own.decode_step is not None and plain.decode_step is None
pairs = [[each.step(tokens[:, place]).float() for each in (plain, own)] for place in range(steps - 1)]
far = sorted(apart(mine, other) for other, mine in pairs)
print("far", far[len(far) // 2] if dtype == torch.bfloat16 else far[-1])
classes = {int(number) for ids in plain.chosen[3:] for number in ids.flatten()}  # of the steps
print("skipped", SMALL.num_experts in classes, len(set(classes)))
if not fields:
    ids = torch.tensor([given[0] + tokens[0].tolist()])
    theirs = open_theirs(folder)(ids).logits[0, len(given[0]) : -1]
    print("theirs", apart(torch.cat([mine for _, mine in pairs]), theirs))
"""


@pytest.mark.slow  # 10 seconds of imports, and the interpreter takes a second a step
@pytest.mark.parametrize(
    ("dtype", "lengths", "steps", "fields"),
    [
        ("float32", (1,), 20, ""),  # also against transformers; from position 1 over the edge of a block
        ("float32", (9, 1, 15), 8, f"{SLIDING}, skip_output='zero'"),  # full rings
        ("bfloat16", (1,), 40, f"{SLIDING}, skip_output='identity'"),
    ],
    ids=["one", "windows", "half"],
)
def test_in_the_interpreter(tmp_path, dtype, lengths, steps, fields):
    words = (tmp_path / "model", dtype, steps, lengths, fields)
    done = run_python(PROGRAM, *words, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", timeout=600)
    assert done.returncode == 0, done.stdout[-4000:]
    figures = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    assert float(figures["far"][0]) < (1e-5 if dtype == "float32" else 0.02), figures
    assert figures["skipped"][0] == str(bool(fields)) and int(figures["skipped"][1]) > 3, figures
    assert fields or float(figures["theirs"][0]) < 1e-5, figures


BASE = Description(2, 2048, 8, 2, 128, 16, 2048, 256, 320, bos=2, eos=1, pad=0)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64), ("hip", "gfx950", 64)], ids=str)
def test_the_kernels_compile_without_spills(tmp_path, monkeypatch, target, batch):
    """Of ZAYA1-base, a layer behind another: types, constants and tiles as they are launched. Scalar registers of AMD
    that lie in lanes of a vector register touch no memory.
    """
    config = ZayaConfig(**BASE.config_fields(), params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True)
    model = build_zaya_model(config, vocab_size=320, max_sequence_length=4096, rotary_base=10_000)
    calls, progress = [], Progress(torch.zeros(batch, dtype=torch.int64))
    monkeypatch.setattr(decode_step, "WARPS", 256 // target[2])
    monkeypatch.setattr(
        decode_step, "run_kernel", lambda kernel, *of_call, **words: calls.append((kernel, of_call, words))
    )
    step = decode_step.DecodeStep(model, [DecodeState.empty(config, batch, 4096, progress) for _ in range(2)])
    step.overlap = {"OVERLAP": True, "launch_pdl": True} if target[0] == "cuda" else {"OVERLAP": False}
    with torch.no_grad():
        step(torch.zeros(1, batch, 2048), model.rotary_pos_emb.of_positions(progress.positions.unsqueeze(0)))
    assert len(calls) == 18
    choices = []
    for kernel, (_, *arguments), words in calls[9:]:
        del words["device"]
        values = dict(zip(kernel.arg_names, arguments, strict=False)) | words
        options = {name: values.pop(name) for name in words if name not in kernel.arg_names}
        fixed = {p.name: values[p.name] for p in kernel.params if p.is_constexpr or values[p.name] is None}
        types = {name: described(value) for name, value in values.items() if name not in fixed}
        signature, wide = {name: kind for name, (kind, _) in types.items()}, [n for n in types if "D" in types[n][1]]
        compiled = compiled_kernel(kernel, target, signature, fixed, wide, **options)
        if kernel.fn.__name__.startswith("expert"):
            choices.append(first_reductions(compiled.asm["ttgir"]))
        if target[0] == "cuda":
            resident, stack = programs(compiled, tmp_path)
            assert "griddepcontrol.wait" in compiled.asm["ptx"]
            assert resident >= 1 and stack == 0, kernel.__name__
        else:
            found = dict(re.findall(r"\.(\w+_spill_count|private_segment_fixed_size): +(\d+)", compiled.asm["amdgcn"]))
            assert found["private_segment_fixed_size"] == found["vgpr_spill_count"] == "0", (kernel.__name__, found)
    assert len(choices[0]) == 3 and choices[0] == choices[1]  # both kernels of the experts choose one class


def first_reductions(text: str) -> list[str]:
    """Return the types of the first three reductions of a Triton module: a product, a sum and a choice, with layouts."""
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    types = re.findall(r"\}\) : (\(tensor.*)$", text, re.MULTILINE)[:3]
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), found) for found in types]


@pytest.mark.parametrize(
    ("asked", "hip", "batch", "said"),
    [
        ("auto", None, 1, None),
        ("triton", "7.2", 4, None),
        ("auto", "7.2", 1, "no AMD GPU has run them"),
        ("reference", None, 1, "kernels=reference"),
        ("auto", None, 5, "more than 4 sequences"),
    ],
)
def test_who_gets_the_kernels(monkeypatch, asked, hip, batch, said):
    config = ZayaConfig(**BASE.config_fields(), params_dtype=torch.bfloat16, bf16=True, use_cpu_initialization=True)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(decode_step, "missing", lambda *_, **__: None)
    with use_kernels(asked):
        found = decode_step.refusal(config, torch.device("cuda"), batch)
    assert found is None if said is None else found.startswith(said)

# SPDX-License-Identifier: Apache-2.0
"""Test the warm-up of the kernels before the first step, the comparison of what the ranks chose, and the warnings next
to the table of kernels at the start of a run, with a simulated GPU.
"""

import functools
import json
import os
import re
import socket
import subprocess
import sys

import pytest
import torch

import hip_ops
from hip_ops.runtime import launchers, model_sizes, operator
from hip_ops.runtime.model_sizes import ModelSizes
from hip_ops.runtime.operator import LIBRARY, OBJECTS, OPERATORS, TRITON, all_operators
from hip_ops.versions import Request
from tests.running import MICRO
from zaya_plugin.config.compose import compose, save_recipe
from zaya_plugin.training import kernels
from zaya_plugin.training.kernels import check_agreement

# Runs one rank and writes the events of the kernels and of the steps, in order, to the file argv[2].
RANK = """
import json, os, sys
from pathlib import Path
from zaya_plugin.hosts import worker

recipe, log, injected = sys.argv[1:]
events = []

def recorded(name, function):
    def call(*positional, **named):
        events.append(name if name != "check" else f"check {positional[0].name} {positional[1]}")
        return function(*positional, **named)
    return call

def prepare(recipe):
    prepared(recipe)
    from hip_ops.runtime import build, operator
    from zaya_plugin.hosts import pretrain

    build._build = recorded("build", build._build)
    operator.Versions._choose = recorded("choose", operator.Versions._choose)
    operator.Versions._check = recorded("check", operator.Versions._check)
    pretrain.forward_step = recorded("step", pretrain.forward_step)
    exec(injected, {"operator": operator, "rank": int(os.environ["RANK"])})

prepared, worker.prepare = worker.prepare, prepare
try:
    sys.exit(worker.main([recipe]))
finally:
    Path(log).write_text(json.dumps(events))
"""

# Makes auto take HIP for one operator on the CPU too. Its self-check passes on rank 0 and fails on rank 1.
HIP_FAILS_ON_RANK_1 = """
of_all = operator.Operator._order
operator.Operator._order = lambda self, *request: (
    ("hip", "reference") if self.folder == "embedding_gradient" else of_all(self, *request)
)
operator.Operator._missing = lambda self, *version: None
operator.Operator._check = lambda self, *version: "passed" if rank == 0 else "result, element 7: it gives 24, torch 16"
"""


@pytest.fixture
def ranks(tmp_path, corpus):
    """ranks(count, overrides, injected) -> exit codes, texts of stderr, and events of each rank."""

    def run(count: int, *overrides: str, injected: str = ""):
        recipe = tmp_path / "recipe.yaml"
        save_recipe(compose([*MICRO, f"data.path={corpus}", f"run_dir={tmp_path / 'run'}", *overrides]), recipe)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        common = {"WORLD_SIZE": count, "MASTER_ADDR": "localhost", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(recipe), str(tmp_path / f"{rank}.json"), injected],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ
                | {name: str(value) for name, value in (common | {"RANK": rank, "LOCAL_RANK": rank}).items()},
            )
            for rank in range(count)
        ]
        texts = [each.communicate(timeout=800)[1] for each in processes]
        events = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
        return [each.returncode for each in processes], texts, events

    return run


@pytest.mark.slow  # tests/hosts/test_spec.py simulates the second rank
def test_ranks_that_chose_different_versions_stop(ranks, tmp_path):
    codes, texts, events = ranks(2, injected=HIP_FAILS_ON_RANK_1)
    message = (
        "cluster.kernels=auto: ranks chose different versions: add_rows_ (hip, then reference on rank 0; reference on "
        "rank 1). The logs of these ranks say why. Allowed: the same versions on all ranks. Fix: "
        "cluster.kernel_overrides.embedding_gradient=reference."
    )
    assert codes == [2, 2], texts
    assert f"zaya: {message}" in texts[0] and f"zaya: rank 1: {message}" in texts[1]
    assert all("step" not in each for each in events), "no step was made"
    log = (tmp_path / "run" / "logs" / "rank1.log").read_text()
    assert "add_rows_ on cpu: reference (cluster.kernels=auto; no hip: it failed its self-check" in log


@pytest.mark.slow
def test_a_version_that_one_rank_lacks_stops_all(ranks):
    """Requested by name, it raises on that rank alone, while the others wait."""
    injected = "operator.Operator._check = lambda self, *version: 'wrong' if rank == 1 else 'passed'"
    codes, texts, _ = ranks(2, "cluster.kernel_overrides={muon: hip}", injected=injected)
    assert codes == [2, 2]
    assert all("on rank 1: cluster.kernel_overrides.muon=hip: version 'hip' of muon_" in text for text in texts)


@pytest.mark.slow
def test_the_first_step_chooses_nothing(ranks, tmp_path):
    """On a CPU, where all versions are references, and in a fraction of a second."""
    codes, texts, (events,) = ranks(1, "stage.train_iters=1", "optim.lr_warmup_iters=0")
    assert codes == [0], texts
    first = events.index("step")
    assert events[:first].count("choose") == len(all_operators()) + 1 and set(events[first:]) == {"step"}
    log = (tmp_path / "run" / "logs" / "rank0.log").read_text()
    assert re.search(r"kernels checked in 0\.\d s; on this rank in 0\.\d s\n", log)


@pytest.mark.slow
def test_the_first_step_builds_and_checks_nothing(ranks, tmp_path, monkeypatch):
    """With the g++ build of the HIP versions in the place of a GPU's, from an empty cache."""
    monkeypatch.setenv("HIP_OPS_CACHE", str(tmp_path / "cache"))
    codes, texts, (events,) = ranks(1, "stage.train_iters=1", "optim.lr_warmup_iters=0", "cluster.kernels=hip")
    assert codes == [0], texts
    first, hip = events.index("step"), [each.name for each in all_operators() if "hip" in each.versions]
    before = events[:first]
    assert before.count("build") == 1
    assert {f"check {name} hip" for name in hip} <= set(before)
    assert set(events[first:]) == {"step"}


@functools.cache
def micro():
    return compose([*MICRO, "data.path=x"])


def choices(**changed):
    return {"muon_update_": ("hip",), "muon_momentum_": ("hip",), "core_attention": ("sdpa",)} | changed


def test_equal_choices_pass():
    check_agreement([choices()] * 5, micro())


def test_the_difference_names_ranks_operators_versions_and_the_fix():
    """Of several operators of a folder the fix names the folder once, with the version that every rank has."""
    all_operators()
    everyone = [choices() for _ in range(9)]
    for rank in (2, 3, 4, 8):
        everyone[rank]["muon_update_"] = ("triton",)
    everyone[5]["muon_momentum_"] = ("reference",)
    said = (
        "cluster.kernels=auto: ranks chose different versions: muon_update_ (hip on ranks 0-1, 5-7; triton on ranks "
        "2-4, 8), muon_momentum_ (hip on ranks 0-4, 6-8; reference on rank 5). The logs of these ranks say why. Allowed: "
        "the same versions on all ranks. Fix: cluster.kernel_overrides.muon=reference."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        check_agreement(everyone, micro())


def test_the_fix_makes_the_ranks_equal(monkeypatch):
    """On a simulated GPU where all versions run on rank 0, and all but one on rank 1; for every operator and version."""
    device, failing = torch.device("cuda", 0), []
    monkeypatch.setattr(operator.Operator, "_missing", lambda *given: None)
    monkeypatch.setattr(operator.Operator, "_failure", lambda own, version, *given: "x" if version in failing else None)

    def chosen(each, version, without):
        failing[:] = without
        return tuple(each._choose(device, Request(version, "cluster.kernels=auto"), check=False)[0])

    differing = 0
    for each in all_operators():
        for version in each.versions:
            everyone = [{each.name: chosen(each, "auto", without)} for without in ([], [version])]
            if everyone[0] == everyone[1]:
                continue
            differing += 1
            with pytest.raises(ValueError, match="ranks chose different versions") as error:
                check_agreement(everyone, micro())
            fix = re.search(rf"Fix: cluster\.kernel_overrides\.{each.folder}=(\w+)\.$", str(error.value))[1]
            assert chosen(each, fix, []) == chosen(each, fix, [version]), (each.name, version, fix)
    assert differing > 10


def test_core_attention_is_compared_too():
    everyone = [choices(core_attention=("flash_attn_4",)), choices(core_attention=("sdpa",))]
    said = (
        "cluster.core_attention=auto: ranks chose different versions: core_attention (flash_attn_4 on rank 0; sdpa on rank "
        "1). The logs of these ranks say why. Allowed: the same versions on all ranks. "
        "Fix: cluster.core_attention=sdpa."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        check_agreement(everyone, micro())


def test_blocks_of_core_attention_are_torchs_choice():
    everyone = [choices(core_attention=("blocks", "sdpa")), choices(core_attention=("sdpa",))]
    with pytest.raises(ValueError, match="ranks. Fix: the same torch and devices on all ranks.$"):
        check_agreement(everyone, micro())


def test_the_fix_of_grouped_products_leaves_graphs():
    recipe, everyone = micro(), [choices(grouped_rows=("triton",)), choices(grouped_rows=("reference",))]
    recipe.cluster.graphs = "full_iteration"
    fix = "Fix: cluster.kernel_overrides.grouped_product=reference cluster.graphs=none.$"
    with pytest.raises(ValueError, match=fix):
        check_agreement(everyone, recipe)


def test_the_library_and_triton_are_compared_where_they_are_used():
    """Rank 1 runs no Triton and has no release of it."""
    of_rank_0 = {LIBRARY: ("shipped, sha256 1",), TRITON: ("3.6.0",)}
    everyone = [choices(**of_rank_0), choices(**{LIBRARY: ("shipped, sha256 1",)}), choices(**of_rank_0)]
    check_agreement(everyone, micro())
    everyone[1][LIBRARY] = ("built from source, gfx942-2",)
    said = (
        "cluster.kernels=auto: ranks chose different versions: library of the HIP kernels (shipped, sha256 1 on ranks 0, "
        "2; built from source, gfx942-2 on rank 1). The logs of these ranks say why. Allowed: the same versions on all "
        "ranks. Fix: the same packages on all ranks, or cluster.kernels=triton."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        check_agreement(everyone, micro())
    everyone[1][LIBRARY] = everyone[0][LIBRARY]
    everyone[0][OBJECTS], everyone[1][OBJECTS] = ("shipped, sha256 5",), ("none",)
    said = "objects of the Triton kernels .shipped, sha256 5 on rank 0; none on rank 1.* or cluster.kernels=reference"
    with pytest.raises(ValueError, match=said):
        check_agreement(everyone, micro())
    everyone[2][TRITON] = ("3.7.1",)
    said = r"Triton \(3.6.0 on rank 0; 3.7.1 on rank 2\).* Fix: the same packages on all ranks, or cluster.kernels=reference"
    with pytest.raises(ValueError, match=said):
        check_agreement(everyone, micro())


@pytest.mark.slow
def test_the_library_of_a_device(require_tool):
    require_tool("g++")
    launchers.library("cpu")
    assert re.fullmatch(r"built from source, cpu-[0-9a-f]{16}", launchers.identity(torch.device("cpu")))
    assert {LIBRARY, TRITON}.isdisjoint(operator.running("cpu")), "the references use neither"


THEIRS = "cluster.transformer_impl=transformer_engine"


@pytest.fixture
def warnings(monkeypatch):
    """warnings(*overrides) -> the lines that warn."""
    monkeypatch.setattr(kernels, "report", lambda device, check, others: [each.name for each in others])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def found(*overrides: str) -> list[str]:
        lines = kernels.kernel_lines(compose(["experiment=cpu_demo", "cluster=gpu", *overrides]))
        assert lines[1] == "  core_attention"
        return [line for line in lines if line.startswith("WARNING")]

    return found


def test_fp32_products_of_transformer_engine(warnings, monkeypatch):
    assert warnings() == warnings(THEIRS) == warnings("cluster.dtype=fp32") == []
    (line,) = warnings(THEIRS, "cluster.dtype=fp32")
    assert "fp32 products are TF32. Fix: NVIDIA_TF32_OVERRIDE=0" in line
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert warnings(THEIRS, "cluster.dtype=fp32") == []


def test_a_cudnn_that_does_not_fit(warnings, monkeypatch):
    def version():
        raise RuntimeError("cuDNN version incompatibility: compiled against (9, 19, 0), found (9, 14, 0).\nmore")

    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    (line,) = warnings()
    assert "found (9, 14, 0).)" in line and "more" not in line and "Fix: cluster.core_attention=cudnn" in line
    assert warnings("cluster.core_attention=cudnn") == []


def test_self_checks_get_the_sizes_of_a_rank(monkeypatch):
    """And without a recipe those of ZAYA1-base."""
    monkeypatch.setattr(model_sizes, "_current", ModelSizes())
    base = compose(["experiment=zaya1_base", "data.path=x"])
    assert kernels.model_sizes_of(base) == ModelSizes()
    kernels.select_kernels(compose(["experiment=zaya1_74b", "data.path=x"]))
    hip_ops.set_kernels(None)
    assert model_sizes.model_sizes() == ModelSizes(4096, 4096, 3, 25, 16, 2)
    all_operators()
    gate_up, _, offsets = OPERATORS["weighted_swiglu"].examples[0](torch.device("cpu"))
    assert gate_up.shape == (48, 8192) and offsets.tolist() == [9, 17, 33]
    words = ["experiment=zaya1_base", "parallel=tensor_parallel", "optim=adamw", "data.path=x"]
    assert kernels.model_sizes_of(compose(words)) == ModelSizes(num_attention_heads=4, num_query_groups=1)

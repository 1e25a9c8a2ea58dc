# SPDX-License-Identifier: Apache-2.0
"""Test the self-check on a device: its conditions find mistakes that an idle device's default stream hides, and a
start takes seconds.
"""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.ops.linear_cross_entropy import passes
from hip_ops.runtime import conditions
from hip_ops.runtime.operator import all_operators, running
from hip_ops.runtime.self_check import differences
from tests.gpu.conftest import ROOT
from tests.hip_ops.training_calls import training_calls

GPU = torch.device("cuda", 0)
NAMES = ("default stream", "side stream", "captured graph", "full device")
# Checks what `zaya train` checks before the first step, except core attention; prints its seconds and those in which
# each Triton kernel of hip_ops was compiled.
START = """
import json, time, torch, triton
compiled = []
def listener(src, times, cache_hit, **rest):
    if not cache_hit and src.fn.module.startswith("hip_ops."):
        compiled.append(times.total / 1e6)
triton.knobs.compilation.listener = listener
began = time.perf_counter()
from hip_ops.runtime.operator import running
running("cuda")
torch.cuda.synchronize()
print(json.dumps([time.perf_counter() - began, compiled]))
"""


def doubled(x, total):
    total += x
    return x * 2


def found(version, **options) -> dict[str, str | None]:
    """Returns the difference by condition."""
    example = lambda device: (torch.randn(2**16, device=device), torch.ones(2**16, device=device))  # noqa: E731
    texts = differences(version, doubled, example, GPU, conditions.conditions_on(GPU), **options)
    return dict(zip(NAMES, texts, strict=True))


def test_a_correct_version_passes():
    assert set(found(doubled).values()) == {None}


def test_a_version_that_launches_on_the_default_stream(monkeypatch):
    monkeypatch.setattr(conditions, "SLEEP_CYCLES", 100_000_000)  # 50 ms: others may interrupt the host

    def version(x, total):
        with torch.cuda.stream(torch.cuda.default_stream(GPU)):
            return doubled(x, total)

    said = found(version)
    assert said["default stream"] is None and said["side stream"] is not None


def waits_for_the_device(x, total):
    """A capture does not allow it."""
    return doubled(x, total) if x.sum().item() < torch.inf else x


def test_a_version_that_waits_for_the_device():
    said = found(waits_for_the_device)
    assert [name for name in NAMES if said[name]] == ["captured graph"] and "Error: " in said["captured graph"]


def _active_bytes() -> int:
    return torch.cuda.memory_stats(GPU)["active_bytes.all.current"]


def test_a_failed_capture_leaves_nothing_behind():
    """Neither in the random generator, nor in the allocator, nor for the next capture."""
    torch.cuda.manual_seed(7)
    torch.randn(5, device=GPU)
    state = torch.cuda.get_rng_state(GPU)
    wanted = torch.randn(5, device=GPU)
    torch.cuda.set_rng_state(state, GPU)
    assert found(waits_for_the_device)["captured graph"]
    assert torch.equal(torch.cuda.get_rng_state(GPU), state) and torch.equal(torch.randn(5, device=GPU), wanted)
    before, block = _active_bytes(), torch.empty(2**26, dtype=torch.uint8, device=GPU)
    block.record_stream(torch.cuda.Stream(GPU))  # during a capture the allocator would keep such a block
    torch.cuda.synchronize()
    del block
    torch.empty(1, device=GPU)  # an allocation looks which blocks have become free
    assert _active_bytes() == before
    assert set(found(doubled).values()) == {None}


def test_a_version_whose_replay_reads_a_number_of_the_capture():
    seen = []

    def version(x, total):
        if torch.cuda.is_current_stream_capturing():
            return doubled(seen[0], total)
        seen.append(torch.zeros_like(x))
        return doubled(x, total)

    assert found(version)["captured graph"].startswith("call 1: ")


def test_a_version_with_other_bits_at_every_call():
    calls = []

    def version(x, total):
        calls.append(x)
        return doubled(x, total) * (1 + len(calls) * 2**-23)

    assert "(allowed: equal bits)" in found(version)["default stream"]
    assert found(version, repeats=False)["default stream"] is None


@pytest.mark.alone
def test_the_calls_on_a_full_device_run_at_once():
    """Four calls that each wait a while take hardly longer than one."""
    full = conditions.conditions_on(GPU)[-1]

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        full.run(lambda x: torch.cuda._sleep(50_000_000), [(torch.ones(1, device=GPU),)] * calls)
        return time.perf_counter() - start

    seconds(1)
    assert seconds(4) < 2 * seconds(1)


def test_a_version_whose_calls_share_memory():
    """Right as long as calls come one after the other."""
    scratch = torch.zeros(2**16, device=GPU)

    def version(x, total):
        scratch.zero_()
        torch.cuda._sleep(2_000_000)
        scratch.add_(x)
        torch.cuda._sleep(2_000_000)
        return doubled(scratch, total)

    said = found(version)
    assert [name for name in NAMES if said[name]] == ["full device"]


@pytest.mark.parametrize("version", ["hip", "triton"])
def test_every_operator_passes_under_the_conditions(version):
    if version == "hip" and torch.version.hip is None:
        pytest.skip("building the HIP versions for NVIDIA takes minutes")
    for operator in all_operators():
        if version in operator.versions:
            wrong = [each for each in conditions.check(operator, GPU, (version,)) if each.difference]
            assert not wrong, wrong


def test_the_choice_names_its_sources():
    """Ranks compare them."""
    with use_kernels("triton"):
        chosen = running(GPU)
    import triton

    assert chosen["Triton"] == (triton.__version__,) and chosen["muon_update_"] == ("triton",)


def test_training_compiles_no_triton_kernel_after_the_check():
    """With the sizes of ZAYA1-base; what Newton-Schulz compiles depends on the number of a rank's matrices."""
    triton = pytest.importorskip("triton")
    compiled = []
    late = {"newton_schulz", *["add_rows_"] * (torch.version.hip is not None)}  # test_checked_triton.py says why
    with use_kernels("triton"):
        running(GPU)
        logits = torch.empty(2048, passes.CLASSES, device="meta")
        calls = training_calls(passes.parts_for(logits), device="cuda")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                triton.knobs.runtime, "jit_post_compile_hook", lambda **compile: compiled.append(compile["repr"])
            )
            for operator in all_operators():
                if "triton" in operator.versions and operator.name not in late:
                    for arguments in calls.get(operator.name, ()):
                        operator.run(*arguments)
            torch.cuda.synchronize()
    assert compiled == []


@pytest.mark.alone
def test_the_start_takes_seconds_and_a_second_one_compiles_nothing(tmp_path):
    """In processes of their own, with an empty and then a full cache of Triton: no Triton kernel of hip_ops."""
    pytest.importorskip("triton")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    starts = []
    for _ in range(2):
        said = subprocess.run(
            [sys.executable, "-c", START], env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        starts.append(json.loads(said.splitlines()[-1]))
    (first, compiled), (second, again) = starts
    kernels = f"{len(compiled)} kernels, {sum(compiled):.1f} s in threads, the longest {max(compiled, default=0):.1f} s"
    print(f"with an empty cache {first:.1f} s ({kernels}), with a full one {second:.1f} s")
    assert again == [] and second < first < 60 and second < 20, (first, second, kernels)

# SPDX-License-Identifier: Apache-2.0
"""Test portable.h on this machine's GPU (nvcc on NVIDIA, hipcc on ROCm), the current stream, and the self-check of
every operator.
"""

import subprocess

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.runtime.build import CSRC
from hip_ops.runtime.compilers import find_compiler
from hip_ops.runtime.launchers import load, target_of
from hip_ops.runtime.operator import all_operators, warm_up
from hip_ops.runtime.quack_tiles import available
from tests.hip_ops.cpu_kernels import KERNELS, source_files

GPU = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """tests/hip_ops/kernels/portable.hip for this GPU."""
    folder = tmp_path_factory.mktemp("portable")
    compiler = find_compiler(target_of(GPU))
    files = source_files([KERNELS / "portable.hip"])
    objects = []
    for file in files:
        command = compiler.compile_command(file, folder / f"{file.stem}.o")
        objects.append(folder / f"{file.stem}.o")
        done = subprocess.run([*command, f"-I{CSRC}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    done = subprocess.run(compiler.link_command(objects, folder / "libportable.so"), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = load(folder / "libportable.so", *files)

    def run(name, *arguments):
        converted = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        with torch.cuda.device(GPU):
            code = getattr(loaded, name)(*converted, torch.cuda.current_stream(GPU).cuda_stream)
        torch.cuda.synchronize()
        return code

    return run


def arange(n, dtype=torch.float32):
    return torch.arange(n, device=GPU).to(dtype)


@pytest.mark.parametrize("mask", [1, 7, 16, 31, 32, 63])
def test_wave_exchange_and_sum(kernels, mask):
    x = torch.randn(50 * 256, generator=torch.Generator(GPU).manual_seed(mask), device=GPU)
    out, sums = torch.zeros_like(x), torch.zeros_like(x)
    assert kernels("ho_test_waves_run", x, out, sums, 50, mask) == 0
    assert torch.equal(out, x[torch.arange(x.numel(), device=GPU) ^ mask])
    waves = sums.view(-1, 64)
    assert (waves == waves[:, :1]).all()
    torch.testing.assert_close(waves[:, 0].double(), x.view(-1, 64).double().sum(1), rtol=0, atol=64 * 2**-22)


def test_places(kernels):
    out = torch.full((5, 3, 256, 4), -1, dtype=torch.int32, device=GPU)
    assert kernels("ho_test_places_run", out, 3, 5, 256) == 0
    y, x, t = torch.meshgrid(torch.arange(5), torch.arange(3), torch.arange(256), indexing="ij")
    assert torch.equal(out.cpu(), torch.stack([1000 * y + x, t, t % 64, t // 64], -1).int())


@pytest.mark.parametrize("lds_only", [0, 1])
def test_barriers(kernels, lds_only):
    x = arange(200 * 1024)
    out = torch.zeros_like(x)
    assert kernels("ho_test_reverse_run", x, out, 200, lds_only) == 0
    assert torch.equal(out, x.view(200, 1024).flip(1).flatten())


def test_wave_sync_and_big_lds(kernels):
    x = arange(200 * 256)
    out = torch.zeros_like(x)
    assert kernels("ho_test_reverse_wave_run", x, out, 200) == 0
    assert torch.equal(out, x.view(-1, 64).flip(1).flatten())
    big = torch.zeros(14 * 1024, device=GPU)
    assert kernels("ho_test_big_lds_run", x, big) == 0
    assert torch.equal(big, x[: 14 * 1024].flip(0))


@pytest.mark.parametrize("m", [32, 16])
@pytest.mark.parametrize("wide", [0, 1])
def test_matrix_products(kernels, m, wide):
    generator = torch.Generator(GPU).manual_seed(m)
    k = 256 // m << wide
    a, b, c = (torch.randint(-8, 9, shape, generator=generator, device=GPU) for shape in ((m, k), (k, m), (m, m)))
    out = c.float()
    assert kernels("ho_test_mfma_run", a.bfloat16(), b.bfloat16(), out, m, wide) == 0
    assert torch.equal(out, a.float() @ b.float() + c)


def test_bf16(kernels):
    bits = (
        torch.randint(-(2**31), 2**31, (8192,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
        .int()
        .to(GPU)
    )
    x = bits.view(torch.float32)
    out, back = torch.zeros(8192, dtype=torch.bfloat16, device=GPU), torch.zeros(8192, device=GPU)
    assert kernels("ho_test_bf16_run", x, out, back, 8192) == 0
    nan = x.isnan()
    assert (
        torch.equal(out[~nan].view(torch.int16), x.bfloat16()[~nan].view(torch.int16))
        and out[nan].isnan().all()
        and nan.any()
    )
    assert torch.equal(back[~nan], out[~nan].float())


def test_words_and_an_empty_grid(kernels):
    x, out = arange(256, torch.int32), torch.zeros(256, dtype=torch.int32, device=GPU)
    assert kernels("ho_test_words_run", x, out) == 0
    assert torch.equal(out[1:], x[1:]) and out[0].item() == 1
    assert kernels("ho_test_waves_run", None, None, None, 0, 1) == 0


def test_a_launch_error_is_returned(kernels):
    """More threads than the launch bounds and the device allow."""
    out = torch.zeros(8192, 4, dtype=torch.int32, device=GPU)
    assert kernels("ho_test_places_run", out, 1, 1, 2048) > 0
    assert kernels("ho_test_places_run", out, 1, 1, 256) == 0, "the error is not left behind"


@pytest.mark.parametrize("name", ["hip", "triton", "compiled"])
def test_every_operator_passes_its_self_check(name):
    """A version that is requested by name and fails its check raises."""
    with use_kernels(name):
        choices = warm_up(GPU)
    for operator in all_operators():
        if name in operator.versions:
            assert choices[operator.name].startswith(name) and operator.results[GPU, name] == "passed"
        else:
            assert f"it has no version '{name}'" in choices[operator.name]


def test_auto_takes_no_reference_where_there_is_another_version():
    for operator in filter(lambda each: each.versions, all_operators()):
        if set(operator.versions) == {"quack"} and available(GPU) is not None:
            continue  # its only version is in a package that is not installed
        assert not operator.choice(GPU).startswith("reference"), operator.choice(GPU)
        assert "failed its self-check" not in operator.choice(GPU)


@pytest.mark.parametrize("name", ["hip", "triton"])
def test_operators_run_on_the_current_stream(name):
    """A new stream is blocked. A copy on the default stream must not see its result meanwhile, and the stream's own
    copy must.
    """
    weight = torch.ones(2048, device=GPU, dtype=torch.bfloat16)
    x, residual = (torch.zeros(64, 2048, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    with use_kernels(name):
        hip_ops.add_rms_norm(x, residual, weight, 1e-5)
        torch.cuda.synchronize()
        side = torch.cuda.Stream(GPU)
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            x.fill_(3.0)
            _, merged = hip_ops.add_rms_norm(x, residual, weight, 1e-5)
            after = merged.clone()
        assert not side.query(), "the launcher waited for the device"
        side.synchronize()
    assert (after == 3.0).all(), "the kernel ran before what its stream had been given"


@pytest.mark.parametrize("name", ["hip", "triton"])
def test_operators_in_a_captured_graph(name):
    weight = torch.ones(2048, device=GPU, dtype=torch.bfloat16)
    x, residual = (torch.zeros(64, 2048, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    with use_kernels(name):
        hip_ops.warm_up(GPU)
        hip_ops.add_rms_norm(x, residual, weight, 1e-5)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _, merged = hip_ops.add_rms_norm(x, residual, weight, 1e-5)
    x.fill_(2.0)
    graph.replay()
    torch.cuda.synchronize()
    assert (merged == 2.0).all()

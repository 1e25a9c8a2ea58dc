# SPDX-License-Identifier: Apache-2.0
"""The warnings beside the table of kernels at the start of a run, with a simulated GPU."""

import pytest
import torch

from zaya_plugin.config.compose import compose
from zaya_plugin.training import kernels

THEIRS = "cluster.transformer_impl=transformer_engine"


@pytest.fixture
def warnings(monkeypatch):
    """warnings(*overrides) -> the lines that warn."""
    monkeypatch.setattr(kernels, "report", lambda device, check: ["rms_norm: triton"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91900)
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)

    def found(*overrides: str) -> list[str]:
        lines = kernels.kernel_lines(compose(["experiment=cpu_demo", "cluster=gpu", *overrides]))
        assert "  core_attention: " in lines[1]
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

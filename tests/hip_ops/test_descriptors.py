# SPDX-License-Identifier: Apache-2.0
"""Triton before 3.4 has no tensor descriptors: the kernels that AMD's devices run without them can still be imported."""

import importlib
import sys

import pytest

pytest.importorskip("triton")
DESCRIPTORS = "hip_ops.runtime.descriptors"
MODULES = (
    "hip_ops.ops.newton_schulz.triton",
    "hip_ops.ops.grouped_product.expert_tiles",
    "hip_ops.ops.grouped_product.triton_kernels",
)


def test_the_kernels_are_imported_without_tensor_descriptors(monkeypatch):
    for name in (DESCRIPTORS, *MODULES):  # those of the other tests, which come back after this one
        importlib.import_module(name)
    monkeypatch.setitem(sys.modules, "triton.tools.tensor_descriptor", None)  # an import of it raises ImportError
    for name in (DESCRIPTORS, *MODULES):
        parent, _, leaf = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(parent), leaf, None, raising=False)
        monkeypatch.delitem(sys.modules, name, raising=False)
    without = [importlib.import_module(name) for name in (DESCRIPTORS, *MODULES)]
    assert [vars(module).get("TensorDescriptor", 0) for module in without] == [None, None, None, 0]
    assert without[-1].grouped_pointer_rows_kernel.arg_names[0] == "x_pointer"

# SPDX-License-Identifier: Apache-2.0
"""Test the names of the package: loaded at first use, and without torch."""

from tests.hip_ops.cpu_kernels import run_python


def test_the_public_names_are_lazy():
    program = """
import sys, hip_ops
assert "torch" not in sys.modules and set(hip_ops.__all__) <= set(dir(hip_ops))
import hip_ops.ops.newton_schulz, hip_ops.ops.rms_norm
assert "router_mlp" not in vars(hip_ops) and "triton" not in sys.modules
for name in hip_ops.__all__:
    assert callable(getattr(hip_ops, name)), name
assert "triton" not in sys.modules
try:
    hip_ops.nothing
except AttributeError as error:
    print(error)
"""
    done = run_python(program)
    assert done.returncode == 0 and "module 'hip_ops' has no attribute 'nothing'" in done.stdout, done.stdout


def test_modules_that_do_not_import_torch():
    """Recipes are checked against these modules before torch is imported."""
    done = run_python(
        """
import sys, hip_ops.versions
hip_ops.versions.check_selection("auto", {"router_mlp": "triton"})
try:
    hip_ops.versions.check_selection("auto", {"router_mlp": "torch"})
except ValueError as error:
    print(error)
assert "torch" not in sys.modules
"""
    )
    assert "kernel_overrides.router_mlp=torch: no such version. Allowed: auto, triton, " in done.stdout, done.stdout
    assert done.returncode == 0

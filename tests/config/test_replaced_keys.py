# SPDX-License-Identifier: Apache-2.0
"""Keys of earlier versions are refused with the key that took their place: on the command line, and in an earlier run's recipe.yaml."""

import pytest
import yaml

from hip_ops.versions import VERSIONS
from zaya_plugin.config.compose import compose, load_recipe, to_yaml
from zaya_plugin.config.messages import REPLACED, known

DEMO = "experiment=cpu_demo"
# replaced key -> parts that its message must hold besides
NEW = {
    "cluster.hip_ops_backend": ["cluster.kernels", "reference"],
    "cluster.grouped_gemm": ["cluster.kernel_overrides={grouped_product: <version>}"],
    "cluster.fused_residual_norm": ["cluster.kernel_overrides={rms_norm: <version>}"],
    "cluster.fused_cca_prologue": ["cluster.kernel_overrides={cca_prologue: <version>}"],
    "cluster.fused_router": ["cluster.kernel_overrides={router_mlp: <version>}"],
    "cluster.fused_expert_path": [
        "cluster.kernel_overrides={expert_permutation: <version>, weighted_swiglu: <version>}"
    ],
    "cluster.fused_linear_cross_entropy": ["cluster.kernel_overrides={linear_cross_entropy: <version>}"],
    "cluster.fused_muon": ["cluster.kernel_overrides={muon: <version>, newton_schulz: <version>}"],
    "model.qk_norm_in_fp32": ["always in fp32", "Remove the key"],
    "model.router_softmax_in_fp32": ["always in fp32", "Remove the key"],
}


@pytest.fixture(scope="module")
def demo():
    """The demo's recipe as `zaya train` saves it."""
    return yaml.safe_load(to_yaml(compose([DEMO])))


def test_all_are_here_and_none_is_a_key():
    assert REPLACED.keys() == NEW.keys() and not any(map(known, REPLACED))


@pytest.mark.parametrize("key", NEW)
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_on_the_command_line(prefix, key):
    with pytest.raises(ValueError) as caught:
        compose([DEMO, f"{prefix}{key}=true"])
    for part in (f"{key}=true: this key was replaced by ", *NEW[key]):
        assert part in str(caught.value).replace("=True", "=true")


def test_in_a_recipe_of_an_earlier_run(demo, tmp_path):
    """All at once, so that the file is edited once."""
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(demo))
    assert load_recipe(path) == compose([DEMO])
    for key in NEW:
        group, name = key.split(".")
        demo[group][name] = True
    path.write_text(yaml.safe_dump(demo))
    with pytest.raises(ValueError) as caught:
        load_recipe(path)
    lines = str(caught.value).removeprefix(f"{path}: ").splitlines()
    assert len(lines) == len(NEW)
    for key, parts in NEW.items():
        (line,) = [line for line in lines if line.startswith(f"{key}=True: this key was replaced by ")]
        assert all(part in line for part in parts)


def test_the_named_operators_exist():
    named = [
        each.split(":")[0] for text in REPLACED.values() for each in text.partition("{")[2].split(", ") if "<" in each
    ]
    assert {*named} == VERSIONS.keys() - {"embedding_gradient"}

# SPDX-License-Identifier: Apache-2.0
"""Keys of earlier versions are refused with the key that replaced them, on the command line and in an earlier run's
recipe.yaml.
"""

from pathlib import Path

import pytest
import yaml

from hip_ops.versions import VERSIONS
from zaya_plugin.config.compose import compose, load_recipe, to_yaml
from zaya_plugin.config.messages import REPLACED, known
from zaya_plugin.ground.errors import as_typed

DEMO = "experiment=cpu_demo"
EARLIER = Path(__file__).with_name("earlier_recipe.yaml")
# Replaced key -> further parts of its message.
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
    "model.qk_norm_in_fp32": ["always in fp32", "Fix: remove it"],
    "model.router_softmax_in_fp32": ["always in fp32", "Fix: remove it"],
    "parallel.reduce_by_copies": ["NCCL or RCCL", "Fix: remove it"],
    "parallel.reduce_by_copies_mib": ["NCCL or RCCL", "Fix: remove it"],
}


def became(key: str) -> str:
    return "was removed: " if "Fix: remove it" in NEW[key] else "was replaced by "


def test_none_is_a_key():
    assert not any(map(known, NEW))


@pytest.mark.parametrize("key", NEW)
@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_on_the_command_line(prefix, key):
    with pytest.raises(ValueError) as caught:
        compose([DEMO, f"{prefix}{key}=true"])
    for part in (f"{key}=true: this key {became(key)}", *NEW[key]):
        assert part in str(caught.value)


def test_in_a_recipe_of_an_earlier_run(tmp_path):
    """One error lists all of them; without them the file is today's recipe."""
    with pytest.raises(ValueError) as caught:
        load_recipe(EARLIER)
    lines = str(caught.value).removeprefix(f"{EARLIER}: ").splitlines()
    assert len(lines) == len(NEW) == len(REPLACED)
    earlier = yaml.safe_load(EARLIER.read_text())
    for key, parts in NEW.items():
        group, name = key.split(".")
        start = f"{key}={as_typed(earlier[group].pop(name))}: this key {became(key)}"
        (line,) = [line for line in lines if line.startswith(start)]
        assert all(part in line for part in parts)
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(earlier))
    same = ("optim=adamw", "optim.lr=2e-3", "optim.lr_warmup_iters=20", "checkpoint.save_interval=45")
    same += ("stage.train_iters=90", "stage.eval_interval=30", "cluster.core_attention=sdpa")
    assert to_yaml(load_recipe(path)) == to_yaml(compose([DEMO, *same]))


def test_the_named_operators_exist():
    named = [
        each.split(":")[0]
        for _, text in REPLACED.values()
        for each in text.partition("{")[2].split(", ")
        if "<" in each
    ]
    assert {*named} == VERSIONS.keys() - {"embedding_gradient"}

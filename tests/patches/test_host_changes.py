# SPDX-License-Identifier: Apache-2.0
"""Every attribute of torch, Megatron and Primus that this plugin changes is a patch or a hook, and a run restores the hooks."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_plugin.patches.hooks import HOOKS, INSTANCES, TRAINING

# Not attributes that hold code: a mode of torch, tuples of names, and switches.
NO_CODE = {
    '"cuda" device literals',
    "megatron.core.optimizer.optimizer.param_group_identifier_keys",
    "megatron.core.optimizer.distrib_optimizer.param_group_identifier_keys",
    "megatron.core.optimizer.USING_PYTORCH_OPTIMIZER",
    "megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE",
    "megatron.core.optimizer.distrib_optimizer.USING_APEX_OPTIMIZER",
}
# Of a run of the demo; the others belong to hosts, stages that take over and `zaya bench`.
OF_A_RUN = (
    "training_log",
    "evaluate_and_print_results",
    "save_checkpoint",
    "get_megatron_optimizer",
    "logical_and_across_model_parallel_group",
    "reduce_max_stat_across_model_parallel_group",
    "get_signal_handler",
    "train_step",  # by the program, to look
)


BUFFERS = {"_ParamAndGradBuffer().reset", "_ParamAndGradBuffer().scale_gradients"}
PRIMUS = {  # the names that zaya_plugin.hosts.primus.trainer imports, where Primus itself is not available
    "backends/megatron/megatron_pretrain_trainer.py": "class MegatronPretrainTrainer: ...",
    "core/backend/backend_registry.py": (
        "class BackendRegistry:\n    classes = {}\n    @classmethod\n"
        "    def register_trainer_class(cls, made, *names):\n        cls.classes[names] = made"
    ),
    "core/patches/patch_runner.py": "def error_rank_0(message): ...",
    "core/utils/module_utils.py": "def log_rank_0(message): ...",
}


def changes(*words: str, search: Path | None = None) -> dict[str, list[str]]:
    """What tests/patches/host_changes.py finds in a process of its own."""
    path = os.pathsep.join(str(each) for each in (search, os.environ.get("PYTHONPATH")) if each)
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.host_changes", *words],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("overrides", "instances"),
    [
        ((), BUFFERS),
        (
            ("parallel.use_distributed_optimizer=false", "parallel.overlap_param_gather=false"),
            {*BUFFERS, "MegatronOptimizer().init_state_fn"},
        ),
    ],
    ids=["sharded optimizer", "whole optimizer"],
)
def test_every_change_is_registered(tmp_path, corpus, overrides, instances):
    """Two steps of a small demo; all modules and classes of both hosts, and the instances of DDP and of the optimizers."""
    found = changes(str(corpus), str(tmp_path / "run"), *overrides)
    assert found["import"] == [] and found["after"] == []
    assert set(found["patches"]) == set(found["registered"]) - NO_CODE
    symbols = [name for name in found["run"] if "()" not in name]
    assert symbols == sorted(TRAINING + name for name in OF_A_RUN) and set(symbols) <= set(HOOKS)
    assert {name for name in found["run"] if "()" in name} == instances
    assert instances <= {
        symbol.rpartition(".")[0].rpartition(".")[2] + symbol[symbol.rindex(".") :] for symbol in INSTANCES
    }


@pytest.mark.parametrize("real", [False, True], ids=["stand-in", "clone"])
def test_every_change_of_primus_is_registered(tmp_path, real):
    """The stage's registration in Primus, in a clone or in modules with the four names that the stage imports."""
    search = tmp_path
    if real:
        if not (given := os.environ.get("ZAYA_PRIMUS")):
            pytest.skip("ZAYA_PRIMUS names no clone of Primus")
        if importlib.util.find_spec("loguru") is None:
            pytest.skip("Primus needs loguru: pip install loguru")
        search = Path(given)
    else:
        for name, source in PRIMUS.items():
            (tmp_path / "primus" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "primus" / name).write_text(source)
    found = changes("primus", search=search)
    assert found == {"import": [], "registered": ["primus.core.patches.patch_runner.error_rank_0"]}
    assert set(found["registered"]) <= set(HOOKS)

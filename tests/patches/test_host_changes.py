# SPDX-License-Identifier: Apache-2.0
"""Every attribute of torch and Megatron that this plugin changes is a patch or a hook; a run leaves no other one behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_every_change_is_registered(tmp_path, corpus):
    """Two steps of a small demo in a process of their own; all modules and classes of both hosts, and what DDP holds."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.patches.host_changes", str(corpus), str(tmp_path / "run")],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["import"] == [] and found["after"] == []
    assert set(found["patches"]) == set(found["registered"]) - NO_CODE
    symbols = [name for name in found["run"] if "()" not in name]
    assert symbols == sorted(TRAINING + name for name in OF_A_RUN) and set(symbols) <= set(HOOKS)
    instances = {name for name in found["run"] if "()" in name}
    assert instances == {"_ParamAndGradBuffer().reset", "_ParamAndGradBuffer().scale_gradients"}
    assert instances <= {symbol[symbol.index("_Param") :] for symbol in INSTANCES if "_Param" in symbol}

# SPDX-License-Identifier: Apache-2.0
"""Every value of torch, Megatron and Primus that this plugin changes is in its list, and a run restores what it
replaced.
"""

import fnmatch
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.patches import host_changes
from zaya_plugin.patches.hooks import HOOKS, INSTANCES, TRAINING, set_attribute

# Of a run of the demo; the others belong to hosts, stages that take over and `zaya bench`.
RUN_ATTRIBUTES = (
    "training_log",
    "evaluate_and_print_results",
    "save_checkpoint_and_time",
    "train",
    "load_checkpoint",
    "get_megatron_optimizer",
    "finalize_model_grads",
    "logical_and_across_model_parallel_group",
    "reduce_max_stat_across_model_parallel_group",
    "get_signal_handler",
    "dummy_train_step",
    "train_step",  # by the program, to look
)
# Attributes of the run's objects; expert_parallel_bucket_groups is another list in every run, with the old groups in it
# where no two of them are joined.
OBJECTS = {
    "Parameter().zero_out_wgrad",
    "_ParamAndGradBuffer().reset",
    "_ParamAndGradBuffer().scale_gradients",
    "DistributedDataParallel().expert_parallel_bucket_groups",
    "DistributedDataParallel().param_to_bucket_group",
}
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "objects"),
    [
        ((), OBJECTS),
        pytest.param(
            ("parallel.use_distributed_optimizer=false", "parallel.overlap_param_gather=false"),
            {
                *OBJECTS,
                "MegatronOptimizer().init_state_fn",
                "MegatronOptimizer()._filter_and_reorder_param_groups",
                "MegatronOptimizer().sharded_state_dict",
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sharded optimizer", "whole optimizer"],
)
def test_every_change_is_registered(tmp_path, corpus, overrides, objects):
    """Three steps of a small demo change what the list names, and nothing else of the hosts: code, values or
    objects.
    """
    found = changes("run", str(corpus), str(tmp_path / "run"), *overrides)
    assert found["import"] == [] and found["after"] == []
    assert sorted(found["patches"]) == sorted(found["registered"])
    symbols = [name for name in found["run"] if "()" not in name]
    assert symbols == sorted(TRAINING + name for name in RUN_ATTRIBUTES) and set(symbols) <= set(HOOKS)
    assert {name for name in found["run"] if "()" in name} == objects
    assert objects <= set(INSTANCES)


@pytest.mark.slow
def test_the_stock_host_changes_its_own_state(tmp_path, corpus):
    """Megatron's own model, loop and optimizer change every value that the comparison leaves out as the host's own."""
    found = changes("stock", str(corpus), str(tmp_path / "run"))
    names = {*found["run"], *found["after"]}
    assert [pattern for pattern in host_changes.HOST_STATE if not fnmatch.filter(names, pattern)] == []
    assert not names & {symbol for symbol in HOOKS if symbol != TRAINING + "train_step"}


CHANGES = {  # what -> how a test of this file changes the stand-in for a module of Megatron
    "flag": lambda host: setattr(host, "FLAG", False),
    "number": lambda host: setattr(host, "NUMBER", 2),
    "tuple": lambda host: setattr(host, "KEYS", ("a",)),
    "dict": lambda host: host.TABLE.update(b=2),
    "value of a dict": lambda host: host.TABLE.update(a=2),
    "list": lambda host: host.ORDER.reverse(),
    "dict of a class": lambda host: host.Group.members.clear(),
    "new name": lambda host: setattr(host, "NEW", 1),
    "removed name": lambda host: delattr(host, "FLAG"),
    "function": lambda host: setattr(host, "work", print),
}


SOURCE = """
FLAG, NUMBER, KEYS, TABLE, ORDER = True, 1, ('a', 'b'), {'a': 1}, [1, 2]
def work(): ...
class Group:
    members = {'a': 1}
    def __init__(self): self.groups, self.flag = [1, 2], True
class Other(Group): ...
"""


@pytest.fixture
def host(monkeypatch):
    """host(name): a module of Megatron with values of each kind."""

    def make(name: str) -> ModuleType:
        made = ModuleType(f"megatron.{name}")
        exec(SOURCE, vars(made))
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return made

    return make


def test_an_unregistered_change_of_a_value_is_detected(host):
    """All changes at once, each in a module of its own: a snapshot of all modules takes a second."""
    hosts = {change: host(f"stand_in_{number}") for number, change in enumerate(CHANGES)}
    before = host_changes.snapshot()
    assert host_changes.changed(before, host_changes.snapshot()) == []
    for change, module in hosts.items():
        CHANGES[change](module)
    found = host_changes.changed(before, host_changes.snapshot())
    assert [".".join(name.split(".")[:2]) for name in found] == [each.__name__ for each in hosts.values()]


@pytest.mark.parametrize(
    ("attribute", "change"),
    [
        ("groups", lambda group, host: group.groups.reverse()),
        ("flag", lambda group, host: setattr(group, "flag", False)),
        ("new", lambda group, host: setattr(group, "new", 1)),
        ("flag", lambda group, host: delattr(group, "flag")),
        ("__class__", lambda group, host: setattr(group, "__class__", host.Other)),
    ],
    ids=["order", "value", "new", "removed", "class"],
)
def test_an_unregistered_change_of_an_object_is_detected(host, attribute, change):
    module = host("stand_in")
    objects, group = host_changes.Objects(), module.Group()
    objects.note([group])
    assert objects.changed() == []
    change(group, module)
    assert objects.changed() == [f"Group().{attribute}"]


def test_code_of_ours_is_detected_where_the_host_keeps_state():
    """A pattern of HOST_STATE covers values; a function of this project under such a name is still reported."""
    name = "torch.utils.hooks.RemovableHandle.next_id"
    assert host_changes.changed({name: (1, None)}, {name: (2, None)}) == []
    assert host_changes.changed({name: (1, None)}, {name: (set_attribute, None)}) == [name]


@pytest.mark.slow  # one change; those of a run are above
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

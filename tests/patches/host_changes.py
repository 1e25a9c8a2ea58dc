# SPDX-License-Identifier: Apache-2.0
"""Lists the attributes of the hosts' modules and classes that this plugin changes: by import, by its patches, within a run, after it.

`python -m tests.patches.host_changes DATA RUN_DIR [key=value ...]` runs two steps of a small demo in this process and prints JSON:
{"import": [...], "registered": [...], "patches": [...], "run": [...], "after": [...]}, each a list of dotted names. "registered" are the
symbols of the applied patches; attributes of DDP's and the optimizers' instances are `type().attribute`.

`python -m tests.patches.host_changes primus` prints {"import": [...], "registered": [...]} of Primus' stage instead, with Primus on the path.
"""

import functools
import importlib
import inspect
import io
import json
import os
import sys
from types import ModuleType

HOSTS = ("torch", "megatron", "primus")
OURS = ("zaya_plugin", "hip_ops")


def of_host(module: str) -> bool:
    return module.split(".")[0] in HOSTS


def is_code(value) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, (functools.partial, property))


def snapshot() -> dict[str, object]:
    """Functions and classes by dotted name: attributes of the hosts' modules, and of the classes that they define."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or not of_host(name):
            continue
        for attribute, value in list(vars(module).items()):
            found[f"{name}.{attribute}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                found |= {f"{name}.{attribute}.{each}": inner for each, inner in list(vars(value).items())}
    return found


def changed(before: dict, after: dict) -> list[str]:
    """Names of code that is another object than before, or that this plugin has added."""
    names = []
    for name, value in after.items():
        if name in before:
            if value is not before[name] and (is_code(before[name]) or ours(value)):
                names.append(name)
        elif ours(value):
            names.append(name)
    return sorted(names)


def ours(value) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    if str(type(value).__module__).startswith(OURS):  # an object of ours that is called
        return callable(value)
    if not is_code(value):  # of other objects, lazy modules among them, attributes are not looked at
        return False
    value = getattr(value, "fget", value)
    return str(getattr(value, "__module__", "")).startswith(OURS)


def of_instances(model, optimizer) -> list[str]:
    """Code of ours among the attributes of DDP, its buffers, its bucket groups and Megatron's optimizers.

    A list of Megatron's objects in another order (expert_parallel_bucket_groups) is no code and is not found.
    """
    found = set()
    for each in optimizer.chained_optimizers:
        found |= {f"MegatronOptimizer().{name}" for name, value in vars(each).items() if ours(value)}
    for chunk in model:
        buffers = [*chunk.buffers, *chunk.expert_parallel_buffers] if hasattr(chunk, "expert_parallel_buffers") else []
        groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
        for each in (chunk, *buffers, *groups, *(bucket for group in groups for bucket in group.buckets)):
            for name, value in vars(each).items():
                if ours(value) or ours(getattr(value, "__func__", None)):
                    found.add(f"{type(each).__name__}().{name}")
    return sorted(found)


def primus() -> None:
    """Register Primus' stage, and print what that changes."""
    importlib.import_module("megatron.training.training")
    for name in (
        "backends.megatron.megatron_pretrain_trainer",
        "core.backend.backend_registry",
        "core.patches.patch_runner",
        "core.utils.module_utils",
    ):
        importlib.import_module(f"primus.{name}")
    bare = snapshot()
    from zaya_plugin.hosts.primus import trainer

    imported = snapshot()
    trainer.register()
    print(json.dumps({"import": changed(bare, imported), "registered": changed(imported, snapshot())}))


def main(data: str, run_dir: str, *overrides: str) -> None:
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for module in (
        "torch._dynamo",
        "torch._inductor.compile_fx",
        "megatron.training.training",
    ):  # they change torch themselves
        importlib.import_module(module)
    bare = snapshot()
    for module in ("pretrain", "guest", "stage_handover", "measured_steps", "explain", "position_loss"):
        importlib.import_module(f"zaya_plugin.hosts.{module}")
    imported = snapshot()
    found = {"import": changed(bare, imported)}

    from tests.running import MICRO
    from zaya_plugin import patches
    from zaya_plugin.config.compose import compose, save_recipe
    from zaya_plugin.hosts import worker
    from zaya_plugin.patches import hooks

    applied = [patch for patch in patches.describe() if patch.applies]
    found["registered"] = [symbol for patch in applied for symbol in (patch.symbol, *patch.also)]
    patches.apply_torch()
    patches.apply()
    patched = snapshot()
    found["patches"] = changed(imported, patched)

    def observed(train_step, forward_step, data_iterator, model, optimizer, *positional, **named):
        found["run"] = changed(patched, snapshot()) + of_instances(model, optimizer)
        return train_step(forward_step, data_iterator, model, optimizer, *positional, **named)

    recipe = compose(
        [
            *MICRO,
            "nproc=1",
            f"data.path={data}",
            f"run_dir={run_dir}",
            "stage.train_iters=3",
            "stage.eval_interval=2",
            *overrides,
        ]
    )
    os.makedirs(run_dir, exist_ok=True)
    save_recipe(recipe, f"{run_dir}/recipe.yaml")
    console, sys.stdout = sys.stdout, io.StringIO()
    with hooks.wrapped([(hooks.TRAINING + "train_step", observed)]):
        assert worker.main([f"{run_dir}/recipe.yaml"]) == 0
    sys.stdout = console
    found["after"] = changed(patched, snapshot())
    print(json.dumps(found))


if __name__ == "__main__":
    primus() if sys.argv[1:] == ["primus"] else main(*sys.argv[1:])

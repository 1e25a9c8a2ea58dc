# SPDX-License-Identifier: Apache-2.0
"""Lists what this plugin changes in the hosts' modules, classes and objects: by import, by its patches, in a run, after
it.

`python -m tests.patches.host_changes run DATA RUN_DIR [key=value ...]` runs three steps of a small demo in this process
and prints JSON: {"import": [...], "registered": [...], "patches": [...], "run": [...], "after": [...]}, each a list of
dotted names. "registered" are the symbols of the applied patches; attributes of objects are `type().attribute`.
`stock` in place of `run` trains Megatron's own GPT model with Megatron's own loop and optimizer, without a hook of this
plugin. On a CPU that needs the patches, so what changes after them is the host's own state.
`python -m tests.patches.host_changes primus` prints {"import": [...], "registered": [...]} of Primus' stage instead,
with Primus on the path.

HOST_STATE names the values that the hosts change themselves; only `stock` prints them.
"""

import contextlib
import fnmatch
import functools
import importlib
import inspect
import io
import json
import os
import sys
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from types import ModuleType

HOSTS = ("torch", "megatron", "primus")
OURS = ("zaya_plugin", "hip_ops")
SCALARS = (bool, int, float, complex, str, bytes, type(None))
MODE = '"cuda" device literals'

# Pattern of names -> what the hosts keep there. A run of the stock host changes each of them too
# (test_the_stock_host_changes_its_own_state).
HOST_STATE = {
    "megatron.core.parallel_state._*": "process groups and their ranks",
    "megatron.core.num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR": "micro-batches of this step",
    "megatron.core.rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE": "state of the checks for faulty hardware",
    "megatron.core.tensor_parallel.random._CUDA_RNG_STATE_TRACKER*": "random streams",
    "megatron.core.transformer.moe.moe_logging._MOE_METRICS_TRACKER": "Megatron's own statistics of experts",
    "megatron.core.transformer.moe.moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale": "set by every schedule",
    "megatron.core.dist_checkpointing.strategies.torch._logged_mcore_async_deprecation": "a message printed once",
    "megatron.training.ft_integration._seen_checkpoints_cnt": "a counter of checkpoints",
    "megatron.training.global_vars._GLOBAL_*": "arguments, timers, tokenizer and signal handler",
    "megatron.training.training._STARTUP_TIMESTAMPS": "times of the start",
    "megatron.training.training.num_checkpoints_memory_reported": "a counter of checkpoints",
    "torch.autograd.profiler._cupti_monitor_*": "a module that torch looks for once",
    "torch.distributed.distributed_c10d._*": "process groups",
    "torch.distributed.checkpoint._state_dict_stager.dispatch_table": "Python's copyreg.dispatch_table",
    "torch.utils.hooks.RemovableHandle.next_id": "a counter of hooks",
    "*.__warningregistry__": "Python's record of warnings",
    "*.__slotnames__": "Python's cache for pickling a class",
    "GPTModel().model_type": "set by get_model",
    "Parameter().main_grad": "DDP's gradient",
    "Parameter().grad_added_to_main_grad": "DDP's mark",
    "Parameter().tensor_model_parallel": "default set by get_model",
    "Parameter().partition_*": "default set by get_model",
    "Parameter().expert_tp": "set by get_megatron_optimizer",
    "Parameter().is_qkv": "set by get_megatron_optimizer",
    "Parameter().qkv_split_shapes": "set by get_megatron_optimizer",
    "_ParamAndGradBucketGroup().cached_*": "views of its buffers",
    "_ParamAndGradBucketGroup().param_gather_dispatched": "progress of a step",
    "_ParamAndGradBucketGroup().per_param_grad_ready_counts": "progress of a step",
}
# Changed through an interface that is made for it, or an attribute of our own.
BY_INTERFACE = {
    "torch._library.custom_ops.OPDEF*": "hip_ops registers its operators through torch.library",
    "torch.library._defs": "hip_ops registers its operators through torch.library",
    "torch.library._impls": "hip_ops registers its operators through torch.library",
    "torch.ops._dir": "namespaces of registered operators",
    "torch.jit._builtins._builtin_table": "torch fills it with the registered operators",
    "*.backend_registry.BackendRegistry.*": "register_trainer_class of Primus",
    "Parameter().zaya_role": "our own attribute (zaya_plugin.optim.parameter_role)",
}


def expected(name: str) -> bool:
    """Whether a value, other than code of ours, may change without being in the plugin's list."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in (*HOST_STATE, *BY_INTERFACE))


def of_host(module: str) -> bool:
    return module.split(".")[0] in HOSTS


def snapshot() -> dict[str, tuple[object, object]]:
    """Every attribute of the hosts' modules and of the classes that they define, with its content, by dotted name."""
    from torch.overrides import _get_current_function_mode_stack

    modes = _get_current_function_mode_stack()
    found = {MODE: (None, content(modes))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated values warn when they are looked at
        for name, module in list(sys.modules.items()):
            if not isinstance(module, ModuleType) or not of_host(name):
                continue
            for attribute, value in list(vars(module).items()):
                found[f"{name}.{attribute}"] = value, content(value)
                if inspect.isclass(value) and value.__module__ == name:
                    for inner, held in list(vars(value).items()):
                        found[f"{name}.{attribute}.{inner}"] = held, content(held)
    return found


def content(value) -> dict | list | None:
    """A shallow copy of a container, None for other values."""
    if isinstance(value, Mapping):
        return dict(value)
    return list(value) if isinstance(value, (list, tuple, set, frozenset, deque)) else None


def same(one, other) -> bool:
    """Whether two values are one object, or equal numbers or texts."""
    return one is other or (isinstance(one, SCALARS) and type(one) is type(other) and one == other)


def same_attribute(before: tuple[object, object], after: tuple[object, object]) -> bool:
    """Whether an attribute is the same object with the same content; of containers the items are compared."""
    (value, items), (new_value, new_items) = before, after
    if not same(value, new_value):
        return False
    if isinstance(items, dict):
        return items.keys() == new_items.keys() and all(same(items[key], new_items[key]) for key in items)
    return items is None or (len(items) == len(new_items) and all(map(same, items, new_items)))


def changed(before: dict, after: dict, allowed: Callable[[str], bool] = expected) -> list[str]:
    """Names whose value or content is another than before, and names that were added to a module or a class.

    A submodule becomes an attribute of its package when it is imported; that is no change.
    """
    holders = {name.rpartition(".")[0] for name in before}
    names = []
    for name, attribute in after.items():
        if name in before:
            if not same_attribute(before[name], attribute):
                names.append(name)
        elif ours(attribute[0]) or (name.rpartition(".")[0] in holders and not isinstance(attribute[0], ModuleType)):
            names.append(name)
    names += [name for name in before if name not in after]
    replaced = set(names)  # of a class that is replaced, the attributes are not listed
    names = [name for name in names if name.rpartition(".")[0] not in replaced]
    return sorted(name for name in names if not allowed(name) or ours(after.get(name, (None,))[0]))


def ours(value) -> bool:
    """Whether `value` is a function, a class or a callable object of this project."""
    while isinstance(value, functools.partial):
        value = value.func
    if str(type(value).__module__).startswith(OURS):
        return callable(value)
    if not (inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property)):
        return False  # of other objects, lazy modules among them, attributes are not looked at
    value = getattr(value, "fget", value)
    return str(getattr(value, "__module__", "")).startswith(OURS)


class Objects:
    """Objects of the hosts as their own builders left them, and which of their attributes differ later."""

    def __init__(self):
        self.noted = {}

    def note(self, objects) -> None:
        """Keep class and attributes of each object of a host's class."""
        for each in objects:
            if of_host(type(each).__module__):
                self.noted[id(each)] = each, self.attributes(each)  # the reference keeps the id from being reused

    @staticmethod
    def attributes(each) -> dict[str, tuple[object, object]]:
        found = {name: (value, content(value)) for name, value in vars(each).items()}
        return {**found, "__class__": (type(each), None)}

    def changed(self, allowed: Callable[[str], bool] = expected) -> list[str]:
        """Return `type().attribute` of every attribute that is new, gone, or another than at first."""
        from megatron.core.optimizer.optimizer import MegatronOptimizer

        found = set()
        for each, before in self.noted.values():
            now = self.attributes(each)
            first_class = before["__class__"][0]
            name = "MegatronOptimizer" if issubclass(first_class, MegatronOptimizer) else first_class.__name__
            added = (
                {*now} - {*before} if type(each) is first_class else set()
            )  # an object of ours has attributes of ours
            differing = {a for a in before if a not in now or not same_attribute(before[a], now[a])}
            found |= {
                f"{name}().{attribute}"
                for attribute in added | differing
                if not allowed(f"{name}().{attribute}") or ours(now.get(attribute, (None,))[0])
            }
        return sorted(found)

    @contextlib.contextmanager
    def watched(self):
        """Note models and DDP at the end of their constructors, and optimizers as Megatron's factory returns them."""
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.models.gpt import GPTModel
        from megatron.training import training

        before = GPTModel.__init__, DistributedDataParallel.__init__, training.get_megatron_optimizer

        @functools.wraps(before[0])
        def build_model(model, *positional, **named):
            before[0](model, *positional, **named)
            self.note([*model.modules(), *model.parameters()])

        @functools.wraps(before[1])
        def build_ddp(chunk, *positional, **named):
            before[1](chunk, *positional, **named)
            groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
            buffers = [*chunk.buffers, *chunk.expert_parallel_buffers]
            self.note([chunk, *buffers, *groups, *(bucket for group in groups for bucket in group.buckets)])

        @functools.wraps(before[2])
        def build_optimizer(*positional, **named):
            chained = before[2](*positional, **named)
            self.note([chained, *getattr(chained, "chained_optimizers", ())])
            return chained

        GPTModel.__init__, DistributedDataParallel.__init__ = build_model, build_ddp
        training.get_megatron_optimizer = build_optimizer
        try:
            yield
        finally:
            GPTModel.__init__, DistributedDataParallel.__init__, training.get_megatron_optimizer = before


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


def main(kind: str, data: str, run_dir: str, *overrides: str) -> None:
    """Train three steps and print what has changed. kind: "run" or "stock"."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    # they change torch themselves
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "megatron.training.training"):
        importlib.import_module(module)
    bare = snapshot()
    for module in ("pretrain", "guest", "stage_handover", "measured_steps", "optimizer_table"):
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
    found["patches"] = changed(imported, snapshot())

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
    objects = Objects()
    with objects.watched():
        patched = snapshot()

        allowed = (lambda name: False) if kind == "stock" else expected

        def observed(train_step, *positional, **named):
            found["run"] = changed(patched, snapshot(), allowed) + objects.changed(allowed)
            return train_step(*positional, **named)

        work = stock if kind == "stock" else None
        with contextlib.redirect_stdout(io.StringIO()), hooks.wrapped([(hooks.TRAINING + "train_step", observed)]):
            assert worker.main([f"{run_dir}/recipe.yaml"], work) == 0
        found["after"] = changed(patched, snapshot(), allowed)
    print(json.dumps(found))


def stock(recipe, *_) -> None:
    """Train Megatron's own GPT model with the arguments of `recipe`, by Megatron's loop without a hook."""
    import torch
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_tokenizer, training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import core_transformer_config_from_args

    from zaya_plugin.config.arguments import megatron_arguments
    from zaya_plugin.data.sources import find_sources
    from zaya_plugin.hosts.adapter import forward_step
    from zaya_plugin.hosts.stage_model import parse_arguments

    sources = find_sources(recipe)
    args = parse_arguments(megatron_arguments(recipe, sources.tokenizer_arguments()))

    def provide_model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        return GPTModel(
            core_transformer_config_from_args(args),
            get_gpt_layer_local_spec(num_experts=args.num_experts, moe_grouped_gemm=False),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            pg_collection=pg_collection,
        )

    def provide_datasets(counts, vp_stage=None):
        return sources.build(counts, args.seq_length, args.seed, get_tokenizer(), args.eval_iters)

    provide_datasets.is_distributed = True
    training.pretrain(
        pretrain_cfg_container_from_args(args),
        provide_datasets,
        ModelType.encoder_or_decoder,
        forward_step,
        model_provider=provide_model,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    primus() if sys.argv[1:] == ["primus"] else main(*sys.argv[1:])

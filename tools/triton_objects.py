# SPDX-License-Identifier: Apache-2.0
"""Chooses and compiles the code objects of Triton kernels that the package ships (hip_ops/runtime/code_objects.py);
`python -m tools.ship` calls it.

What is compiled follows from the recipes: each recipe's first line is the command that runs it, and those for the
target's machine are composed. The operators then launch their kernels as on that machine, and the launches are
recorded: those of training, for a quarter of the recipe's tokens to twice as many, since the micro-batch is what users
change and since with expert parallelism the rows of a device differ from step to step; and those of the self-check.
"""

import contextlib
import hashlib
import importlib
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hip_ops.runtime.code_objects import OBJECTS_MANIFEST, Call, call_of, kernels_digest, objects_digest
from hip_ops.runtime.model_sizes import ModelSizes, set_model_sizes
from hip_ops.runtime.operator import OPERATORS, all_operators
from tests.gfx942.triton_objects import compiled_object
from tests.hip_ops.training_calls import Sizes, training_calls
from tests.hip_ops.triton_launches import launched_as_on
from zaya_plugin.config.compose import compose

ROOT = Path(__file__).resolve().parents[1]
MACHINES = {"gfx942": "MI300X", "gfx950": "MI355X"}  # name of the recipes' `machine`
COMMAND = re.compile(r"^# zaya (?:train|export slurm) (.*experiment=.*)$", re.MULTILINE)
TOKEN_FACTORS = (0.25, 0.5, 1, 2)  # of the recipe's tokens a device
CPU = torch.device("cpu")
# Properties that an object does not require, by argument. Rows and the unweighted class are only compared, and biases
# are 17 numbers. Parameters may be views of DDP's buffer, which is 2 GiB or larger in the recipes.
NOT_REQUIRED = {"rows": "D", "unweighted": "D", "biases": "D"} | dict.fromkeys(
    ("gamma", "b_down", "w_norm", "w1", "b1", "w2", "b2", "w_out"), "S"
)
OPERATORS_OF = {  # by folder
    "router_mlp": ("router_mlp", "router_mlp_backward"),
    "grouped_product": ("grouped_rows", "grouped_outer_"),
}
BASE = ModelSizes()
NAMES = [name for names in OPERATORS_OF.values() for name in names]


def recipe_sizes(target: str) -> set[tuple[Sizes, int]]:
    """Return sizes of training, and the expert-parallel ranks, of all recipes for the target's machine. Recipes of the
    other groups (stage, model, ...) name the same commands.
    """
    files = [
        file for group in ("experiment", "parallel", "cluster") for file in (ROOT / "recipes" / group).glob("*.yaml")
    ]
    commands = {command for file in files for command in COMMAND.findall(file.read_text())}
    recipes = [compose(command.split()) for command in sorted(commands)]
    return {_sizes_of(recipe) for recipe in recipes if recipe.machine.name == MACHINES[target]}


def _sizes_of(recipe) -> tuple[Sizes, int]:
    parallel, model = recipe.parallel, recipe.model
    return Sizes(
        seq_length=recipe.stage.seq_length // parallel.context_parallel_size // parallel.tensor_model_parallel_size,
        micro_batch_size=recipe.stage.micro_batch_size,
        hidden_size=model.hidden_size,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        num_experts=model.num_experts,
        num_attention_heads=model.num_attention_heads,
        router_hidden_size=model.router_hidden_size,
    ), parallel.expert_model_parallel_size


def _calls(sizes: Sizes, expert_ranks: int) -> Iterator[tuple[str, tuple]]:
    """Yield operators and arguments of a training step."""
    for factor in TOKEN_FACTORS:
        scaled = replace(sizes, seq_length=math.ceil(sizes.seq_length * factor))
        calls = training_calls(1, scaled, expert_ranks=expert_ranks)
        yield from ((name, arguments) for name in NAMES for arguments in calls[name])


@contextlib.contextmanager
def launches_as_on(target: str) -> Iterator[Callable[[str, tuple], list[Call]]]:
    """Yield launches(operator, arguments): the forms of the launches that the operator's Triton version makes on the
    target's machine. Nothing is launched.
    """
    seen: list[Call] = []

    def record(operator, kernel, grid, *arguments, device, **keywords) -> None:
        call = call_of(kernel, arguments, keywords)
        names = kernel_function(operator, kernel).arg_names
        loosened = tuple(
            (kind, "".join(one for one in properties if one not in NOT_REQUIRED.get(name, "")))
            for name, (kind, properties) in zip(names, call.arguments, strict=False)
        )
        seen.append(call._replace(arguments=loosened))

    def launches(name: str, arguments: tuple) -> list[Call]:
        seen.clear()
        OPERATORS[name]._function_of("triton")(*arguments)
        return [*seen]

    all_operators()
    modules = [importlib.import_module(f"hip_ops.ops.{folder}.triton") for folder in OPERATORS_OF]
    with pytest.MonkeyPatch.context() as patch, torch.no_grad(), launched_as_on(target):
        for module in modules:
            patch.setattr(module, "launch_triton_kernel", record)
        yield launches


def examples(name: str, sizes: ModelSizes = BASE) -> list[tuple]:
    """Return the arguments of an operator's calls in the self-check of its Triton version."""
    operator = OPERATORS[name]
    set_model_sizes(sizes)
    try:
        return [make(CPU) for make in (*operator.examples, *operator.more_examples.get("triton", ()))]
    finally:
        set_model_sizes(BASE)


def recorded_calls(target: str) -> dict[Call, str]:
    """Return the forms of calls for which objects are shipped, each with its operator's folder, in a fixed order."""
    sizes = sorted(recipe_sizes(target), key=str)
    assert sizes, f"no recipe is for {MACHINES[target]}"
    needed: dict[Call, str] = {}
    with launches_as_on(target) as launches:
        for one, expert_ranks in sizes:
            for name, arguments in _calls(one, expert_ranks):
                needed |= dict.fromkeys(launches(name, arguments), OPERATORS[name].folder)
        models = {BASE, *(one.of_a_rank(expert_ranks) for one, expert_ranks in sizes)}
        checked = [
            (call, OPERATORS[name].folder)
            for name in NAMES
            for model in sorted(models, key=str)
            for each in examples(name, model)
            for call in launches(name, each)
        ]
    for call, folder in sorted(checked, key=_order):  # those with few properties first: they compute the others too
        if not any(other.covers(call) for other in needed):
            needed[call] = folder
    return dict(sorted(needed.items(), key=_order))


def _order(entry: tuple[Call, str]) -> tuple:
    call, _ = entry
    return sum(len(properties) for _, properties in call.arguments), str(call), call.arguments


def kernel_function(operator: str, kernel: str):
    return getattr(importlib.import_module(f"hip_ops.ops.{operator}.triton_kernels"), kernel)


def compile_call(operator: str, call: Call, target: str) -> tuple[dict, bytes]:
    """Compile the object for a call; return its entry of the manifest and its bytes."""
    function, keywords = kernel_function(operator, call.kernel), dict(call.keywords)
    constants = {name: value for name, value in keywords.items() if name in function.arg_names}
    names = [name for name in function.arg_names if name not in constants]
    arguments = [[name, *described] for name, described in zip(names, call.arguments, strict=True)]
    compiled = compiled_object(
        function,
        {name: kind for name, kind, _ in arguments},
        constants,
        [name for name, _, properties in arguments if "D" in properties],
        [name for name, _, properties in arguments if "S" in properties],
        target=target,
        **{name: value for name, value in keywords.items() if name not in constants},
    )
    content = compiled.path.read_bytes()
    form = json.dumps([call.kernel, sorted(keywords.items()), call.arguments])
    entry = {
        "file": f"{call.kernel}-{hashlib.sha256(form.encode()).hexdigest()[:8]}.hsaco",
        "sha256": hashlib.sha256(content).hexdigest(),
        "operator": operator,
        "kernel": compiled.name,
        "keywords": keywords,
        "arguments": arguments,
        "trailing_pointers": compiled.trailing_pointers,
        "shared": compiled.shared,
        "threads": compiled.threads,
    }
    return entry, content


def build(folder: Path, target: str) -> int:
    """Compile all objects of `target` into `folder`, with their manifest, and remove other objects from it. Return the
    sum of their bytes.
    """
    import triton

    entries, contents = [], {}
    with tempfile.TemporaryDirectory() as cache, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", cache)  # nothing is taken from an earlier compilation
        for call, operator in recorded_calls(target).items():
            entry, content = compile_call(operator, call, target)
            entries.append(entry)
            contents[entry["file"]] = content
    entries.sort(key=lambda entry: entry["file"])
    assert len(contents) == len(entries), "two objects have one name"
    head = {
        "target": target,
        "triton": triton.__version__,
        "sources": kernels_digest(),
        "sha256": objects_digest([entry["sha256"] for entry in entries]),
    }
    for file in folder.glob("*.hsaco"):
        file.unlink()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    (folder / OBJECTS_MANIFEST).write_text(manifest_text(head, entries))
    return sum(map(len, contents.values()))


def manifest_text(head: dict, entries: list[dict]) -> str:
    """Return the manifest as JSON, an object a line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value)}," for name, value in head.items()]
    objects = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return "\n".join(["{", *lines, f' "objects": [\n{objects}\n ]', "}"]) + "\n"

# SPDX-License-Identifier: Apache-2.0
"""Searches the settings of a recipe that decide its speed and memory on a cluster: micro-batch, recomputation, layout,
buckets, and instances of the optimizer. No torch import.

First every layout (context, expert and tensor parallel) is planned with every micro-batch that divides the batch, each
with the recomputation that the goal takes: of the fastest ones that fit for time, the one that needs least for memory.
Then buckets and instances are varied, of the best few. Pipeline parallelism is left out, because its idle time is not
predicted. Settings whose times differ by less than EQUAL_TIME are equal, and the other goal decides between them; so are
those whose memory differs by less than EQUAL_MEMORY.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zaya_plugin.config.schema import RECOMPUTE_MODULES, Recipe
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.memory import Recompute
from zaya_plugin.plan.prediction import Prediction, obstacle, predict_from
from zaya_plugin.plan.recipe_plan import GIB, RESERVED_SHARE
from zaya_plugin.plan.step_source import Source

GOALS = ("time", "memory")
# Runs of one command on one machine differ by 0.5 to 0.9 % (benchmarks/results/step40-h200-core.json).
EQUAL_TIME = 0.007
EQUAL_MEMORY = 0.01  # of the device's memory
PLAN_ERROR = 0.03  # of the memory plan (docs/plan.md); what RESERVED_SHARE leaves must hold it too
KINDS_SHOWN = 3  # other values of a choice
MICRO_BATCHES = (1, 2, 4, 8, 16)
CONTEXT, EXPERT, TENSOR = (1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2, 4, 8)
BUCKETS = (33_554_432, 67_108_864, 134_217_728, 268_435_456)  # elements
INSTANCES = (1, 2, 4, 8, 16, 32, 64)
REFINED = 3  # settings whose buckets and instances are varied
KEYS = (
    "stage.micro_batch_size",
    "parallel.context_parallel_size",
    "parallel.expert_model_parallel_size",
    "parallel.tensor_model_parallel_size",
    "parallel.recompute_granularity",
    "parallel.recompute_method",
    "parallel.recompute_num_layers",
    "parallel.recompute_modules",
    "parallel.ddp_bucket_size",
    "parallel.num_distributed_optimizer_instances",
)
SHORT = {"micro-batch": 0, "context": 1, "expert": 2, "tensor": 3, "recomputed": 7, "bucket": 8, "instances": 9}


@dataclass(frozen=True)
class Setting:
    """A recipe with its predicted step."""

    recipe: Recipe
    step: Prediction

    @property
    def seconds(self) -> float:
        return self.step.seconds or float("inf")

    @property
    def bytes(self) -> float:
        return self.step.memory.total if self.step.memory else float("inf")

    def values(self) -> dict[str, object]:
        """Return the recipe's values of KEYS."""
        parts = (key.split(".") for key in KEYS)
        return {f"{group}.{name}": getattr(getattr(self.recipe, group), name) for group, name in parts}

    def choices(self) -> dict[str, object]:
        """Return the choices as a person names them."""
        values, recompute = [*self.values().values()], recipe_plan.recompute_of(self.recipe)
        named = {name: values[place] for name, place in SHORT.items()}
        modules = "+".join(name for name in RECOMPUTE_MODULES if name in recompute.modules)
        return {
            **named,
            "recomputed": f"{recompute.full_layers} layers" if recompute.full_layers else modules or "nothing",
        }


def search(recipe: Recipe, world: int, source: Source, goal: str = "time") -> list[Setting]:
    """Return the settings of `recipe` that fit into the memory of `world` devices, the best one first.

    Raises:
        ValueError: the time of a step cannot be predicted on the recipe's machine, or no setting fits.
    """
    parallel = replace(recipe.parallel, pipeline_model_parallel_size=1, virtual_pipeline_stages=1)
    recipe = replace(recipe, parallel=parallel)
    if problem := obstacle(replace(source, recompute=Recompute()), recipe):
        raise ValueError(problem)
    if recipe.cluster.memory_gib is None:
        raise mistake("cluster.memory_gib", None, problem="is needed for a search", fix="cluster.memory_gib=GIB")
    settings: list[Setting] = []
    for context in CONTEXT:
        for expert in EXPERT:
            for tensor in TENSOR:
                for micro in MICRO_BATCHES:
                    sizes = dict(context_parallel_size=context, expert_model_parallel_size=expert)
                    parallel = replace(recipe.parallel, **sizes, tensor_model_parallel_size=tensor)
                    changed = replace(recipe, parallel=parallel, stage=replace(recipe.stage, micro_batch_size=micro))
                    settings += planned(changed, world, source, goal)
    settings = ranked(settings, goal, recipe)
    if not settings:
        problem = f"no searched setting fits into {available(recipe) / GIB:.1f} GiB a device"
        raise mistake("--gpus", world, problem=problem, fix="more devices, or a smaller model")
    for setting in settings[:REFINED]:
        for bucket in BUCKETS:
            for instances in INSTANCES:
                sizes = dict(num_distributed_optimizer_instances=instances, ddp_bucket_size=bucket)
                changed = replace(setting.recipe, parallel=replace(setting.recipe.parallel, **sizes))
                refined = predicted(changed, world, source)
                settings += [refined] if refined and refined.bytes <= available(recipe) else []
    unique = {str(setting.values()): setting for setting in settings}
    return ranked([*unique.values()], goal, recipe)


def available(recipe: Recipe) -> float:
    """Return the bytes of a device that a plan may take."""
    return (1 - RESERVED_SHARE) * recipe.cluster.memory_gib * GIB / (1 + PLAN_ERROR)


def planned(recipe: Recipe, world: int, source: Source, goal: str) -> list[Setting]:
    """Return the recipe with each recomputation that fits and that the goal can take, predicted; empty if the recipe is
    invalid on so many ranks.
    """
    try:
        validate(replace(recipe, parallel=without_recompute(recipe)), world)
    except ValueError:
        return []
    shape, layout, batch = (
        recipe_plan.shape_of(recipe),
        recipe_plan.layout_of(recipe, world),
        recipe_plan.batch_of(recipe, world),
    )
    allowed = tuple(name for name in RECOMPUTE_MODULES if name != "permute" or layout.expert == 1)
    rest = recipe_plan.optimizer_of(recipe), recipe.machine, allowed, recipe_plan.has_graph(recipe)
    fitting = [row for row in recipe_plan.choices(shape, layout, batch, *rest) if row.plan.total <= available(recipe)]
    if goal == "memory":
        fitting = sorted(fitting, key=lambda row: row.plan.total)[:1]
    return [setting for row in fitting[:3] if (setting := predicted(with_choice(recipe, row.recompute), world, source))]


def without_recompute(recipe: Recipe):
    """Return the recipe's parallel group without recomputation."""
    return replace(
        recipe.parallel,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=[],
    )


def with_choice(recipe: Recipe, recompute: Recompute) -> Recipe:
    """Return the recipe with a recomputation."""
    parallel = without_recompute(recipe)
    if recompute.full_layers:
        parallel = replace(
            parallel, recompute_granularity="full", recompute_method="block", recompute_num_layers=recompute.full_layers
        )
    elif recompute.modules:
        modules = [name for name in RECOMPUTE_MODULES if name in recompute.modules]
        parallel = replace(parallel, recompute_granularity="selective", recompute_modules=modules)
    return replace(recipe, parallel=parallel)


def predicted(recipe: Recipe, world: int, source: Source) -> Setting | None:
    """Return the recipe with its predicted step; None if it is invalid, or if the source's step recomputes more."""
    try:
        validate(recipe, world)
    except ValueError:
        return None
    step = predict_from(source, recipe, world)
    return None if step.reason else Setting(recipe, step)


def ranked(settings: Sequence[Setting], goal: str, own: Recipe) -> list[Setting]:
    """Return the settings, the best one first. own: the recipe as it is; the best setting is, of those that are equal in
    time and memory, the one that changes least of it.
    """
    if not settings:
        return []
    names = ("seconds", "bytes") if goal == "time" else ("bytes", "seconds")
    order = sorted(settings, key=lambda setting: [getattr(setting, name) for name in names])
    equal = order
    for name in names:
        least = min(getattr(setting, name) for setting in equal)
        more = EQUAL_TIME * least if name == "seconds" else EQUAL_MEMORY * own.cluster.memory_gib * GIB
        equal = [setting for setting in equal if getattr(setting, name) <= least + more]
    before = Setting(own, order[0].step).values()

    def changes(setting: Setting) -> tuple[int, float]:
        return sum(value != before[key] for key, value in setting.values().items()), setting.seconds

    best = min(equal, key=changes)
    return [best, *(setting for setting in order if setting is not best)]


def alternatives(settings: Sequence[Setting]) -> list[Setting]:
    """Return, for each choice, the best settings that take other values of it than the best one, of KINDS_SHOWN
    values.
    """
    best, shown = settings[0].choices(), []
    for name in SHORT:
        values = {str(best[name]): settings[0]}
        for setting in settings[1:]:
            if len(values) <= KINDS_SHOWN:
                values.setdefault(str(setting.choices()[name]), setting)
        shown += [*values.values()][1:]
    return [setting for setting in settings[1:] if any(setting is row for row in shown)]


def reason(setting: Setting, best: Setting, goal: str) -> str:
    """Return why a setting is not the best one."""
    slower, more = setting.seconds / best.seconds - 1, (setting.bytes - best.bytes) / GIB
    if goal == "memory":
        return f"{more:+.1f} GiB" if more > 0.05 else "as much memory, slower or with more changes"
    if slower <= EQUAL_TIME and more > 0.05:
        return f"{more:+.1f} GiB, for a difference that runs of one command have too"
    if slower <= EQUAL_TIME / 10:
        return "more changes"
    base, added = _costs(best), []
    for title, cost in _costs(setting).items():
        added.append((cost - base.get(title, 0.0), title))
    words = [f"{title} +{cost:.0f} ms" for cost, title in sorted(added, reverse=True)[:2] if cost >= 1]
    return ", ".join([*words, *([f"{more:+.1f} GiB"] if abs(more) > 0.5 else [])])


def _costs(setting: Setting) -> dict[str, float]:
    exposed = {f"exposed {name}": link["exposed_ms"] for name, link in setting.step.communication.items()}
    return {row["title"]: row["ms"] for row in setting.step.parts} | exposed


def report(settings: Sequence[Setting], goal: str) -> list[str]:
    """Return the ranking as lines, with the best setting's words last."""
    best, names = settings[0], [*SHORT]
    goals = {"time": "the fastest", "memory": "the one that needs least memory"}
    lines = [
        f"{len(settings)} settings fit; {goals[goal]} on {best.step.devices} devices of {best.step.cluster} (prediction: "
        f"{best.step.error})",
        "  " + " ".join(f"{name:>11}" for name in names) + f"{'ms':>10}{'GiB':>8}",
    ]
    for place, setting in enumerate([best, *alternatives(settings)]):
        cells = " ".join(f"{setting.choices()[name]!s:>11}" for name in names)
        why = "best" if not place else f"{setting.seconds / best.seconds - 1:+.1%}: {reason(setting, best, goal)}"
        lines.append(f"  {cells}{1e3 * setting.seconds:10,.1f}{setting.bytes / GIB:8.1f}  {why}")
    return lines


def words_of(values: Mapping[str, object]) -> list[str]:
    """Return values as the words of a command line."""

    def text(value: object) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(str, value))}]"
        return "null" if value is None else str(value)

    return [f"{key}={text(value)}" for key, value in values.items()]


def yaml_lines(values: Mapping[str, object], experiment: str | None) -> Iterator[str]:
    """Yield the lines of an experiment with the values, based on another one if `experiment` names it."""
    yield "# @package _global_"
    yield "# zaya plan fit"
    if experiment:
        yield f"defaults:\n  - {experiment}\n  - _self_\n"
    for group in dict.fromkeys(key.split(".")[0] for key in values):
        yield f"{group}:"
        for word in words_of({key: value for key, value in values.items() if key.startswith(f"{group}.")}):
            name, _, value = word.partition("=")
            yield f"  {name.split('.')[1]}: {value}"

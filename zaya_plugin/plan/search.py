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

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.config.validate import validate
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.memory import Recompute
from zaya_plugin.plan.prediction import Prediction, obstacle, predict_from
from zaya_plugin.plan.recipe_plan import GIB, RESERVED_SHARE
from zaya_plugin.plan.step_source import Source

# Runs of one command on one machine differ by 0.5 to 0.9 % (benchmarks/results/step40-h200-core.json).
EQUAL_TIME = 0.007
EQUAL_MEMORY = 0.01  # of the device's memory
PLAN_ERROR = 0.03  # of the memory plan (docs/plan.md); what RESERVED_SHARE leaves must hold it too
# Choices by name: the key, and the values that are tried.
LAYOUTS = {
    "micro-batch": ("stage.micro_batch_size", (1, 2, 4, 8, 16)),
    "context": ("parallel.context_parallel_size", (1, 2, 4, 8)),
    "expert": ("parallel.expert_model_parallel_size", (1, 2, 4, 8, 16)),
    "tensor": ("parallel.tensor_model_parallel_size", (1, 2, 4, 8)),
}
EXCHANGES = {
    "bucket": ("parallel.ddp_bucket_size", (33_554_432, 67_108_864, 134_217_728, 268_435_456)),
    "instances": ("parallel.num_distributed_optimizer_instances", (1, 2, 4, 8, 16, 32, 64)),
}
RECOMPUTE = tuple(f"parallel.recompute_{name}" for name in ("granularity", "method", "num_layers", "modules"))
# Without a pipeline, and with buckets of the search.
FIXED = {
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.virtual_pipeline_stages": 1,
    "parallel.bucket_plan": None,
}
REFINED, SHOWN = 3, 3  # settings whose buckets and instances are varied; other values of a choice in a report


@dataclass(frozen=True)
class Option:
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
        """Return the recipe's values of all searched keys."""
        keys = [key for key, _ in {**LAYOUTS, **EXCHANGES}.values()]
        return {key: get(self.recipe, key) for key in (*keys, *RECOMPUTE)}

    def choices(self) -> dict[str, object]:
        """Return the choices as a person names them."""
        choice = recipe_plan.Choice(recipe_plan.recompute_of(self.recipe), self.step.memory, 0.0)
        recompute = choice.name.replace(" whole", "").replace(" + ", "+")
        named = {name: get(self.recipe, key) for name, (key, _) in {**LAYOUTS, **EXCHANGES}.items()}
        return {**named, "recomputed": recompute}


def search(recipe: Recipe, world: int, source: Source, goal: str = "time") -> list[Option]:
    """Return the settings of `recipe` that fit into the memory of `world` devices, the best one first.

    goal: "time" or "memory".

    Raises:
        ValueError: the time of a step cannot be predicted on the recipe's machine, or no setting fits.
    """
    recipe = with_values(recipe, FIXED)
    if problem := obstacle(replace(source, recompute=Recompute()), recipe):
        raise ValueError(problem)
    if recipe.cluster.memory_gib is None:
        raise mistake("cluster.memory_gib", None, problem="is needed for a search", fix="cluster.memory_gib=GIB")
    recipes = (with_values(recipe, values) for values in _combinations(LAYOUTS))
    options = ranked([option for row in recipes for option in planned(row, world, source, goal)], goal, recipe)
    if not options:
        problem = f"no searched setting fits into {available(recipe) / GIB:.1f} GiB a device"
        raise mistake("--gpus", world, problem=problem, fix="more devices, or a smaller model")
    for option in options[:REFINED]:
        refined = (predicted(with_values(option.recipe, values), world, source) for values in _combinations(EXCHANGES))
        options += [row for row in refined if row]
    return ranked({str(option.values()): option for option in options}.values(), goal, recipe)


def _combinations(choices: Mapping[str, tuple[str, tuple]]) -> Iterator[dict]:
    for values in product(*(values for _, values in choices.values())):
        yield dict(zip((key for key, _ in choices.values()), values, strict=True))


def available(recipe: Recipe) -> float:
    """Return the bytes of a device that a plan may take."""
    return (1 - RESERVED_SHARE) * recipe.cluster.memory_gib * GIB / (1 + PLAN_ERROR)


def planned(recipe: Recipe, world: int, source: Source, goal: str) -> list[Option]:
    """Return the recipe with the recomputations that fit and that the goal can take, predicted; empty if the recipe is
    invalid on this number of ranks.
    """
    recipe = recipe_plan.with_choice(recipe, Recompute())
    try:
        validate(recipe, world)
    except ValueError:
        return []
    fitting = [row for row in recipe_plan.choices_of(recipe, world) if row.plan.total <= available(recipe)]
    fitting = sorted(fitting, key=lambda row: row.plan.total)[:1] if goal == "memory" else fitting[:3]
    options = (predicted(recipe_plan.with_choice(recipe, row.recompute), world, source) for row in fitting)
    return [option for option in options if option]


def predicted(recipe: Recipe, world: int, source: Source) -> Option | None:
    """Return the recipe with its predicted step; None if it is invalid or does not fit, or if the source's step
    recomputes more.
    """
    try:
        validate(recipe, world)
    except ValueError:
        return None
    option = Option(recipe, predict_from(source, recipe, world))
    return None if option.step.reason or option.bytes > available(recipe) else option


def ranked(options: Collection[Option], goal: str, own: Recipe) -> list[Option]:
    """Return the options, the best one first. own: the recipe as it is; the best option is, of those that are equal in
    time and memory, the one that changes least of it.
    """
    if not options:
        return []
    names = ("seconds", "bytes") if goal == "time" else ("bytes", "seconds")
    order = equal = sorted(options, key=lambda option: [getattr(option, name) for name in names])
    for name in names:
        least = min(getattr(option, name) for option in equal)
        more = EQUAL_TIME * least if name == "seconds" else EQUAL_MEMORY * own.cluster.memory_gib * GIB
        equal = [option for option in equal if getattr(option, name) <= least + more]

    def changes(option: Option) -> tuple[int, float]:
        return sum(value != get(own, key) for key, value in option.values().items()), option.seconds

    best = min(equal, key=changes)
    return [best, *(option for option in order if option is not best)]


def alternatives(options: Sequence[Option]) -> list[Option]:
    """Return, for each choice, the best options that take other values of it than the best one, of SHOWN values."""
    best, shown = options[0].choices(), []
    for name in best:
        values = {str(best[name]): options[0]}
        for option in options[1:]:
            if len(values) <= SHOWN:
                values.setdefault(str(option.choices()[name]), option)
        shown += [*values.values()][1:]
    return [option for option in options[1:] if any(option is row for row in shown)]


def reason(option: Option, best: Option, goal: str) -> str:
    """Return why a option is not the best one."""
    slower, more = option.seconds / best.seconds - 1, (option.bytes - best.bytes) / GIB
    if goal == "memory":
        return f"{more:+.1f} GiB" if more > 0.05 else "as much memory, slower or with more changes"
    if slower <= EQUAL_TIME and more > 0.05:
        return f"{more:+.1f} GiB, for a difference that runs of one command have too"
    if slower <= EQUAL_TIME / 10:
        return "more changes"
    base, added = _costs(best), []
    for title, cost in _costs(option).items():
        added.append((cost - base.get(title, 0.0), title))
    words = [f"{title} +{cost:.0f} ms" for cost, title in sorted(added, reverse=True)[:2] if cost >= 1]
    return ", ".join([*words, *([f"{more:+.1f} GiB"] if abs(more) > 0.5 else [])])


def _costs(option: Option) -> dict[str, float]:
    exposed = {f"exposed {name}": link["exposed_ms"] for name, link in option.step.communication.items()}
    return {row["title"]: row["ms"] for row in option.step.parts} | exposed


def report(options: Sequence[Option], goal: str) -> list[str]:
    """Return the ranking as lines, with the best option's words last."""
    best = options[0]
    names = [*best.choices()]
    goals = {"time": "the fastest", "memory": "the one that needs least memory"}
    lines = [
        f"{len(options)} options fit; {goals[goal]} on {best.step.devices} devices of {best.step.cluster} (prediction: "
        f"{best.step.error})",
        "  " + " ".join(f"{name:>11}" for name in names) + f"{'ms':>10}{'GiB':>8}",
    ]
    for place, option in enumerate([best, *alternatives(options)]):
        cells = " ".join(f"{option.choices()[name]!s:>11}" for name in names)
        why = "best" if not place else f"{option.seconds / best.seconds - 1:+.1%}: {reason(option, best, goal)}"
        lines.append(f"  {cells}{1e3 * option.seconds:10,.1f}{option.bytes / GIB:8.1f}  {why}")
    return lines


def words_of(values: Mapping[str, object]) -> list[str]:
    """Return values as the words of a command line."""
    lists = {key: f"[{','.join(map(str, value))}]" for key, value in values.items() if isinstance(value, list)}
    return [f"{key}={'null' if value is None else lists.get(key, value)}" for key, value in values.items()]

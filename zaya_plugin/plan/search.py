# SPDX-License-Identifier: Apache-2.0
"""Searches the settings of a recipe that decide its speed and memory on a cluster: micro-batch, recomputation, layout,
buckets, and instances of the optimizer. No torch import.

First every layout (context, expert and tensor parallel) is planned with every micro-batch that divides the batch, each
with the recomputation that the goal takes: of the fastest ones that fit for time, the one that needs least for memory.
Then buckets and instances are varied, of the best few. Pipeline parallelism is left out, because its idle time is not
predicted. Settings whose times differ by less than EQUAL_TIME are equal: a layout that records have is then preferred, and
of those the other goal decides; so are settings whose memory differs by less than EQUAL_MEMORY.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import product

from zaya_plugin.config.schema import Recipe, get, with_values
from zaya_plugin.ground.errors import mistake
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.prediction import Prediction, obstacle, predict
from zaya_plugin.plan.recipe_plan import GIB, NO_RECOMPUTE, RESERVED_SHARE
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
CHOICE_KEYS = {name: key for name, (key, _) in (LAYOUTS | EXCHANGES).items()}
# Without a pipeline, and with buckets of the search.
FIXED = {
    "parallel.pipeline_model_parallel_size": 1,
    "parallel.virtual_pipeline_stages": 1,
    "parallel.bucket_plan": None,
}
REFINED, SHOWN = 3, 10  # settings whose buckets and instances are varied; rows of a report


def search(recipe: Recipe, world: int, source: Source, goal: str = "time") -> list[Prediction]:
    """Return the settings of `recipe` that fit into the memory of `world` devices, the best one first.

    goal: "time" or "memory".

    Raises:
        ValueError: the time of a step cannot be predicted on the recipe's machine, or no setting fits.
    """
    recipe = with_values(recipe, FIXED)
    if problem := obstacle(source, recipe_plan.with_choice(recipe, source.recompute)):
        raise ValueError(problem)
    if recipe.cluster.memory_gib is None:
        raise mistake("cluster.memory_gib", None, problem="is needed for a search", fix="cluster.memory_gib=GIB")
    options = [step for row in _combinations(recipe, LAYOUTS) for step in _recomputed(row, world, source, goal)]
    if not options:
        problem = f"no searched setting fits into {available(recipe) / GIB:.1f} GiB a device"
        raise mistake("--gpus", world, problem=problem, fix="more devices, or a smaller model")
    best = ranked(options, goal, recipe)[:REFINED]
    exchanged = [_fitting(row, world, source) for option in best for row in _combinations(option.recipe, EXCHANGES)]
    return ranked({str(values_of(step)): step for step in (*options, *exchanged) if step}.values(), goal, recipe)


def _combinations(recipe: Recipe, choices: Mapping[str, tuple[str, tuple]]) -> list[Recipe]:
    """Return the recipe with each combination of the choices' values."""
    keys = [key for key, _ in choices.values()]
    combinations = product(*(values for _, values in choices.values()))
    return [with_values(recipe, dict(zip(keys, values, strict=True))) for values in combinations]


def available(recipe: Recipe) -> float:
    """Return the bytes of a device that a plan may take."""
    return (1 - RESERVED_SHARE) * recipe.cluster.memory_gib * GIB / (1 + PLAN_ERROR)


def _recomputed(recipe: Recipe, world: int, source: Source, goal: str) -> list[Prediction]:
    """Return the recipe with the recomputations that fit and that the goal can take, predicted; empty if the recipe is
    invalid on this number of ranks.
    """
    recipe = with_values(recipe, NO_RECOMPUTE)
    rows = recipe_plan.choices_of(recipe, world) if recipe_plan.is_valid(recipe, world) else []
    rows = [row for row in rows if row.plan.total <= available(recipe)]
    rows = sorted(rows, key=lambda row: row.plan.total)[:1] if goal == "memory" else rows[:3]
    return [step for row in rows if (step := _fitting(recipe_plan.with_choice(recipe, row.recompute), world, source))]


def _fitting(recipe: Recipe, world: int, source: Source) -> Prediction | None:
    """Return the prediction; None if the recipe is invalid or does not fit, or if the source's step recomputes more."""
    if not recipe_plan.is_valid(recipe, world):
        return None
    step = predict(recipe, world, source)
    return None if step.reason or step.memory.total > available(recipe) else step


def ranked(options: Collection[Prediction], goal: str, own: Recipe) -> list[Prediction]:
    """Return the options, the best one first. own: the recipe as it is; the best option is, of those that are equal in
    time and memory, a recorded layout, and the one that changes least of it.
    """
    time = (lambda step: step.seconds, lambda least: EQUAL_TIME * least)
    memory = (lambda step: step.memory.total, lambda least: EQUAL_MEMORY * own.cluster.memory_gib * GIB)
    sizes, equal = (time, memory) if goal == "time" else (memory, time), options
    for size, difference in sizes:
        least = min(map(size, equal))
        equal = [step for step in equal if size(step) <= least + difference(least)]
        equal = [step for step in equal if not step.unrecorded] or equal
    best = min(
        equal, key=lambda step: (sum(value != get(own, key) for key, value in values_of(step).items()), step.seconds)
    )
    return sorted(options, key=lambda step: (step is not best, *(size(step) for size, _ in sizes)))


def values_of(step: Prediction) -> dict[str, object]:
    """Return the values of all searched keys."""
    return {key: get(step.recipe, key) for key in (*CHOICE_KEYS.values(), *NO_RECOMPUTE)}


def choices_of(step: Prediction) -> dict[str, object]:
    """Return the choices as a person names them."""
    recomputed = recipe_plan.recompute_of(step.recipe).name.replace(" whole", "").replace(" + ", "+")
    return {**{name: get(step.recipe, key) for name, key in CHOICE_KEYS.items()}, "recomputed": recomputed}


def report(options: Sequence[Prediction]) -> list[dict]:
    """Return rows of the first option with each value of each choice, at most SHOWN: the choices, ms, gib, mark
    (of a layout that no record has) and why."""
    order = reversed([*enumerate(options)])
    first = {choice: place for place, option in order for choice in choices_of(option).items()}
    shown = [options[place] for place in sorted({*first.values()})][:SHOWN]
    return [
        {
            **choices_of(option),
            "ms": 1e3 * option.seconds,
            "gib": option.memory.total / GIB,
            "mark": "*" if option.unrecorded else None,
            "why": reason(option, options[0]),
        }
        for option in shown
    ]


def reason(option: Prediction, best: Prediction) -> str:
    """Return why an option is not the best one: the costs that it adds most of, and memory."""
    if option is best:
        return "best"
    slower, more = option.seconds / best.seconds - 1, (option.memory.total - best.memory.total) / GIB
    if abs(slower) <= EQUAL_TIME:
        return f"{slower:+.1%}: {more:+.1f} GiB, for a difference that runs of one command have too"
    base = _costs(best)
    added = sorted(((cost - base.get(title, 0.0), title) for title, cost in _costs(option).items()), reverse=True)
    reasons = [f"{title} +{cost:.0f} ms" for cost, title in added[:2] if cost >= 1]
    return f"{slower:+.1%}: {', '.join([*reasons, f'{more:+.1f} GiB'])}"


def _costs(step: Prediction) -> dict[str, float]:
    return {
        **{row["title"]: row["ms"] for row in step.parts},
        **{f"exposed {name}": link["exposed_ms"] for name, link in step.communication.items()},
    }


def words_of(values: Mapping[str, object]) -> list[str]:
    """Return values as the words of a command line."""
    lists = {key: f"[{','.join(map(str, value))}]" for key, value in values.items() if isinstance(value, list)}
    return [f"{key}={'null' if value is None else lists.get(key, value)}" for key, value in values.items()]

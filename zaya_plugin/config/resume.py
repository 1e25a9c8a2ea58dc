# SPDX-License-Identifier: Apache-2.0
"""Compare a recipe with the one that a run was trained with so far, when the run resumes. Imports no torch.

The schema says of every key what a change does (OnResume). A key that one of the two lacks, because another version
wrote it, is not compared.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from zaya_plugin.config.entries import Override, parse_blend
from zaya_plugin.config.run_directory import RECIPE
from zaya_plugin.config.schema import Recipe, get, leaves
from zaya_plugin.ground.errors import as_typed, message, mistake


def _weights(entries: list[str]) -> list[float | None]:
    return [entry.weight for entry in parse_blend(entries, "data.blend")]


def _assignments(entries: list[str]) -> list[tuple]:
    parsed = (Override.parse(entry) for entry in entries)
    return [(override.pattern, override.optimizer) for override in parsed if override.optimizer is not None]


# Of these keys only a part is refused; a change of anything else warns, with this reason.
REFUSED_PART: dict[str, tuple[Callable[[Any], Any], str]] = {
    "data.blend": (_weights, "the weights of the sources are the same, or data.changed=accept"),
    "optim.overrides": (_assignments, "the multipliers of the steps to come are the new ones"),
}

# Keys of the run's length, names and logs, by their beginnings; all others may change the numbers of a step.
OUTSIDE_STEPS = ("exit_interval", "logger.", "name", "profile.", "resume", "run_dir", "stage.train_iters")


def values_of(recipe: Recipe) -> dict[str, Any]:
    """Return the value of every key, as a checkpoint keeps them."""
    return {path: get(recipe, path) for path, _ in leaves()}


def values_in(run_dir: str | os.PathLike) -> dict[str, Any]:
    """Return the values in `run_dir`/recipe.yaml by key, of any version; none without the file.

    Raises:
        ValueError: the file is damaged.
    """
    path = Path(run_dir) / RECIPE
    try:
        loaded = OmegaConf.load(path)
        if not isinstance(loaded, DictConfig):
            raise ValueError("no mapping")
        values = {key: OmegaConf.select(loaded, key, default=loaded) for key, _ in leaves()}
        return {
            key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
            for key, value in values.items()
            if value is not loaded
        }
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise mistake(
            str(path),
            problem=f"is damaged ({' '.join(str(error).split())}), so the recipe of the run is not known",
            allowed="the recipe of the last start, or none",
            fix=f"copy the newest recipe.<n>.yaml to {path}, or remove it",
        ) from error


def changes(before: Mapping[str, Any], recipe: Recipe, run: str | os.PathLike) -> tuple[list[str], list[str]]:
    """Return messages about changes that are refused, and lines about changes that a run may make.

    before: values by key, see `values_of`. run: the directory to name.
    """
    refused, warned = [], []
    for path, field in leaves():
        rule, now = field.metadata["resume"], get(recipe, path)
        if path not in before or (was := before[path]) == now or rule.rule in ("may change", "kept"):
            continue
        if rule.rule == "refused" and not _permitted(path, was, now, recipe):
            refused.append(
                message(
                    path,
                    now,
                    problem=f"the run in {run} was trained with {as_typed(was)}; {rule.why}",
                    allowed=f"{as_typed(was)} on a resume",
                    fix=f"{path}={as_typed(was)} to continue this run, or run_dir=<another directory>",
                )
            )
        else:
            why = rule.why if rule.rule == "warns" else REFUSED_PART[path][1]
            warned.append(f"zaya: resume: {path}: was {as_typed(was)}, is {as_typed(now)}; {why}")
    return refused, warned


def trains_alike(before: Mapping[str, Any], recipe: Recipe) -> bool:
    """Return whether a step of `recipe` is one of the recipe with the values `before`, as far as keys tell."""
    keys = (path for path, _ in leaves() if path in before and not path.startswith(OUTSIDE_STEPS))
    return all(before[path] == get(recipe, path) for path in keys)


def _permitted(path: str, was: Any, now: Any, recipe: Recipe) -> bool:
    if path == "data.blend" and recipe.data.changed == "accept":
        return True
    part, _ = REFUSED_PART.get(path, (None, ""))
    try:
        return part is not None and part(was) == part(now)
    except ValueError:  # entries of another version
        return False

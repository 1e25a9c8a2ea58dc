# SPDX-License-Identifier: Apache-2.0
"""From overrides and YAML files to a checked `Recipe`, and from a `Recipe` to a file and back.

Hydra alone lets three kinds of mistake pass: `+a.b=1` adds a key that no schema knows, a missing `???` value is noticed
only where it is read, and its own messages name neither the nearest key nor what a key may hold. `to_recipe` closes
these holes, so that what it returns is a plain dataclass in which every key is known, set, typed and an allowed choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hip_ops.versions import VERSIONS
from zaya_plugin import __version__
from zaya_plugin.config.messages import expected, explain, known, missing_key, unknown_key
from zaya_plugin.config.schema import Recipe, leaves

RECIPES = "zaya_plugin.recipes"
PRIMARY = "train"
SCHEMA = "recipe_schema"  # the first entry of recipes/train.yaml's defaults list

OPEN_KEYS = ("cluster.kernel_overrides", "megatron", "cluster.environment")  # mappings whose keys are the user's


def register() -> None:
    """Puts the schema where Hydra looks for it. Call before any composition; calling twice is harmless."""
    ConfigStore.instance().store(name=SCHEMA, node=Recipe)


def open_overrides(overrides: list[str]) -> list[str]:
    """Lets `megatron.x=1`, `cluster.environment.X=1` and `cluster.kernel_overrides={x: y}` add keys, where Hydra alone requires a `+`.

    `cluster.kernels=x` and `cluster.kernel_overrides={}` first drop the kernel_overrides of the recipe's files.
    A variable's plain value is quoted too: Hydra would make `False` of `false` and `1000.0` of `1e3`.
    """
    names = "|".join(map(re.escape, OPEN_KEYS))
    pattern = re.compile(rf"^\+*(({names})\.[^=]+|cluster\.kernel_overrides)=(.*)$", re.DOTALL)
    found = [(item, pattern.match(item)) for item in overrides]
    opened = [item if match is None else f"++{match[1]}={_as_text(*match.group(2, 3))}" for item, match in found]
    all_operators = any(re.match(r"\+*cluster\.(kernels=|kernel_overrides=\{\s*\}$)", item) for item in overrides)
    return [*_without_kernel_overrides(), *opened] if all_operators else opened


def _without_kernel_overrides() -> Iterator[str]:
    """Overrides that empty the recipe's mapping. Hydra merges `{}` into it and deletes only entries that exist."""
    for operator in VERSIONS:
        yield f"++cluster.kernel_overrides.{operator}=auto"
        yield f"~cluster.kernel_overrides.{operator}"


def _as_text(key: str, value: str) -> str:
    return f"'{value}'" if key == "cluster.environment" and re.fullmatch(r"[\w.+-]+", value) else value


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turns every exception of Hydra and OmegaConf into a `ValueError` that names key, value and what is allowed."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(explain(error)) from error
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        if "Config group override must be" not in str(error):
            raise
        # Hydra's own words for `model=null` do not say which group
        raise ValueError(
            "a group (model, stage, ..., experiment) takes the name of an option, as in model=zaya_tiny"
        ) from error


def compose(overrides: list[str]) -> Recipe:
    """Composes recipes/train.yaml with `overrides`, as `zaya train` would.

    Raises `ValueError` for unknown keys and options, missing values, wrong types and values outside a key's choices.
    """
    register()
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # may be called inside a Hydra application
    try:
        with readable_errors(), initialize_config_module(RECIPES, version_base="1.3"):
            return to_recipe(hydra_compose(PRIMARY, open_overrides(overrides)))
    finally:
        GlobalHydra.instance().hydra = outer


def to_recipe(config: DictConfig) -> Recipe:
    """The composed `config` as a `Recipe`; all unknown keys, missing values and bad choices are reported at once."""
    with readable_errors():
        problems = [unknown_key(path, value) for path, value in _unknown(config)]
        problems += [missing_key(path) for path in sorted(OmegaConf.missing_keys(config)) if known(path)]
    if problems:
        raise ValueError("\n".join(problems))
    with readable_errors():
        recipe = OmegaConf.to_object(config)
    check_choices(recipe)
    return recipe


def check_choices(recipe: Recipe) -> None:
    """Raises `ValueError` for every key whose value is not among the choices in its metadata."""
    problems = []
    for path, field in leaves():
        choices = field.metadata["choices"]
        value = get(recipe, path)
        if choices and value not in choices:
            problems.append(f"{path} = {value!r}: {expected(path)}")
    if problems:
        raise ValueError("\n".join(problems))


def get(recipe: Recipe, path: str):
    """Value of the dotted key `path`."""
    value = recipe
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _unknown(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key in config:
        path = f"{prefix}{key}"
        node = config._get_node(key)
        if not known(path):
            yield path, node._value() if not isinstance(node, (DictConfig, ListConfig)) else "{...}"
        elif isinstance(node, DictConfig) and path not in OPEN_KEYS and not OmegaConf.is_missing(config, key):
            yield from _unknown(node, f"{path}.")


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def save_recipe(recipe: Recipe, path: str | os.PathLike) -> None:
    """Writes the whole recipe as YAML; a reader sees the old file or the new one, never half of one."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(f"# Written by zaya_plugin {__version__}; `load_recipe` reads it back.\n{to_yaml(recipe)}")
    temporary.replace(path)


def check_written_here(path: str | os.PathLike, export: str) -> None:
    """Refuses a recipe that `save_recipe` of another version wrote for a host; one that was written by hand passes.

    Args:
        export: the command that writes it again.

    Raises:
        ValueError: another version wrote it.
    """
    with open(path) as file:
        written = re.match(r"# Written by zaya_plugin ([^;\s]+);", file.readline())
    if written and written[1] != __version__:
        raise ValueError(
            f"{path}: was written by zaya_plugin {written[1]}. Allowed: zaya_plugin {__version__}, which is installed. Fix: {export}"
        )


def load_recipe(path: str | os.PathLike) -> Recipe:
    """Reads what `save_recipe` wrote, or any YAML file with a recipe's keys; the schema holds here too."""
    try:
        with readable_errors():
            loaded = OmegaConf.load(path)
            if not isinstance(loaded, DictConfig):
                raise ValueError("a recipe is a mapping of keys to values")
            if problems := [unknown_key(key, value) for key, value in _unknown(loaded)]:  # a merge names only the first
                raise ValueError("\n".join(problems))
            return to_recipe(OmegaConf.merge(OmegaConf.structured(Recipe), loaded))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""Compose a checked `Recipe` from overrides and YAML files, write it to a file and read it back.

Hydra alone accepts two kinds of mistakes: `+a.b=1` adds a key that is not in the schema, and a missing `???` value
raises only where it is read. Its messages name neither the nearest key nor the values that a key may have. `to_recipe`
returns a plain dataclass in which every key is in the schema, has a value of its type, and that value is among its
choices and in its range.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, RangeSweep
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hip_ops.versions import VERSIONS
from zaya_plugin import __version__
from zaya_plugin.config.messages import explain, groups, known, missing_key, refusal, refused, schema, unknown_key
from zaya_plugin.config.paths import BLENDS, PATHS, expanded, expanded_entry
from zaya_plugin.config.schema import Recipe, get, leaves
from zaya_plugin.config.train_help import options
from zaya_plugin.config.words import check_override
from zaya_plugin.ground.errors import message, mistake
from zaya_plugin.ground.whole_file import write_whole

RECIPES = "zaya_plugin.recipes"
PRIMARY = "train"
SCHEMA = "recipe_schema"  # the first entry of recipes/train.yaml's defaults list

MOST_JOBS = 10_000  # of a multirun
OPEN_KEYS = (
    "cluster.kernel_overrides",
    "megatron",
    "megatron_unchecked",
    "cluster.environment",
)  # mappings whose keys are the user's


@cache
def register() -> None:
    """Register the schema with Hydra, and `${by:NAME,{a: 1, b: 2}}`, which is the value of NAME. Call it before a
    composition; further calls have no effect.
    """
    ConfigStore.instance().store(name=SCHEMA, node=Recipe)
    # A name that is not among them is refused by the schema.
    OmegaConf.register_new_resolver("by", lambda name, values: values.get(name, min(values.values())), replace=True)


def open_overrides(overrides: list[str]) -> list[str]:
    """Return `overrides` in which `megatron.x=1`, `cluster.environment.X=1` and `cluster.kernel_overrides={x: y}` add
    keys without a `+`, and values arrive as they were typed.

    `cluster.kernels=x` and `cluster.kernel_overrides={}` first drop the kernel_overrides of the recipe's files.
    Values that Hydra would convert before the schema sees them are quoted: `1e3` to 1000.0, `2` to true, `false` to
    `False` in a text. A whole number may be typed as `1e3`.

    Raises:
        ValueError: a group is given as a mapping, which Hydra would merge into whichever option is chosen.
    """
    names = "|".join(map(re.escape, OPEN_KEYS))
    pattern = re.compile(rf"^\+*(({names})\.[^=]+|(?:{names})(?==\s*\{{)|cluster\.kernel_overrides)=(.*)$", re.DOTALL)
    opened = []
    for item in overrides:
        if match := pattern.match(item):
            opened.append(f"++{match[1]}={_as_text(*match.group(2, 3))}")
        else:
            check_override(item)
            _refuse_group(item)
            opened.append(_with_quotes(item, overrides))
    all_operators = any(re.match(r"\+*cluster\.(kernels=|kernel_overrides=\{\s*\}$)", item) for item in overrides)
    return [*_without_kernel_overrides(), *opened] if all_operators else opened


def check_sweep(overrides: list[str]) -> None:
    """Raise ValueError if the words of a multirun make more than MOST_JOBS jobs:
    Hydra lists them all before the first.
    """
    parser, jobs = OverridesParser.create(), 1
    for item in overrides:
        try:
            value = parser.parse_override(item).value()
        except HydraException:  # Hydra's own message comes later
            continue
        if isinstance(value, RangeSweep):
            count = max(0, int((value.stop - value.start) // value.step)) if value.step else 0
        else:
            count = len(value.list) if isinstance(value, ChoiceSweep) else 1
        jobs *= max(1, count)
        if jobs > MOST_JOBS:
            key, _, text = item.partition("=")
            problem = f"makes {jobs:,} jobs of one command"
            raise mistake(key, text, problem=problem, allowed=f"at most {MOST_JOBS:,} jobs", fix="fewer values")


def _refuse_group(item: str) -> None:
    match = re.match(r"\+*(\w+)=\s*\{\s*([\w.]+)\s*:\s*([^,}]*)", item)
    if match and match[1] in groups():
        raise mistake(
            match[1],
            item.partition("=")[2],
            problem="a group cannot be given as a mapping",
            allowed="the name of an option, or one key a word",
            fix=f"{match[1]}.{match[2]}={match[3].strip()} and so on for each key",
        )


def _with_quotes(item: str, overrides: list[str]) -> str:
    """Return `item`, one of `overrides`, with its value in quotes if Hydra would read it as another type than that of
    the key.
    """
    key, _, value = item.partition("=")
    if key.lstrip("+") in PATHS and value.startswith("~"):  # which Hydra cannot parse
        paths = [expanded(key.lstrip("+"), path).replace("'", "\\'") for path in value.split(",")]  # of a multirun
        return f"{key}=" + ",".join(f"'{path}'" for path in paths)
    field = schema().get(key.lstrip("+"))
    if field is None or not re.fullmatch(r"[\w.+-]+", value) or value.lower() == "null":
        return item
    kind = str(field.type).partition(" | ")[0]
    if kind == "int" and (whole := _whole(value)) is not None:
        return f"{key}={whole}"
    if kind == "bool" and value.isdigit() and int(value) > 1:  # OmegaConf takes every number but 0 for true
        raise ValueError(refusal(key.lstrip("+"), field, value, partial(_value_without, overrides)))
    converted = {
        "int": not re.fullmatch(r"[+-]?\d+", value),
        "bool": value.lower() not in ("true", "false"),
        "str": re.fullmatch(r"(?i)true|false|[+-]?[\d._]*\d[\d._]*(e[+-]?\d+)?|[+-]?inf|nan", value) is not None,
    }
    return f"{key}='{value}'" if converted.get(kind) else item


def _whole(text: str) -> int | None:
    """Return the whole number of a text such as 1e3, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if "e" in text.lower() and number.is_integer() and abs(number) < 1e15 else None


def _without_kernel_overrides() -> Iterator[str]:
    """Yield overrides that empty the recipe's mapping. Hydra merges `{}` into it, and can delete only entries that
    exist.
    """
    for operator in VERSIONS:
        yield f"++cluster.kernel_overrides.{operator}=auto"
        yield f"~cluster.kernel_overrides.{operator}"


def _as_text(key: str, value: str) -> str:
    return f"'{value}'" if key == "cluster.environment" and re.fullmatch(r"[\w.+-]+", value) else value


@contextmanager
def readable_errors(overrides: list[str] | None = None) -> Iterator[None]:
    """Raise a `ValueError` with key, value and allowed values for every exception of Hydra and OmegaConf. overrides: of
    the command line; the message about a value then suggests that of the recipe's files.
    """
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        value_of = None if overrides is None else partial(_value_without, overrides)
        raise ValueError(explain(error, value_of)) from error
    except yaml.YAMLError as error:
        problem = f"invalid YAML: {' '.join(str(error).split())}"
        raise mistake("recipe", problem=problem, allowed="lines of `key: value`") from error


def _value_without(overrides: list[str], key: str) -> object:
    """Return the value that `key` has without its override; "???" if that cannot be composed."""
    others = [item for item in overrides if item.lstrip("+").partition("=")[0] != key]
    try:
        config = _composed(others)
        return get(OmegaConf.to_object(config), key)
    except (HydraException, OmegaConfBaseException, ValueError, AttributeError):
        return "???"


def _composed(overrides: list[str]) -> DictConfig:
    register()
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # may be called inside a Hydra application
    try:
        with initialize_config_module(RECIPES, version_base="1.3"):
            return hydra_compose(PRIMARY, open_overrides(overrides))
    finally:
        GlobalHydra.instance().hydra = outer


def compose(overrides: list[str]) -> Recipe:
    """Compose recipes/train.yaml with `overrides`, as `zaya train` does.

    Raises:
        ValueError: unknown keys and options, missing values, wrong types, values outside a key's choices or range.
    """
    try:
        with readable_errors(overrides):
            return to_recipe(_composed(overrides), overrides)
    except ValueError as error:
        raise ValueError(with_experiment(str(error), overrides)) from error


def with_experiment(problem: str, overrides: list[str]) -> str:
    """Return the message about a recipe, with a line that an experiment is missing where the words name none."""
    if any(item.startswith("experiment=") for item in overrides):
        return problem
    missing = message(
        "experiment", problem="was not given", fix=f"experiment=<name>, of {', '.join(options('experiment'))}"
    )
    return f"{problem}\n{missing}"


def to_recipe(config: DictConfig, overrides: list[str] | None = None) -> Recipe:
    """Return the composed `config` as a `Recipe`; one error lists all unknown keys and missing values, or all refused
    values. overrides: as in `readable_errors`.
    """
    with readable_errors():
        problems = [unknown_key(path, value) for path, value in _unknown(config)]
        problems += [missing_key(path) for path in sorted(OmegaConf.missing_keys(config)) if known(path)]
    if problems:
        raise ValueError("\n".join(problems))
    with readable_errors(overrides):
        recipe = OmegaConf.to_object(config)
    for key in (*PATHS, *BLENDS):
        group, _, name = key.rpartition(".")
        holder, value = get(recipe, group) if group else recipe, get(recipe, key)
        if value is not None:
            new = [expanded_entry(key, entry) for entry in value] if key in BLENDS else expanded(key, value)
            setattr(holder, name, new)
    typed = [item.lstrip("+").partition("=")[0] for item in overrides or ()]
    both = [key for key in ("ddp_bucket_size", "num_distributed_optimizer_instances") if f"parallel.{key}" in typed]
    if both and "parallel.bucket_plan" in typed and recipe.parallel.bucket_plan is not None:
        key, problem = f"parallel.{both[0]}", "parallel.bucket_plan is typed too, and sets this key"
        raise mistake(
            key, get(recipe, key), problem=problem, allowed="one of the two", fix="leave out parallel.bucket_plan"
        )
    value_of = None if overrides is None else partial(_value_without, overrides)
    if problems := [line for path, field in leaves() if (line := refused(path, field, get(recipe, path), value_of))]:
        raise ValueError("\n".join(problems))
    return recipe


def _unknown(config: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    for key in config:
        path = f"{prefix}{key}"
        node = config._get_node(key)
        if not known(path):
            yield path, node._value() if not isinstance(node, (DictConfig, ListConfig)) else "{...}"
        elif isinstance(node, DictConfig) and path not in OPEN_KEYS and not OmegaConf.is_missing(config, key):
            yield from _unknown(node, f"{path}.")


def to_yaml(recipe: Recipe) -> str:
    """Return the recipe as YAML, in the schema's order."""
    return OmegaConf.to_yaml(OmegaConf.structured(recipe))


def save_recipe(recipe: Recipe, path: str | os.PathLike) -> None:
    """Write the whole recipe as YAML. The file is replaced atomically."""
    write_whole(path, f"# Written by zaya_plugin {__version__}; `load_recipe` reads it back.\n{to_yaml(recipe)}")


def check_own_version(path: str | os.PathLike, export: str) -> None:
    """Check that a recipe for a host was written by this version's `save_recipe`; files written by hand are accepted.

    Args:
        export: the command that writes it again.

    Raises:
        ValueError: another version wrote it.
    """
    with open(path) as file:
        written = re.match(r"# Written by zaya_plugin ([^;\s]+);", file.readline())
    if written and written[1] != __version__:
        raise mistake(
            str(path),
            problem=f"was written by zaya_plugin {written[1]}",
            allowed=f"zaya_plugin {__version__}, which is installed",
            fix=export,
        )


def load_recipe(path: str | os.PathLike) -> Recipe:
    """Read a file written by `save_recipe`, or any YAML file with a recipe's keys. The same checks apply as in
    `compose`.

    Raises:
        ValueError: the file cannot be read, or is not a valid recipe.
    """
    try:
        with readable_errors():
            loaded = OmegaConf.load(path)
            if not isinstance(loaded, DictConfig):
                problem = "a recipe is a mapping of keys to values, which this file does not hold"
                raise mistake("recipe", problem=problem, allowed="lines of `key: value`")
            if problems := [
                unknown_key(key, value) for key, value in _unknown(loaded)
            ]:  # OmegaConf.merge reports only the first
                raise ValueError("\n".join(problems))
            return to_recipe(OmegaConf.merge(OmegaConf.structured(Recipe), loaded))
    except OSError as error:
        raise mistake(str(path), problem=f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

# SPDX-License-Identifier: Apache-2.0
"""An option that ZAYA adds to Megatron's arguments is defined once, as a field of the recipe's schema."""

import subprocess
import sys
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

import zaya_plugin.config.schema
from zaya_plugin.config.arguments import OWN_ARGUMENTS
from zaya_plugin.config.messages import schema
from zaya_plugin.config.schema import default_of, megatron_argument

# Runs the schema's source with one field more, before anything has imported the schema.
ADDED = """
import importlib.util, sys
import zaya_plugin.config
path, where = sys.argv[1:]
source = open(path).read()
assert where in source
field = '    added_width: int = option(7, "an added option", choices=(3, 7, 0), limit=LAYERS, resume=NETWORK)\\n'
module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("zaya_plugin.config.schema", path))
sys.modules["zaya_plugin.config.schema"] = module
exec(compile(source.replace(where, field + where), path, "exec"), module.__dict__)

from zaya_plugin.config import train_help
from zaya_plugin.config.arguments import OWN_ARGUMENTS, megatron_arguments
from zaya_plugin.config.compose import compose
from tools import docs

recipe = compose(["experiment=cpu_demo", "model.added_width=3"])
assert recipe.model.added_width == 3
assert "| `model.added_width` | `7` | an added option (3, 7, 0) | `--added-width` | refused |" in docs.keys()
train_help.MOST_USED = ("model.added_width",)
assert "an added option (3, 7, 0)" in train_help.train_help()
assert "added_width" in OWN_ARGUMENTS and megatron_arguments(recipe, {})["added_width"] == 3
for value, allowed in ((5, "Allowed: 3, 7, 0"), (0, "added_width=0")):
    try:
        compose(["experiment=cpu_demo", f"model.added_width={value}"])
    except ValueError as error:
        assert allowed in str(error), error
    else:
        raise AssertionError(value)

from zaya_plugin.model.config import ZayaConfig

sizes = dict(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, kv_channels=8)
assert ZayaConfig(**sizes).added_width == 7 and ZayaConfig(**sizes, added_width=3).added_width == 3
try:
    ZayaConfig(**sizes, added_width=5)
except ValueError as error:
    assert "added_width=5: this value is not allowed. Allowed: 3, 7, 0. Fix: added_width=7." in str(error)
else:
    raise AssertionError("ZayaConfig accepts a value outside the choices")
print("defined once")
"""


@pytest.mark.slow
def test_one_field_of_the_schema_defines_an_option():
    """It appears in the recipe, the table of keys, --help, Megatron's arguments and ZayaConfig, with its choices and
    range.
    """
    words = [sys.executable, "-c", ADDED, zaya_plugin.config.schema.__file__, "    residual_in_fp32: bool = option("]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.stdout == "defined once\n", done.stderr


def test_zaya_config_has_the_options_of_the_schema():
    from zaya_plugin.model.config import ZayaConfig

    config = {field.name: field for field in fields(ZayaConfig)}
    options = [(path, field) for path, field in schema().items() if field.metadata["adds"]]
    assert {megatron_argument(field) for _, field in options} == set(OWN_ARGUMENTS)
    assert {path.split(".")[0] for path, _ in options} == {"model", "data", "optim", "parallel", "cluster"}
    for _, field in options:
        if field.metadata["adds"] == "model":
            assert default_of(config[megatron_argument(field)]) == default_of(field) is not MISSING
        else:
            assert megatron_argument(field) not in config

# SPDX-License-Identifier: Apache-2.0
"""The small models of the model's tests, on one rank."""

import zaya_plugin.patches
from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test that asks for a model)
from tests.model.conftest import batch, make_config, make_model  # noqa: F401

zaya_plugin.patches.apply()

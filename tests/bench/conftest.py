# SPDX-License-Identifier: Apache-2.0
"""Shares the small models of the model's tests, on one rank."""

from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this folder)
from tests.model.conftest import batch, make_config, make_model  # noqa: F401

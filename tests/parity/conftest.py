# SPDX-License-Identifier: Apache-2.0
"""One gloo rank with Megatron's groups."""

from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this folder)

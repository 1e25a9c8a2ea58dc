# SPDX-License-Identifier: Apache-2.0
"""One gloo rank with Megatron's groups."""

import zaya_plugin.patches
from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test here)

zaya_plugin.patches.apply()

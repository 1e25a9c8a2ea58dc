# SPDX-License-Identifier: Apache-2.0
"""One gloo rank with Megatron's groups, for the test that counts a model's saved tensors."""

from tests.megatron_rank import seed, single_rank  # noqa: F401

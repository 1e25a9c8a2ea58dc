# SPDX-License-Identifier: Apache-2.0
"""The console script and a worker without torch."""

from tests.stand_in_worker import environment, worker_program, zaya  # noqa: F401

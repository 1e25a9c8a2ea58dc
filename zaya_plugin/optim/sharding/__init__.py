# SPDX-License-Identifier: Apache-2.0
"""Which rank owns which matrix, and the optimizer that is sharded so."""

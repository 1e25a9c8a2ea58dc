# SPDX-License-Identifier: Apache-2.0
"""What a trained model says: `zaya generate`, `zaya eval`."""

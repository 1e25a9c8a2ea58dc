# SPDX-License-Identifier: Apache-2.0
"""Pictures of runs and measurements, drawn by libraries that are extras."""

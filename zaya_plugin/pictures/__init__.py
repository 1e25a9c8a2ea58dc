# SPDX-License-Identifier: Apache-2.0
"""Pictures of measurements, drawn by a library that is an extra."""

# SPDX-License-Identifier: Apache-2.0
"""Functions that every folder may import: errors, locks, whole files, processes, secrets, phases of a start."""

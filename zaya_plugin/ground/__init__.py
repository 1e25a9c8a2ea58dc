# SPDX-License-Identifier: Apache-2.0
"""Below all rooms: errors, locks, whole files, processes, secrets, phases of a start. Imports nothing of ours."""

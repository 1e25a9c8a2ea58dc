# SPDX-License-Identifier: Apache-2.0
"""Leg 2: a real SLURM."""

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15", "liblua5.1-0", "libmunge2")
FAULTS = {}

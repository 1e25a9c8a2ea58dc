# SPDX-License-Identifier: Apache-2.0
"""The launcher script alone: torchrun puts a script's folder first on sys.path, where other modules would hide others' names."""

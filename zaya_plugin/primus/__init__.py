# SPDX-License-Identifier: Apache-2.0
"""Only the launcher script: torchrun puts its folder first on sys.path, where other modules of this folder would hide
modules of the same name.
"""

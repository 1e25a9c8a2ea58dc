# SPDX-License-Identifier: Apache-2.0
"""The script that starts Primus with the plugin, and nothing else: torchrun puts its folder first on sys.path, where
other modules of this folder would hide modules of the same name.
"""

# SPDX-License-Identifier: Apache-2.0
"""From stage to stage: the run before, its weights, and the places in the data. No torch import."""

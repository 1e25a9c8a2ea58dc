# SPDX-License-Identifier: Apache-2.0
"""The recipe: its schema, composing and validating it, and what Megatron's arguments become of it. No torch import."""

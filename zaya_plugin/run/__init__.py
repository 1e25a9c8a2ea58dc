# SPDX-License-Identifier: Apache-2.0
"""Outside of the ranks: launch, dry run, curriculum, batch scripts, exports for other hosts. No torch import."""

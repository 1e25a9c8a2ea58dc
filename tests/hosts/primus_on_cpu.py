# SPDX-License-Identifier: Apache-2.0
"""Primus' own entry on a machine without a GPU: the patches come first, since with `spec` the plugin is imported after
Megatron has started.
"""

from zaya_plugin import patches

patches.apply_torch()

if __name__ == "__main__":
    patches.apply()
    from primus.cli.main import main

    main()

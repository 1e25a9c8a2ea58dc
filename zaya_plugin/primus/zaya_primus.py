# SPDX-License-Identifier: Apache-2.0
"""primus-cli direct --script <this file> -- train pretrain --config <run_dir>/primus.yaml

Primus' own entry, with the stage `zaya_pretrain` registered before it looks for a trainer. The patches of torch come at import and
outside of main(): processes that write checkpoints are spawned and import this file again.
"""

import os
import sys
from pathlib import Path


def experiment_environment(arguments: list[str]) -> dict[str, str]:
    """The `env` of the experiment that `arguments` name with --config.

    Primus sets it too, but later: by then torch has asked for devices, and what the driver reads at its start would be lost.
    """
    import yaml

    for word, value in zip(arguments, arguments[1:] + [""], strict=True):
        name, equals, rest = word.partition("=")
        if name == "--config":
            document = yaml.safe_load(Path(rest if equals else value).read_text())
            return {key: str(item) for key, item in (document.get("env") or {}).items()}
    return {}


os.environ.update(experiment_environment(sys.argv[1:]))

from zaya_plugin import patches  # noqa: E402

patches.apply_torch()


def main() -> None:
    """Registers the stage, then does what primus/cli/main.py does."""
    from primus.cli.main import main as primus

    from zaya_plugin.hosts.primus import trainer

    trainer.register()
    primus()


if __name__ == "__main__":
    main()

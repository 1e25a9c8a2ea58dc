# SPDX-License-Identifier: Apache-2.0
"""Start Primus with the stage `zaya_pretrain`.

    primus-cli direct --script <this file> -- train pretrain --config <run_dir>/primus.yaml

The patches of torch are applied at import and not in main(), because processes that write checkpoints are spawned and
import this file again.
"""

import os
import sys
from pathlib import Path


def experiment_environment(arguments: list[str]) -> dict[str, str]:
    """Return the `env` of the experiment that `arguments` name with --config.

    Primus sets these variables too, but after torch has initialised the devices, when the driver has already read its
    own.
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
    """Register the stage, then run primus/cli/main.py."""
    from primus.cli.main import main as primus

    from zaya_plugin.hosts.primus import trainer

    trainer.register()
    primus()


if __name__ == "__main__":
    main()

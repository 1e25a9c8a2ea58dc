# SPDX-License-Identifier: Apache-2.0
"""ZAYA1 pretraining as a Megatron-core plugin. docs/api.md describes the names of EXPORTS.

Importing this package loads neither torch nor Megatron and changes neither; a public name is imported at its first use.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # EXPORTS, for editors and type checkers
    from zaya_plugin.checkpoint.convert.built_model import config_from_hf as config_from_hf
    from zaya_plugin.checkpoint.convert.built_model import load_hf as load_hf
    from zaya_plugin.checkpoint.convert.built_model import save_hf as save_hf
    from zaya_plugin.checkpoint.convert.built_model import stream_hf as stream_hf
    from zaya_plugin.checkpoint.convert.built_model import zaya_from_hf as zaya_from_hf
    from zaya_plugin.ground.phases import quiet_hosts as quiet_hosts
    from zaya_plugin.hosts.own_loop import balance_experts as balance_experts
    from zaya_plugin.hosts.own_loop import muon_optimizer as muon_optimizer
    from zaya_plugin.model.build import build_zaya_model as build_zaya_model
    from zaya_plugin.model.config import ZayaConfig as ZayaConfig
    from zaya_plugin.model.layer_specs import zaya_block_spec as zaya_block_spec
    from zaya_plugin.patches import apply as _apply

    apply_patches = _apply

__version__ = "0.1.0"

EXPORTS = {
    "ZayaConfig": "zaya_plugin.model.config.ZayaConfig",
    "zaya_block_spec": "zaya_plugin.model.layer_specs.zaya_block_spec",
    "build_zaya_model": "zaya_plugin.model.build.build_zaya_model",
    "muon_optimizer": "zaya_plugin.hosts.own_loop.muon_optimizer",
    "balance_experts": "zaya_plugin.hosts.own_loop.balance_experts",
    "zaya_from_hf": "zaya_plugin.checkpoint.convert.built_model.zaya_from_hf",
    "config_from_hf": "zaya_plugin.checkpoint.convert.built_model.config_from_hf",
    "load_hf": "zaya_plugin.checkpoint.convert.built_model.load_hf",
    "save_hf": "zaya_plugin.checkpoint.convert.built_model.save_hf",
    "stream_hf": "zaya_plugin.checkpoint.convert.built_model.stream_hf",
    "apply_patches": "zaya_plugin.patches.apply",
    "quiet_hosts": "zaya_plugin.ground.phases.quiet_hosts",
}


def __getattr__(name: str):
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, attribute = EXPORTS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted((*globals(), *EXPORTS))

# SPDX-License-Identifier: Apache-2.0
"""The description of a model apart from its weights: sizes, positions,
and the choices that its forward pass depends on.

Field names are those of the recipe's keys. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from zaya_plugin.config.schema import ModelConfig, StageConfig, get, leaves, megatron_argument
from zaya_plugin.ground.errors import as_typed

# Field of a description -> key of the recipe. The other fields have no key.
KEYS = {path.rpartition(".")[2]: path for path, _ in leaves() if path.startswith("model.")} | {
    "rotary_base": "stage.rotary_base",
    "max_position_embeddings": "stage.seq_length",
}
# Fields that weights do not depend on: a table may grow, and the others belong to the run.
FREE_FIELDS = {
    "vocab_size",
    "rotary_base",
    "max_position_embeddings",
    "residual_in_fp32",
    "init_method_std",
    "bos",
    "eos",
    "pad",
}
# Field of a description -> field of ZayaConfig, where the names differ; and the fields that it lacks.
CONFIG_NAMES = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
NOT_IN_CONFIG = {"vocab_size", "rotary_base", "rotary_percent", "max_position_embeddings", "bos", "eos", "pad"}
WINDOW_FIELDS = ("sliding_window", "window_attn_skip_freq", "swa_rotary_base")


@dataclass(frozen=True)
class Description:
    """A ZAYA1 model. vocab_size: rows of the embedding, padding included; bos, eos and pad: ids of these tokens.

    residual_in_fp32=None: not stated by the source. skip_output=None: no token can choose the skip class, so that the
    model computes the same with either value.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    num_experts: int
    moe_ffn_hidden_size: int
    router_hidden_size: int
    vocab_size: int
    rotary_base: int = StageConfig.rotary_base
    max_position_embeddings: int = StageConfig.seq_length
    rotary_percent: float = ModelConfig.rotary_percent
    sliding_window: int | None = ModelConfig.sliding_window
    window_attn_skip_freq: int | None = ModelConfig.window_attn_skip_freq
    swa_rotary_base: int = ModelConfig.swa_rotary_base
    normalization: str = ModelConfig.normalization
    norm_epsilon: float = ModelConfig.norm_epsilon
    router_norm_epsilon: float | None = ModelConfig.router_norm_epsilon
    router_eda: bool = ModelConfig.router_eda
    moe_skip_expert: bool = ModelConfig.moe_skip_expert
    temperature_form: str = ModelConfig.temperature_form
    skip_output: str | None = ModelConfig.skip_output
    residual_in_fp32: bool | None = ModelConfig.residual_in_fp32
    init_method_std: float = ModelConfig.init_method_std
    bos: int | None = None
    eos: int | list[int] | None = None
    pad: int | None = None

    @classmethod
    def of_arguments(cls, args) -> Description:
        """Return the description of the model of Megatron's arguments, such as those of a checkpoint."""
        # A checkpoint that is older than an option has its default.
        values = {name: getattr(args, argument) for name, argument in ARGUMENTS.items() if hasattr(args, argument)}
        return cls(**values).simplified()

    @classmethod
    def of_config(cls, config, vocab_size: int) -> Description:
        """Return the description of a ZayaConfig's model, which does not state RoPE."""
        values = {f.name: getattr(config, CONFIG_NAMES.get(f.name, f.name), f.default) for f in fields(cls)}
        return cls(**values | {"vocab_size": vocab_size}).simplified()

    @classmethod
    def of_recipe(cls, recipe, vocab_size: int) -> Description:
        """Return the description of a recipe's model with `vocab_size` rows of the embedding."""
        values = {name: get(recipe, path) for name, path in KEYS.items() if name in cls.__dataclass_fields__}
        return cls(**values, vocab_size=vocab_size).simplified()

    def simplified(self) -> Description:
        """Return the same model with router_norm_epsilon=None where it equals norm_epsilon, and the window's
        fields at their defaults where they say nothing.
        """
        changes: dict[str, Any] = {}
        if self.router_norm_epsilon == self.norm_epsilon:
            changes["router_norm_epsilon"] = None
        if not any(self.windows):
            changes |= {name: getattr(ModelConfig, name) for name in WINDOW_FIELDS}
        elif all(self.windows):
            changes["window_attn_skip_freq"] = None
        return replace(self, **changes)

    @property
    def windows(self) -> list[int]:
        """For each layer the previous tokens that a token sees; 0: all of them."""
        every = self.window_attn_skip_freq or self.num_layers + 1
        return [(layer % every != 0) * (self.sliding_window or 0) for layer in range(1, self.num_layers + 1)]

    @property
    def classes(self) -> int:
        """Rows of the router's last matrix: experts, and the skip class."""
        return self.num_experts + int(self.moe_skip_expert)

    def sizes(self) -> dict[str, int]:
        """Return the dimensions by the letters of the tables (tables.py)."""
        query, key = self.num_attention_heads * self.kv_channels, self.num_query_groups * self.kv_channels
        return {
            "V": self.vocab_size,
            "h": self.hidden_size,
            "q": query,
            "k": key,
            "v": key // 2,
            "C": query + key,
            "d": self.kv_channels,
            "g": self.num_query_groups,
            "r": self.router_hidden_size,
            "c": self.classes,
            "b": self.num_experts + 1,
            "f": self.moe_ffn_hidden_size,
            "F": 2 * self.moe_ffn_hidden_size,
        }

    def arguments(self) -> dict:
        """Return the description by the names of Megatron's arguments, as a checkpoint stores them."""
        return self._stated({argument: getattr(self, name) for name, argument in ARGUMENTS.items()})

    def config_fields(self) -> dict[str, Any]:
        """Return the description as fields of ZayaConfig."""
        names = (f.name for f in fields(self) if f.name not in NOT_IN_CONFIG)
        values = {CONFIG_NAMES.get(name, name): getattr(self, name) for name in names}
        return self._stated(values | {"ffn_hidden_size": self.moe_ffn_hidden_size})

    @staticmethod
    def _stated(values: dict) -> dict:
        unstated = {name for name in ("residual_in_fp32", "skip_output") if values[name] is None}
        return {name: value for name, value in values.items() if name not in unstated}

    def differing(self, other: Description) -> list[str]:
        """Return the fields in which two models differ, so that weights of one do not fit the other."""
        mine, theirs = vars(self.simplified()), vars(other.simplified())
        either = {"skip_output"} if None in (self.skip_output, other.skip_output) else set()
        return [name for name in mine if name not in FREE_FIELDS | either and mine[name] != theirs[name]]

    def differences(self, other: Description) -> str:
        """Return those fields with both values, as a text that is empty if there is none."""
        return "; ".join(f"{name} {getattr(self, name)} and {getattr(other, name)}" for name in self.differing(other))

    def fix(self, other: Description) -> str:
        """Return what to type so that this recipe's model is `other`."""
        return " ".join(f"{KEYS[name]}={as_typed(getattr(other, name))}" for name in self.differing(other))

    def overrides(self) -> dict[str, object]:
        """Return the recipe's keys of the model, and of RoPE's base, with their values."""
        overrides = {KEYS[f.name]: getattr(self, f.name) for f in fields(self) if f.name in KEYS}
        del overrides["stage.seq_length"]  # the model's longest context, not a stage's
        return {
            key: value for key, value in overrides.items() if value is not None or key == "model.router_norm_epsilon"
        }


# Field of a description -> Megatron's argument. The ids of tokens have none.
ARGUMENTS = {
    name: argument
    for path, field in leaves()
    if (name := path.rpartition(".")[2]) in Description.__dataclass_fields__ and (argument := megatron_argument(field))
} | {"vocab_size": "padded_vocab_size", "max_position_embeddings": "max_position_embeddings"}

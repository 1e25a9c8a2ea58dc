# SPDX-License-Identifier: Apache-2.0
"""The names of a ZAYA1 model's tensors in every published layout, one table for both directions. Imports no torch.

No layout transposes a tensor, fuses queries with keys or mixes the rows of gate and up: tensors are renamed, and native
stacks the experts of a layer along a new first dimension.

    native   transformers >= 5.13 and vLLM: 40 layers of attention and MoE in ZAYA1-8B
    legacy   SGLang, and the releases before July 2026: 80 stages, attention and MoE in turn
    smoe     Zyphra's training side: legacy with another name of the MoE block
    primus   the state dict of Primus' own port: legacy with a few other names
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.ground.errors import mistake

_LAYER, _NATIVE = "decoder.layers.{l}.", "model.layers.{l}."
_CCA, _QKV, _OLD_QKV = _LAYER + "self_attention.", _NATIVE + "self_attn.qkv_proj.", "model.layers.{a}.self_attn.qkv."
_ROUTER, _GATE, _OLD_ROUTER = _LAYER + "mlp.router.", _NATIVE + "mlp.gate.", "model.layers.{m}.zaya_block.router."
_EXPERTS, _OLD_EXPERTS = _LAYER + "mlp.experts.", "model.layers.{m}.zaya_block.experts.local_experts.{e}."


def _merge(ours: str, native: str, legacy: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the four vectors of a merge: (output + bias) * scale + (stream + bias) * scale in every layout."""
    for our_name, their_name in (("output", "hidden_states"), ("residual", "residual")):
        for part in ("scale", "bias"):
            yield f"{ours}.{our_name}_{part}", f"{native}.{their_name}_{part}", f"{legacy}.{their_name}_{part}", "h"


# (this package, native, legacy, shape of this package's tensor). {l}: layer; {e}: expert, whose matrices native stacks;
# {a} and {m}: the attention and the MoE stage of the layer; {next}: the module that consumes the layer's output, which
# in legacy owns the merge. Letters of shapes: Description.sizes.
TABLE: tuple[tuple[str, str, str, str], ...] = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight", "model.embed_tokens.weight", "V h"),
    (
        "decoder.layers.0.input_affine.scale",
        "model.input_hidden_states_scale",
        "model.layers.0.res_scale.hidden_states_scale",
        "h",
    ),
    (
        "decoder.layers.0.input_affine.bias",
        "model.input_hidden_states_bias",
        "model.layers.0.res_scale.hidden_states_bias",
        "h",
    ),
    (_LAYER + "input_layernorm.weight", _NATIVE + "input_layernorm.weight", "model.layers.{a}.input_norm.weight", "h"),
    (_CCA + "linear_q.weight", _QKV + "q_proj.weight", _OLD_QKV + "linear_q.weight", "q h"),
    (_CCA + "linear_k.weight", _QKV + "k_proj.weight", _OLD_QKV + "linear_k.weight", "k h"),
    (_CCA + "linear_v_current.weight", _QKV + "v_proj_current.weight", _OLD_QKV + "val_proj1.weight", "v h"),
    (_CCA + "linear_v_delayed.weight", _QKV + "v_proj_delayed.weight", _OLD_QKV + "val_proj2.weight", "v h"),
    (_CCA + "conv_qk_depthwise.weight", _QKV + "conv_qk_depthwise.weight", _OLD_QKV + "conv_qk.0.weight", "C 1 2"),
    (_CCA + "conv_qk_depthwise.bias", _QKV + "conv_qk_depthwise.bias", _OLD_QKV + "conv_qk.0.bias", "C"),
    (_CCA + "conv_qk_grouped.weight", _QKV + "conv_qk_grouped.weight", _OLD_QKV + "conv_qk.1.weight", "C d 2"),
    (_CCA + "conv_qk_grouped.bias", _QKV + "conv_qk_grouped.bias", _OLD_QKV + "conv_qk.1.bias", "C"),
    (_CCA + "temperature", _NATIVE + "self_attn.qk_norm.temp", _OLD_QKV + "temp", "g"),
    (
        _CCA + "linear_proj.weight",
        _NATIVE + "self_attn.o_proj.weight",
        "model.layers.{a}.self_attn.o_proj.weight",
        "h q",
    ),
    *_merge(
        _LAYER + "post_attention_residual", _NATIVE + "post_attention_residual_scale", "model.layers.{m}.res_scale"
    ),
    (
        _LAYER + "pre_mlp_layernorm.weight",
        _NATIVE + "post_attention_layernorm.weight",
        "model.layers.{m}.input_norm.weight",
        "h",
    ),
    (_ROUTER + "down_proj.weight", _GATE + "down_proj.weight", _OLD_ROUTER + "down_proj.weight", "r h"),
    (_ROUTER + "down_proj.bias", _GATE + "down_proj.bias", _OLD_ROUTER + "down_proj.bias", "r"),
    (_ROUTER + "router_states_scale", _GATE + "router_states_scale", _OLD_ROUTER + "router_states_scale", "r"),
    (_ROUTER + "norm.weight", _GATE + "router_mlp.norm.weight", _OLD_ROUTER + "rmsnorm_eda.weight", "r"),
    (_ROUTER + "fc1.weight", _GATE + "router_mlp.fc1.weight", _OLD_ROUTER + "router_mlp.0.weight", "r r"),
    (_ROUTER + "fc1.bias", _GATE + "router_mlp.fc1.bias", _OLD_ROUTER + "router_mlp.0.bias", "r"),
    (_ROUTER + "fc2.weight", _GATE + "router_mlp.fc2.weight", _OLD_ROUTER + "router_mlp.2.weight", "r r"),
    (_ROUTER + "fc2.bias", _GATE + "router_mlp.fc2.bias", _OLD_ROUTER + "router_mlp.2.bias", "r"),
    (_ROUTER + "out_proj.weight", _GATE + "router_mlp.out_proj.weight", _OLD_ROUTER + "router_mlp.4.weight", "c r"),
    (_ROUTER + "balancing_biases", _GATE + "balancing_biases", _OLD_ROUTER + "balancing_biases", "b"),
    (
        _EXPERTS + "linear_fc1.weight{e}",
        _NATIVE + "mlp.experts.gate_up_proj",
        _OLD_EXPERTS + "linear_fc1.weight",
        "F h",
    ),
    (_EXPERTS + "linear_fc2.weight{e}", _NATIVE + "mlp.experts.down_proj", _OLD_EXPERTS + "linear_fc2.weight", "h f"),
    *_merge(_LAYER + "post_mlp_residual", _NATIVE + "post_mlp_residual_scale", "{next}res_scale"),
    ("decoder.final_layernorm.weight", "model.norm.weight", "model.final_norm.weight", "h"),
)
TEMPERATURE, EDA_SCALE, BIASES = _CCA + "temperature", _ROUTER + "router_states_scale", _ROUTER + "balancing_biases"
DOWN_PROJECTION = (_ROUTER + "down_proj.weight", _ROUTER + "down_proj.bias")
EMBEDDING = "embedding.word_embeddings.weight"
TIED_HEAD = "lm_head.weight"  # some files hold it, equal to the embedding; never written

# State of the balancing optimizer, which no layout holds: dropped on export, zero after import.
BALANCING_STATE: tuple[tuple[str, str, str], ...] = (
    (_ROUTER + "balancing_exp_avg", "float32", "b"),
    (_ROUTER + "balancing_exp_avg_sq", "float32", "b"),
    (_ROUTER + "balancing_step", "int64", ""),
)


@dataclass(frozen=True)
class Row:
    """One tensor of a layout. ours: this package's tensors, several if they are stacked along a new first dimension."""

    name: str
    shape: tuple[int, ...]
    ours: tuple[str, ...]
    stacked: bool = False

    @property
    def part(self) -> tuple[int, ...]:
        """Shape of each tensor of this package."""
        return self.shape[1:] if self.stacked else self.shape


def _as_smoe(name: str) -> str:
    return name.replace(".zaya_block.", ".smoe_block.")


def _as_primus(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "embedding.word_embeddings.weight"
    name = re.sub(r"^model\.", "decoder.", name)
    return name.replace(".self_attn.qkv.", ".self_attn.").replace(".experts.local_experts.", ".local_experts.")


# Layout -> (column of TABLE, change of its names).
LAYOUTS: dict[str, tuple[int, Callable[[str], str]]] = {
    "native": (1, str),
    "legacy": (2, str),
    "smoe": (2, _as_smoe),
    "primus": (2, _as_primus),
}
WRITTEN = ("native", "legacy", "smoe")
# The output of the skip class in the loaders of a layout.
SKIP_OUTPUT = {"native": "zero", "legacy": "identity", "smoe": "identity", "primus": "identity"}
# The epsilon of the router's norm in the loaders of a layout, where it is not that of the layers' norms: Zyphra's SMoE
# class reads it from a key that its config lacks, and so has its default.
ROUTER_EPSILON = {"smoe": 1e-6}
# Further tensors that a file of a layout may hold: Primus' port gives the first MoE stage a scale that it does not use,
# and stores its balancing optimizer.
_EXTRA_TENSORS = {
    "primus": re.compile(
        r"decoder\.layers\.(1\.zaya_block\.router\.router_states_scale|\d+\.zaya_block\.router\.balance_(m|v|step))"
    )
}


def rows(layout: str, model: Description) -> Iterator[Row]:
    """Yield every tensor of `model` in a layout, in the table's order: of a row layer by layer, of a layer expert by
    expert.
    """
    (column, rename), sizes = LAYOUTS[layout], model.sizes()
    for entry in TABLE:
        ours, theirs = entry[0], entry[column]
        shape = tuple(sizes[letter] if letter in sizes else int(letter) for letter in entry[3].split())
        for layer in layers_of(ours, model):
            place = {} if layer is None else _places(layer, last=layer == model.num_layers - 1)
            experts = range(model.num_experts) if "{e}" in ours else (None,)
            names = tuple(ours.format(l=layer, e=expert) for expert in experts)
            if "{e}" in ours and "{e}" not in theirs:
                yield Row(rename(theirs.format(**place)), (len(names), *shape), names, stacked=True)
                continue
            for expert, name in zip(experts, names, strict=True):
                yield Row(rename(theirs.format(**place, e=expert)), shape, (name,))


def _places(layer: int, last: bool) -> dict[str, object]:
    following = "model." if last else f"model.layers.{2 * layer + 2}."
    return {"l": layer, "a": 2 * layer, "m": 2 * layer + 1, "next": following}


def layers_of(ours: str, model: Description) -> Iterable[int | None]:
    """Return the layers that have a tensor of the table's name `ours`; (None,) for one outside the layers."""
    if "{l}" not in ours:
        return (None,)
    if ours == EDA_SCALE:  # the first layer receives no state
        return range(1, model.num_layers) if model.router_eda else ()
    return range(model.num_layers)


def layer_of(ours: str) -> int:
    """Return the layer of this package's tensor `ours`; -1 for one outside the layers."""
    return int(ours.split(".")[2]) if ours.startswith("decoder.layers.") else -1


def balancing_state(model: Description) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of the state that no layout holds."""
    sizes = model.sizes()
    for name, dtype, shape in BALANCING_STATE:
        for layer in range(model.num_layers):
            yield name.format(l=layer), dtype, tuple(sizes[letter] for letter in shape.split())


def recognise(names: Iterable[str]) -> str:
    """Return the layout of a file's tensors.

    Raises:
        ValueError: the names are of no layout that can be read; the message names the tensor that shows it.
    """
    names = sorted(names)

    def first(pattern: str) -> str | None:
        return next((name for name in names if re.search(pattern, name)), None)

    for pattern, what in (
        (r"\.(weight_scale|weight_packed)$", "experts are quantised"),
        (r"vision_tower\.|^model\.language_model\.", "is of ZAYA1-VL, which has a vision tower"),
        (r"\.lora_|\blora", "is of a low-rank adapter, which has to be merged first"),
        (r"^blk\.", "is of a GGUF file"),
    ):
        if name := first(pattern):
            raise mistake(name, problem=what, allowed=f"the layouts {', '.join(LAYOUTS)} in bf16, fp16 or fp32")
    if first(r"\.smoe_block\."):
        return "smoe"
    if first(r"^decoder\.layers\.\d+\.zaya_block\."):
        return "primus"
    if first(r"\.zaya_block\."):
        return "legacy"
    if first(r"^model\.norm\.weight$") and first(r"\.qkv_proj\.conv_qk_grouped\.weight$"):
        return "native"
    raise mistake(
        names[0] if names else "tensors",
        problem=f"is one of {len(names)} tensors whose names are of no layout of ZAYA1" if names else "there are none",
        allowed=", ".join(LAYOUTS),
    )


def sizes_of(layout: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    """Return the model's sizes from names and shapes, as fields of Description.

    Raises:
        ValueError: a tensor that shows a size is missing or has another number of dimensions.
    """
    column, rename = LAYOUTS[layout]

    def name_in(layer: int, ours: str) -> str:
        theirs = next(entry[column] for entry in TABLE if entry[0] == ours)
        return rename(theirs.format(**_places(layer, last=False), e=0))

    def shape(ours: str, dimensions: int) -> tuple[int, ...]:
        name = name_in(0, ours)
        if len(shapes.get(name, ())) != dimensions or not all(shapes[name]):
            state = f"has the shape {list(shapes[name])}" if name in shapes else "is missing"
            raise mistake(
                name, problem=f"{state}; it shows the model's sizes", allowed=f"{dimensions} dimensions, none of them 0"
            )
        return shapes[name]

    numbers = [int(match[1]) for name in shapes if (match := re.match(r"(?:model|decoder)\.layers\.(\d+)\.", name))]
    stages = max(numbers) + 1
    _check_number(layout, stages, "layers", shapes)
    if layout != "native" and stages % 2:
        raise mistake(
            f"layers.{stages - 1}", problem="is an attention stage without an MoE stage behind it", allowed="pairs"
        )
    vocabulary, hidden = shape(EMBEDDING, 2)
    channels = shape(_CCA + "conv_qk_grouped.weight", 3)[1]
    fc2 = shape(_EXPERTS + "linear_fc2.weight{e}", 3 if layout == "native" else 2)
    if layout == "native":
        experts = fc2[0]
    else:
        matches = [re.search(r"stage\.1\..*local_experts\.(\d+)\.", _stage(name)) for name in shapes]
        experts = 1 + max(int(match[1]) for match in matches if match)
        _check_number(layout, experts, "experts", shapes)
    heads, groups = (shape(_CCA + name, 2)[0] // channels for name in ("linear_q.weight", "linear_k.weight"))
    for possible, problem, allowed in (
        (channels % 2 == 0, f"heads have {channels} channels, and RoPE rotates pairs", "an even number"),
        (
            groups and groups % 2 == 0,
            f"{groups} key/value heads, half of which carry the delayed value",
            "an even number",
        ),
        (groups and heads % groups == 0, f"{heads} query heads for {groups} key/value heads", "a multiple of them"),
    ):
        if not possible:
            raise mistake(f"{layout} tensors", problem=problem, allowed=allowed)
    return {
        "num_layers": stages if layout == "native" else stages // 2,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "num_experts": experts,
        "moe_ffn_hidden_size": fc2[-1],
        "router_hidden_size": shape(_ROUTER + "down_proj.weight", 2)[0],
        "vocab_size": vocabulary,
        "router_eda": name_in(1, EDA_SCALE) in shapes or stages <= (1 if layout == "native" else 2),
        "moe_skip_expert": shape(_ROUTER + "out_proj.weight", 2)[0] > experts,
    }


def _check_number(layout: str, count: int, of: str, shapes: Mapping) -> None:
    """Raise ValueError if names count further than there are tensors:
    a list of what is missing would fill the memory.
    """
    if count > len(shapes):
        raise mistake(f"{layout} tensors", problem=f"the names of {len(shapes)} tensors count to {count} {of}")


def _stage(name: str) -> str:
    return re.sub(r"^(model|decoder)\.layers\.", "stage.", name)


def check_cover(layout: str, model: Description, shapes: Mapping[str, tuple[int, ...]]) -> list[Row]:
    """Return the rows of `model` in a layout, each of which `shapes` has once, with its shape, and nothing else.

    Raises:
        ValueError: a tensor is unknown, missing or has another shape; the message names all of them.
    """
    expected = {row.name: row for row in rows(layout, model)}
    extra = _EXTRA_TENSORS.get(layout)
    compared = {
        name: shape for name, shape in shapes.items() if name != TIED_HEAD and not (extra and extra.fullmatch(name))
    }
    if problems := shape_problems({name: row.shape for name, row in expected.items()}, compared):
        raise mistake(f"{layout} tensors", problem=f"not those of the model: {problems}")
    return list(expected.values())


def shape_problems(expected: Mapping[str, tuple[int, ...]], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return which of the expected tensors are missing or have another shape, and which tensors are unknown; an empty
    text if there are none.
    """
    problems = [f"{name} is missing" for name in expected if name not in shapes]
    for name, shape in shapes.items():
        if name not in expected:
            problems.append(f"{name} is unknown")
        elif tuple(shape) != expected[name]:
            problems.append(f"{name} has the shape {list(shape)}, and the model requires {list(expected[name])}")
    more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
    return "; ".join(problems[:SHOWN] + more)


SHOWN = 40  # tensors in a message


def check_once(names: Iterable[str]) -> None:
    """Raise ValueError if a name comes twice."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise mistake(twice[0], problem=f"{len(twice)} tensors are in more than one file", allowed="one file a tensor")


def skip_is_reachable(biases) -> bool:
    """Return whether some token may choose the skip class, the last entry of `biases`, of at least two.

    The router takes the largest p + bias. With p of the skip class at most 1 and all others at least 0, the class never
    wins if 1 + its bias is at most the largest of the others.
    """
    biases = biases.float()
    return not bool(1 + biases[-1] <= biases[:-1].max())

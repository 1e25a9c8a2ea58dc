# SPDX-License-Identifier: Apache-2.0
"""The kernels of a decoding step, compared with the layers of training before they are used."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from zaya_plugin.inference.decode_step import DecodeStep
from zaya_plugin.model.decode_state import DecodeState, Progress
from zaya_plugin.model.gpt_model import embedded

# The second layer reads the router state of the first. Steps near the start of a sequence, and steps whose keys lie in two
# blocks and, with a sliding window, have passed the ring.
LAYERS, STARTS, STEPS, PLACES, RING = 2, (2, 200), 15, 256, 149
PART = 8  # channels that are compared together: what one program of the experts writes, the fewest of the outputs
FAR = 0.1


@torch.no_grad()
def check_kernels(
    model: nn.Module, batch: int, run_layers: Callable[[Tensor, Tensor, list[DecodeState]], Tensor]
) -> None:
    """Compute steps of `batch` sequences with the first layers of `model`, by the kernels and by the layers of training,
    each from the same random states, and compare what they write to the states, the outputs of attention and experts of
    the last of these layers, and the hidden states. Stored keys and values of older tokens must stay as they are.

    Args:
        run_layers: the layers of training: embedding [1, b, h], angles [1, b, 1, r] in radians and the states of the
            layers to run -> hidden states [1, b, h] behind the final norm.

    Raises:
        RuntimeError: a `distance` is above FAR in the median of the steps (in bf16 some tokens take another expert), a
            stored key or value of an older token changes, or a kernel fails.
    """
    words, layers = model.embedding.word_embeddings.weight, model.decoder.layers[:LAYERS]
    rows, generator = torch.arange(batch, device=words.device), torch.Generator(words.device).manual_seed(0)
    progress = Progress(torch.zeros_like(rows))
    windows = [model.config.window_of(layer.layer_number) for layer in layers]
    usual, own = (
        [DecodeState.empty(model.config, batch, PLACES, progress, w and min(w, RING)) for w in windows]
        for _ in range(2)
    )

    def written(state: DecodeState) -> dict[str, Tensor]:
        places = progress.positions % state.keys.shape[2]
        return {
            "inputs of the convolutions": state.z.transpose(0, 1),
            "delayed values": state.delayed,
            "keys": state.keys[rows, :, places],
            "values": state.values[rows, :, places],
        }

    def older_unchanged(cache: Tensor, other: Tensor) -> bool:
        newest = torch.arange(cache.shape[2], device=cache.device) == (progress.positions % cache.shape[2]).unsqueeze(1)
        return torch.equal(torch.where(newest[:, None, :, None], other, cache), other)

    kernels, outputs = DecodeStep(model, own), {}
    hooks = [
        module.register_forward_hook(lambda module, _, result, name=name: outputs.update({name: result[0]}))
        for name, module in (("attention", layers[-1].self_attention), ("experts", layers[-1].mlp))
    ]
    try:
        for start in STARTS:
            distances: dict[str, list[Tensor]] = {}
            for position in range(start, start + STEPS):
                progress.positions.copy_(position + 5 * rows)
                progress.show(PLACES)
                for state, other in zip(own, usual, strict=True):
                    for name in ("z", "delayed", "keys", "values"):
                        getattr(state, name).copy_(getattr(other, name).normal_(generator=generator))
                tokens = ((position * batch + rows) * 7919 % len(words)).unsqueeze(1)
                embedding = embedded(model.embedding, tokens, marks_main_grad=False)
                angles = model.rotary_pos_emb.of_positions(progress.positions.unsqueeze(0))
                pairs = {"hidden states": (kernels(embedding, angles), run_layers(embedding, angles, usual))}
                pairs["outputs of attention"] = kernels.attended, outputs["attention"]
                pairs["outputs of the experts"] = kernels.output, outputs["experts"]
                for layer, state, other in zip(layers, own, usual, strict=True):
                    expected = written(other)
                    for name, tensor in written(state).items():
                        pairs[f"{name} of layer {layer.layer_number}"] = tensor, expected[name]
                    if not (older_unchanged(state.keys, other.keys) and older_unchanged(state.values, other.values)):
                        raise RuntimeError(f"layer {layer.layer_number} changes keys or values of older tokens")
                for name, pair in pairs.items():
                    distances.setdefault(name, []).append(
                        distance(*(tensor.reshape(batch, -1, PART) for tensor in pair))
                    )
            for name, apart in distances.items():
                if not (worst := torch.stack(apart).median(dim=0).values.max().item()) < FAR:
                    raise RuntimeError(f"{name} are {worst:.2g} from those of the layers of training, at most {FAR}")
    finally:
        for hook in hooks:
            hook.remove()


def distance(computed: Tensor, expected: Tensor) -> Tensor:
    """Return the distance [b, parts] of each part of [b, parts, channels], relative to the larger of the part's norm and
    the usual one of the sequence's parts.
    """
    computed, expected = computed.float(), expected.float()
    norm = expected.norm(dim=2)
    usual = norm.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-30)
    return (computed - expected).norm(dim=2) / torch.maximum(norm, usual)

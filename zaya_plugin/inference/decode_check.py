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
FAR = 0.1


@torch.no_grad()
def check_kernels(
    model: nn.Module, batch: int, run_layers: Callable[[Tensor, Tensor, list[DecodeState]], Tensor]
) -> None:
    """Compute steps of `batch` sequences with the first layers of `model`, by the kernels and by the layers of training,
    each from the same random states, and compare what they write to the states, the outputs of attention and experts of
    the last of these layers, and the hidden states. Random keys differ more than those of a text: a block that is
    left out shows. Median of the steps, because a token that another expert takes in bf16 is far; each sequence by itself.

    Args:
        run_layers: tokens int64 [b, 1], positions int64 [1, b] and the states of the layers to run -> hidden states
            [1, b, h]; the layers of training.

    Raises:
        RuntimeError: a distance, relative to the norm, is above FAR, or a kernel fails.
    """
    words, layers = model.embedding.word_embeddings.weight, model.decoder.layers[:LAYERS]
    rows, generator = torch.arange(batch, device=words.device), torch.Generator(words.device).manual_seed(0)
    progress = Progress(torch.zeros_like(rows))
    windows = [model.config.window_of(layer.layer_number) for layer in layers]
    usual, own = (
        [DecodeState.empty(model.config, batch, PLACES, progress, w and min(w, RING)) for w in windows]
        for _ in range(2)
    )
    kernels, outputs = DecodeStep(model, own), {}
    hooks = [
        module.register_forward_hook(lambda module, _, result, name=name: outputs.update({name: result[0]}))
        for name, module in (("attention", layers[-1].self_attention), ("experts", layers[-1].mlp))
    ]
    distances: dict[tuple[str, int], list[Tensor]] = {}
    try:
        for step in range(len(STARTS) * STEPS):
            tokens = ((step * batch + rows) * 7919 % len(words)).unsqueeze(1)
            progress.positions.copy_(STARTS[step // STEPS] + step % STEPS + 5 * rows)
            progress.show(PLACES)
            for state, other in zip(own, usual, strict=True):
                for name in ("z", "delayed", "keys", "values"):
                    getattr(state, name).copy_(getattr(other, name).normal_(generator=generator))
            positions = progress.positions.unsqueeze(0)
            embedding = embedded(model.embedding, tokens, marks_main_grad=False)
            hidden = kernels(embedding, model.rotary_pos_emb.of_positions(positions))
            expected_hidden = run_layers(tokens, positions, usual)
            pairs = {}
            for layer, *states in zip(layers, own, usual, strict=True):
                places = progress.positions % states[0].keys.shape[2]
                written = {
                    "z": [state.z.transpose(0, 1) for state in states],
                    "delayed": [state.delayed for state in states],
                    "keys": [state.keys[rows, :, places] for state in states],
                    "values": [state.values[rows, :, places] for state in states],
                }
                pairs |= {f"{name} of layer {layer.layer_number}": pair for name, pair in written.items()}
            pairs["outputs of attention"] = kernels.attended, outputs["attention"]
            pairs["outputs of the experts"] = kernels.output, outputs["experts"]
            pairs["hidden states"] = hidden, expected_hidden
            for name, pair in pairs.items():
                computed, expected = (tensor.reshape(batch, -1).float() for tensor in pair)
                apart = (computed - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
                distances.setdefault((name, step // STEPS), []).append(apart)
    finally:
        for hook in hooks:
            hook.remove()
    for (name, _), apart in distances.items():
        worst = torch.stack(apart).median(dim=0).values.max().item()
        if not worst < FAR:
            raise RuntimeError(f"{name} differ by {worst:.2g} of their norm from the layers of training, at most {FAR}")

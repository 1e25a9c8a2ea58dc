# SPDX-License-Identifier: Apache-2.0
"""The kernels of a decoding step, compared with the layers of training before they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from zaya_plugin.inference.decode_step import DecodeStep
from zaya_plugin.model.decode_state import DecodeState, Progress
from zaya_plugin.model.gpt_model import embedded

# A third of the tokens are in the second block of keys. The second layer reads the router state of the first.
LAYERS, PROMPT, STEPS = 2, 200, 15
FAR = 0.1


@torch.no_grad()
def check_kernels(
    model: nn.Module, batch: int, run_layers: Callable[[Tensor, Tensor, list[DecodeState]], Tensor]
) -> None:
    """Compute a few tokens of `batch` sequences with the first layers of `model`, by the kernels and by the layers of
    training, and compare the keys and values of each layer, and of the last one the outputs of attention and experts.
    Median of the tokens, because one that another expert takes in bf16 is far; each sequence by itself.

    Args:
        run_layers: tokens int64 [b, s], positions int64 [s, 1 or b] and the states of the layers to run; the layers of
            training.

    Raises:
        RuntimeError: a distance, relative to the norm, is above FAR, or a kernel fails.
    """
    device, layers = next(model.parameters()).device, model.decoder.layers[:LAYERS]
    progress = Progress(torch.full((batch,), PROMPT - 1, device=device))
    windows = [model.config.window_of(layer.layer_number) for layer in layers]
    usual = [DecodeState.empty(model.config, batch, PROMPT + STEPS, progress, window) for window in windows]
    ids = torch.arange(batch * (PROMPT + STEPS), device=device) * 7919 % len(model.embedding.word_embeddings.weight)
    prompt, *chosen = ids.view(batch, -1).split([PROMPT, *[1] * STEPS], dim=1)
    run_layers(prompt, torch.arange(PROMPT, device=device).unsqueeze(1), usual)
    own = [
        replace(state, **{name: getattr(state, name).clone() for name in ("z", "delayed", "keys", "values")})
        for state in usual
    ]
    kernels, outputs = DecodeStep(model, own), {}
    hooks = [
        module.register_forward_hook(lambda module, _, result, name=name: outputs.update({name: result[0]}))
        for name, module in (("attention", layers[-1].self_attention), ("experts", layers[-1].mlp))
    ]
    distances: dict[str, list[Tensor]] = {}
    try:
        for tokens in chosen:
            progress.positions.add_(1)
            progress.show(PROMPT + STEPS)
            positions = progress.positions.unsqueeze(0)
            run_layers(tokens, positions, usual)
            embedding = embedded(model.embedding, tokens, marks_main_grad=False)
            kernels(embedding, model.rotary_pos_emb.of_positions(positions))
            pairs, rows = {}, torch.arange(batch, device=device)
            for layer, state, other in zip(layers, own, usual, strict=True):
                places = progress.positions % state.keys.shape[2]
                for name in ("keys", "values"):
                    pair = [getattr(one, name)[rows, :, places] for one in (state, other)]
                    pairs[f"{name} of layer {layer.layer_number}"] = pair
            pairs["outputs of attention"] = kernels.attended, outputs["attention"]
            pairs["outputs of the experts"] = kernels.output, outputs["experts"]
            for name, pair in pairs.items():
                computed, expected = (tensor.reshape(batch, -1).float() for tensor in pair)
                apart = (computed - expected).norm(dim=1) / expected.norm(dim=1).clamp_min(1e-30)
                distances.setdefault(name, []).append(apart)
    finally:
        for hook in hooks:
            hook.remove()
    for name, apart in distances.items():
        worst = torch.stack(apart).median(dim=0).values.max().item()
        if not worst < FAR:
            raise RuntimeError(f"{name} differ by {worst:.2g} of their norm from the layers of training, at most {FAR}")

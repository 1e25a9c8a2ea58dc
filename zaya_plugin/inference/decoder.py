# SPDX-License-Identifier: Apache-2.0
"""A model that continues sequences token by token, with the state of its attention kept (model/decode_state.py).

The layers are those of training, called as Megatron's block calls them. Prompts of different lengths are padded on the
right: causal attention never looks there, and a padding token's own result is not read. A step takes one token of each
sequence at its own position. Experts have no capacity, so the other tokens of a batch do not change a token's numbers
but for rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy
import torch
from torch import Tensor
from torch.overrides import _pop_mode_temporarily

from hip_ops.runtime.conditions import capture
from zaya_plugin.inference.decode_check import check_kernels
from zaya_plugin.inference.decode_step import DecodeStep, refusal
from zaya_plugin.model.decode_state import DecodeState, Progress
from zaya_plugin.model.gpt_model import embedded

logger = logging.getLogger(__name__)
ROOM = 256  # stored tokens are allocated, and read by a step, in this many times a power of two


@contextmanager
def without_modes() -> Iterator[None]:
    """Leave the modes that watch each torch call. Building a model on a CPU requires one (patches/cpu.py),
    a step does not: it costs Python time in every call, and under it hip_ops' operators go through torch's dispatcher.
    """
    with ExitStack() as left:
        while torch._C._len_torch_function_stack():
            left.enter_context(_pop_mode_temporarily())
        yield


class Decoder:
    """Logits of the next token of b sequences: `begin` with prompts, then `step` with the tokens that were chosen.

    On a GPU a step is a few thousand short kernels whose launches take longer than they run, or for few sequences a few
    hundred of its own (decode_step.py). It is captured as a graph once for each size of the batch and, but for its own
    kernels, each doubling of the longest sequence. fp32 runs without both, because its grouped products wait for the
    host. After a capture that fails, with a warning, all further steps run without graphs.

    Args:
        model: as of `checkpoint.convert.loading.load_model`.
        graphs: capture steps; None: where it is possible.
        routed: keep the classes that the routers choose, for `routed_experts`; steps are then not captured.
        kernels: compute steps by their own kernels where these take the model and the batch; None: where steps are
            captured.
    """

    def __init__(self, model, graphs: bool | None = None, routed: bool = False, kernels: bool | None = None):
        self.model, self.config = model, model.config
        self.device = next(model.parameters()).device
        possible = self.device.type == "cuda" and self.config.params_dtype != torch.float32
        self.graphs, self.routed = (possible if graphs is None else graphs) and not routed, routed
        self.own_kernels = (self.graphs if kernels is None else kernels) and not routed
        self.chosen: list[Tensor] = []  # by the routers, layer after layer and pass after pass, int16 [s, b], host
        self.room = self.longest = 0
        self.states: list[DecodeState] = []

    @without_modes()
    @torch.no_grad()
    def hidden_states(self, tokens: Tensor) -> Tensor:
        """Return the normed hidden states [s, b, h] of whole sequences int64 [b, s], without a state."""
        positions = torch.arange(tokens.shape[1], device=self.device).unsqueeze(1)
        return self._run(tokens, positions, [None] * self.config.num_layers)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, v] of hidden states [n, h]."""
        weight = self.model.shared_embedding_or_output_weight()
        return self.model.output_layer(hidden.unsqueeze(0), weight=weight)[0][0]

    @without_modes()
    @torch.no_grad()
    def begin(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Tensor:
        """Start b new sequences and return the logits [b, v] of their first new token.

        Args:
            prompts: token ids, at least one each.
            new_tokens: `step` may be called this many times less one.
        """
        lengths = [len(prompt) for prompt in prompts]
        self._make_room(len(prompts), max(lengths) + new_tokens)
        self.chosen.clear()
        self.longest = max(lengths)
        self.progress.positions.copy_(torch.tensor(lengths) - 1)
        padded = [[*prompt, *[0] * (self.longest - len(prompt))] for prompt in prompts]
        tokens = torch.tensor(padded, device=self.device)
        positions = torch.arange(self.longest, device=self.device).unsqueeze(1)
        self.progress.show(self.longest)
        hidden = self._run(tokens, positions, self.states)
        return self.logits(hidden[self.progress.positions, torch.arange(len(prompts), device=self.device)])

    @without_modes()
    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Add one token int64 [b] to each sequence and return the logits [b, v] of the next.

        The result is overwritten by the next step.
        """
        self.longest += 1
        assert self.longest <= self.room, "more steps than `begin` has made room for"
        reach = room_for(self.longest) if self.decode_step is None else self.room
        self.tokens.copy_(tokens.unsqueeze(1))
        if reach in self.captured:
            graph, logits = self.captured[reach]
            graph.replay()
            return logits
        logits = self._step(reach)
        if self.graphs:  # this step has compiled and checked all that a capture must not
            try:
                captured, graph = capture(lambda: self._step(reach))
                self.captured[reach] = graph, captured
            except RuntimeError as error:  # of HIP or CUDA, at a call that a graph cannot hold
                self.graphs = False
                text = "decoding: a step cannot be captured as a graph, so each launches its kernels one by one: %s"
                logger.warning(text, str(error).splitlines()[0])
        return logits

    def routed_experts(self, number: int, prompt: int, new: int) -> numpy.ndarray:
        """Return the classes int16 [prompt + new - 1, layers, 1] of sequence `number`; the last token has none.

        prompt: tokens of its prompt; new: tokens that were chosen for it.
        """
        layers = self.config.num_layers
        first, *steps = (torch.stack(self.chosen[at : at + layers], -1) for at in range(0, new * layers, layers))
        return torch.cat([first[:prompt, number], *(step[:, number] for step in steps)]).unsqueeze(-1).numpy()

    def _step(self, reach: int) -> Tensor:
        self.progress.positions.add_(1)
        positions = self.progress.positions.unsqueeze(0)
        if self.decode_step is not None:
            embedding = embedded(self.model.embedding, self.tokens, marks_main_grad=False)
            return self.logits(self.decode_step(embedding, self.model.rotary_pos_emb.of_positions(positions))[0])
        self.progress.show(reach)
        return self.logits(self._run(self.tokens, positions, self.states)[0])

    def _run(self, tokens: Tensor, positions: Tensor, states: Sequence[DecodeState | None]) -> Tensor:
        """tokens int64 [b, s], positions int64 [s, 1 or b] -> hidden states [s, b, h] behind the final norm."""
        hidden = embedded(self.model.embedding, tokens, marks_main_grad=False)
        return self._layers(hidden, self.model.rotary_pos_emb.of_positions(positions), states)

    def _layers(self, hidden: Tensor, angles: Tensor, states: Sequence[DecodeState | None]) -> Tensor:
        """hidden [s, b, h], angles as of the model's rotary embedding -> hidden states [s, b, h] behind the final norm, of
        as many layers as there are states.
        """
        decoder, context = self.model.decoder, None
        with self.choices_kept():
            for layer, state in zip(decoder.layers, states, strict=False):
                hidden, context = layer(
                    hidden_states=hidden,
                    attention_mask=None,
                    context=context,
                    rotary_pos_emb=angles,
                    inference_context=state,
                )
        return decoder.final_layernorm(hidden)

    @contextmanager
    def choices_kept(self) -> Iterator[None]:
        """With `routed`, keep the classes that the model's routers choose meanwhile; the model may have other decoders."""
        with ExitStack() as hooks:
            for layer in self.model.decoder.layers if self.routed else ():
                hooks.enter_context(layer.mlp.router.register_forward_hook(self._keep_classes))
            yield

    def _keep_classes(self, router, inputs, routed: tuple[Tensor, ...]) -> None:
        self.chosen.append(routed[1].to(torch.int16).cpu())

    def _make_room(self, batch: int, tokens: int) -> None:
        """Allocate states for `batch` sequences of `tokens` tokens, or clear those that fit."""
        if self.states and self.tokens.shape[0] == batch and self.room >= tokens:
            for state in self.states:
                state.clear()
            return
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # graphs hold the addresses of the states
        self.decode_step: DecodeStep | None = None  # lets go of the old states before there are new ones
        self.states, self.room = [], room_for(tokens)
        self.progress = Progress(torch.zeros(batch, dtype=torch.int64, device=self.device))
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=self.device)
        self.states = [
            DecodeState.empty(self.config, batch, self.room, self.progress, self.config.window_of(number))
            for number in range(1, self.config.num_layers + 1)
        ]
        if self.own_kernels and refusal(self.config, self.device, batch) is None:
            try:
                check_kernels(self.model, batch, self._layers)
                self.decode_step = DecodeStep(self.model, self.states)
                self._step(self.room)  # compiles what layers behind the checked ones need
            except Exception as error:  # any of Triton and its compilers
                self.decode_step, self.own_kernels = None, False
                text = "decoding: the kernels of a step fail, so its layers are those of training: %s: %s"
                kind, lines = type(error).__name__, str(error).strip().split("\n")
                # Triton quotes its source first.
                logger.warning(text, kind, lines[-1 if kind == "CompilationError" else 0])
            for state in self.states:
                state.clear()


def room_for(tokens: int) -> int:
    """Return the tokens that are allocated for sequences of up to `tokens`."""
    room = ROOM
    while room < tokens:
        room *= 2
    return room

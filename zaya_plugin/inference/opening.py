# SPDX-License-Identifier: Apache-2.0
"""Open what is to be evaluated: a checkpoint of a run, or a published model, with its tokenizer."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zaya_plugin.checkpoint.convert.model_folder import resolve
from zaya_plugin.checkpoint.reading import Reading, begin
from zaya_plugin.data.routed_experts import check_form
from zaya_plugin.data.tokenizer import added_tokens
from zaya_plugin.ground.errors import free_memory, mistake
from zaya_plugin.ground.progress import bar

GIB = 2**30


@dataclass(frozen=True)
class Opened:
    """A model whose weights are loaded with the first use of `decoder`, after all that can be checked before.

    described: a Description. arguments: Megatron's, of a checkpoint; None for a published model. load: returns the
    model; called with a function of progress. shapes: of its tensors. dtype, device: of the computation. tokenizer: a
    tokenizers.Tokenizer, and home its folder; None for both without one. stop: ids that end a text. bos: id or None.
    special_tokens: whether texts get the tokens that the tokenizer adds. step: the iteration of a checkpoint. model: of
    `find_model`, which holds a checkpoint's files. routed: whether the decoder keeps the routers' choices.
    """

    name: str
    described: Any
    arguments: Any
    load: Callable[[Callable[[int], None]], Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: Any
    device: str
    tokenizer: Any
    home: Path | None
    stop: tuple[int, ...]
    bos: int | None
    special_tokens: bool
    step: int | None
    model: Any
    routed: bool = False

    @cached_property
    def decoder(self):
        from zaya_plugin.inference.decoder import Decoder

        with bar("load", sum(map(math.prod, self.shapes)), " parameters") as shown:
            return Decoder(self.load(shown.update), routed=self.routed)

    def free_memory(self) -> int:
        """Return the bytes that are free where the model is computed."""
        import torch

        return torch.cuda.mem_get_info()[0] if self.device == "cuda" else free_memory()

    def bytes_of_pass(self, batch: int, tokens: int) -> int:
        """Return the least bytes that the weights, unless they are loaded, and one pass over `batch` sequences of
        `tokens` tokens still take: two copies of the hidden states in fp32, and a token's logits of each sequence.
        """
        weights = 0 if "decoder" in vars(self) else sum(map(math.prod, self.shapes)) * self.dtype.itemsize
        return weights + 4 * batch * (2 * tokens * self.described.hidden_size + self.described.vocab_size)

    def tokens_of(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text that will be continued, as the texts of the training data began.

        special_tokens: False leaves out what the tokenizer adds in any case.
        """
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [*self.leading_tokens, *ids] if special_tokens else ids

    @cached_property
    def leading_tokens(self) -> list[int]:
        """The tokens that the tokenizer puts before a text (bos). Those that it puts behind one would end the text that
        is continued.
        """
        return added_tokens(self.tokenizer)[0] if self.special_tokens else []

    @property
    def first(self) -> int:
        """The token that a text without a context follows: bos where training had it, else what ends a text."""
        return self.bos if self.special_tokens and self.bos is not None else self.stop[0]

    def text_of(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def find_model(options: argparse.Namespace) -> Path | Reading:
    """Return the folder of the published model of the options, or the checkpoint, which is compared with its checksums
    and held. Imports no torch where the checkpoint has a manifest.

    Raises:
        ValueError: it does not exist, or is damaged; --tokenizer is not a tokenizer's folder; the file of
            --routed-experts cannot be written.
    """
    name = options.model
    if options.tokenizer and not (Path(options.tokenizer) / "tokenizer.json").is_file():
        raise _no_tokenizer(options.tokenizer, options.tokenizer)
    if getattr(options, "routed_experts", None) is not None:
        check_form(options.routed_experts)
    if not _is_published(name):
        return begin(Path(name), options.step, "MODEL", options.verify)
    if options.step is not None:
        raise mistake("--step", options.step, problem=f"{name} is a published model", allowed="a run's checkpoint")
    return resolve(name, key="MODEL")


def _no_tokenizer(name: str | None, home: str | Path) -> ValueError:
    return mistake(
        "--tokenizer",
        name,
        problem=f"{home} has no tokenizer.json",
        allowed="a folder with tokenizer.json",
        fix="--tokenizer FOLDER",
    )


def open_model(options: argparse.Namespace, model: Path | Reading, needs_tokenizer: bool = True) -> Opened:
    """Return the model of the options, whose files `find_model` returned.

    Raises:
        ValueError: this machine cannot compute it, or a tokenizer is needed and missing.
    """
    import torch

    from zaya_plugin.checkpoint import on_disk
    from zaya_plugin.checkpoint.convert import exporting
    from zaya_plugin.checkpoint.convert.importing import open_source
    from zaya_plugin.checkpoint.convert.loading import load_model
    from zaya_plugin.checkpoint.convert.model_folder import token_ids
    from zaya_plugin.checkpoint.convert.tables import EMBEDDING
    from zaya_plugin.data.tokenizer import open_tokenizer, tokenizer_digest

    trained, arguments, imported, step, special = None, None, {}, None, True
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise mistake("--device", device, problem="torch finds no GPU", allowed="cpu", fix="--device cpu")
    if isinstance(model, Path):
        source = open_source(model, name=options.model)
        for note in source.notes:
            print(f"note: {note}", file=sys.stderr)
        name, described, tensors, home = source.name, source.model, source.tensors, source.folder
        dtype = "bf16" if tensors[EMBEDDING].dtype == torch.bfloat16 else "fp32"
    else:
        trained = exporting.open_checkpoint(model)
        step, special = on_disk.iteration_of(trained.folder), trained.special_tokens
        name, described, tensors, arguments = str(trained.folder), trained.model, trained.tensors, trained.arguments
        home, imported = trained.tokenizer, trained.imported
        dtype = "bf16" if getattr(arguments, "bf16", False) else "fp32"
    home = Path(options.tokenizer or home or ".")
    tokenizer, ids = None, {token: getattr(described, token) for token in ("bos", "eos")}
    if (home / "tokenizer.json").is_file() and (options.tokenizer or str(home) != "."):
        try:
            tokenizer, ids = open_tokenizer(str(home)), ids | token_ids(home)
        except Exception as error:  # the Rust half of a tokenizer raises a bare Exception
            raise mistake("--tokenizer", home, problem=f"cannot be opened ({error})") from error
    elif needs_tokenizer:
        raise _no_tokenizer(options.tokenizer, home)
    ids |= {token: imported[token] for token in ids if imported.get(token) is not None}
    eos = ids["eos"]
    if trained is not None and tokenizer is not None:
        trained.check_tokenizer(home, tokenizer_digest(str(home)))
    computed = exporting.DTYPES[options.dtype or dtype]
    return Opened(
        name=name,
        described=described,
        arguments=arguments,
        load=lambda progress: load_model(described, tensors, computed, device, progress),
        shapes=tuple(values.shape for values in tensors.values()),
        dtype=computed,
        device=device,
        tokenizer=tokenizer,
        home=home if tokenizer is not None else None,
        stop=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos=ids["bos"],
        special_tokens=special,
        step=step,
        model=model,
        routed=getattr(options, "routed_experts", None) is not None,
    )


def check_room(opened: Opened, batch: int, prompt: int, new_tokens: int) -> None:
    """Raise ValueError if weights and the keys and values of `batch` sequences, with prompts of up to `prompt` tokens,
    need more memory than is free. Nothing of it is allocated before.
    """
    from zaya_plugin.inference.decoder import ROOM, room_for

    def keys_and_values(tokens: int) -> int:
        width = 2 * described.num_query_groups * described.kv_channels * opened.dtype.itemsize
        return batch * room_for(tokens) * described.num_layers * width

    described, free, pass_bytes = opened.described, opened.free_memory(), opened.bytes_of_pass(batch, prompt)
    needed, most = keys_and_values(prompt + new_tokens), ROOM
    if pass_bytes + needed <= free:
        return
    while pass_bytes + keys_and_values(2 * most) <= free:
        most *= 2
    fits = pass_bytes + keys_and_values(most) <= free and most > prompt
    raise mistake(
        "--max-new-tokens",
        new_tokens,
        problem=f"the keys and values of {batch} sequences of {prompt + new_tokens:,} tokens need {needed / GIB:,.2f} "
        f"GiB and the weights and a prompt's pass {pass_bytes / GIB:,.2f} GiB, and {free / GIB:,.2f} GiB of memory are "
        "free",
        allowed=f"at most {most - prompt:,} with {batch} sequences at once" if fits else "a model and prompts that fit",
        fix=f"--max-new-tokens {most - prompt}, or a smaller --batch-size" if fits else "a smaller --batch-size",
    )


def _is_published(name: str) -> bool:
    folder = Path(name)
    if folder.exists():
        return any(folder.glob("*.safetensors")) if folder.is_dir() else False
    return name.partition("@")[0].count("/") == 1 and not name.startswith((".", "/")) and not folder.parent.exists()

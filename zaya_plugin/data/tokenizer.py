# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a dataset: trained on the corpus or taken from Hugging Face, then read back from its own directory.

A tokenizer directory holds at least tokenizer.json and tokenizer_config.json, so `transformers.AutoTokenizer` and
Megatron's HuggingFaceTokenizer open it offline.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass

END_OF_TEXT = "<|endoftext|>"
# Without a padding token of its own Megatron's `tokenizer.pad` is None, or the id of a token that occurs in the data.
PADDING = "<|padding|>"
SMALLEST_BPE = 256 + 2  # every byte and the two special tokens


@dataclass(frozen=True)
class TokenizerRecord:
    """vocab_size is one more than the largest id; eod_id and eod_token are None for a tokenizer without eos_token."""

    source: str
    sha256: str
    vocab_size: int
    eod_id: int | None
    eod_token: str | None


def train_bpe(texts: Iterable[str], vocab_size: int, directory: str) -> None:
    """Trains and writes a byte-level BPE, with the pre-tokenisation of GPT-2: nothing is unknown, any text round-trips.

    Raises:
        ValueError: there is no text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    empty = True

    def counted():
        nonlocal empty
        for text in texts:
            empty = False
            yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(counted(), trainer)
    if empty:
        raise ValueError("there is no text to train a tokenizer on")
    os.makedirs(directory, exist_ok=True)
    # Not tokenizer.save(), which turns a full disk into a bare Exception.
    with open(os.path.join(directory, "tokenizer.json"), "w", encoding="utf-8") as out:
        out.write(tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        # No truncation: transformers' own number for "unlimited".
        "model_max_length": int(1e30),
    }
    with open(os.path.join(directory, "tokenizer_config.json"), "w", encoding="utf-8") as out:
        json.dump(config, out, indent=2)


def import_pretrained(name: str, directory: str) -> None:
    """Copies a Hugging Face tokenizer (directory or name on the hub) as `AutoTokenizer` understands it.

    Raises:
        ValueError: it cannot be opened or has no tokenizer.json form.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    # transformers raises OSError, ValueError, KeyError, ImportError and others for a bad name or directory
    except Exception as error:
        raise ValueError(
            f"--tokenizer {name} cannot be opened as a directory or a name on the Hugging Face hub: {error}"
        ) from error
    if not tokenizer.is_fast:
        raise ValueError(
            f"--tokenizer {name} has no fast (tokenizer.json) form, which is the only one that is supported"
        )
    try:
        tokenizer.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:  # the Rust half of a tokenizer reports a full disk as a bare Exception
        raise OSError(f"the tokenizer cannot be saved in {directory}: {error}") from error


def open_tokenizer(directory: str):
    """The `tokenizers.Tokenizer` of a directory, without the truncation and padding that some are saved with."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(os.path.join(directory, "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def describe(directory: str, source: str) -> TokenizerRecord:
    """What the manifest says about a tokenizer directory."""
    vocabulary = open_tokenizer(directory).get_vocab(with_added_tokens=True)
    with open(os.path.join(directory, "tokenizer_config.json"), encoding="utf-8") as stream:
        eos = json.load(stream).get("eos_token")
    if isinstance(eos, dict):  # written by transformers before 5
        eos = eos["content"]
    with open(os.path.join(directory, "tokenizer.json"), "rb") as stream:
        sha256 = hashlib.sha256(stream.read()).hexdigest()
    return TokenizerRecord(source, sha256, max(vocabulary.values()) + 1, vocabulary.get(eos), eos)


def vocabulary_size(tokenizer: str) -> int | None:
    """Entries of the tokenizer in a directory with a tokenizer.json; None for a name on the hub, without asking it."""
    path = os.path.join(tokenizer, "tokenizer.json")
    if not os.path.isfile(path):
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(path).get_vocab_size()

# SPDX-License-Identifier: Apache-2.0
"""Train, import and describe the tokenizer of a dataset, which lies in a directory of its own.

A tokenizer directory holds at least tokenizer.json and tokenizer_config.json, so `transformers.AutoTokenizer` and
Megatron's HuggingFaceTokenizer open it offline.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.hub import unreachable

END_OF_TEXT = "<|endoftext|>"
# Without a padding token of its own Megatron's `tokenizer.pad` is None, or the id of a token that occurs in the data.
PADDING = "<|padding|>"
CHAT_TEMPLATES = Path(__file__).parent / "chat_templates"  # <name>.jinja
MIN_BPE_ENTRIES = 256 + 2  # every byte and the two special tokens


@dataclass(frozen=True)
class TokenizerRecord:
    """A tokenizer in the manifest.

    vocab_size: one more than the largest id; eod_id, eod_token: None for a tokenizer without eos_token.
    """

    source: str
    sha256: str
    vocab_size: int
    eod_id: int | None
    eod_token: str | None


def train_bpe(texts: Iterable[str], vocab_size: int, directory: str) -> None:
    """Train and write a byte-level BPE with the pre-tokenisation of GPT-2: no byte is unknown, and any text
    round-trips.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    os.makedirs(directory, exist_ok=True)
    # Not tokenizer.save(), which turns a full disk into a bare Exception.
    Path(directory, "tokenizer.json").write_text(tokenizer.to_str(pretty=True), "utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "clean_up_tokenization_spaces": False,
        # No truncation: transformers' own number for "unlimited".
        "model_max_length": int(1e30),
    }
    Path(directory, "tokenizer_config.json").write_text(json.dumps(config, indent=2), "utf-8")


def template_file(name: str) -> str:
    """Return the file of a chat template, which is given by its path or by the name of a shipped one."""
    names = sorted(path.stem for path in CHAT_TEMPLATES.glob("*.jinja"))
    if name in names:
        return str(CHAT_TEMPLATES / f"{name}.jinja")
    if not os.path.isfile(name):
        allowed = f"a Jinja template, or {' or '.join(names)}"
        raise mistake("--chat-template", name, problem="must be a file", allowed=allowed)
    return name


def import_pretrained(name: str, directory: str, chat: bool = False, template: str | None = None) -> None:
    """Copy a Hugging Face tokenizer (directory or name on the hub) as `AutoTokenizer` reads it.

    Args:
        chat: whether it must have a chat template; template: file of one that replaces its own.

    Raises:
        ValueError: it cannot be opened, has no tokenizer.json form, or no chat template.
        OSError: it cannot be saved.
    """
    tokenizer = _fast(name, "--tokenizer")
    if template is not None:
        tokenizer.chat_template = Path(template).read_text("utf-8")
    if chat and not tokenizer.chat_template:
        raise mistake(
            "--tokenizer",
            name,
            problem="has no chat template",
            allowed="a tokenizer of a chat model, or any with --chat-template",
            fix="--chat-template chatml, or a file with a Jinja template",
        )
    try:
        tokenizer.save_pretrained(directory)
    except OSError:
        raise
    except Exception as error:  # the Rust half of a tokenizer reports a full disk as a bare Exception
        raise OSError(f"the tokenizer cannot be saved in {directory}: {error}") from error


def chat_prompt(directory: str, text: str, template: str | None = None) -> list[int]:
    """Return the tokens of a user's message and of the beginning of its answer, by the chat template of a tokenizer's
    folder. template: as of `import_pretrained`.

    Raises:
        ValueError: there is no template, or it fails.
    """
    from transformers import PreTrainedTokenizerFast

    # This class reads no config.json; AutoTokenizer refuses that of the legacy layout.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory)
    if template is not None:
        tokenizer.chat_template = Path(template).read_text("utf-8")
    fix, messages = "--chat-template chatml, or a file with a Jinja template", [{"role": "user", "content": text}]
    if not tokenizer.chat_template:
        raise mistake(
            "--chat", directory, problem="has no chat template", allowed="the folder of a chat model", fix=fix
        )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except Exception as error:  # templates are programs: they raise errors of Jinja, of Python, and their own
        problem = f"the chat template fails: {type(error).__name__}: {error}"
        raise mistake("--chat", directory, problem=problem, allowed="a template for one message", fix=fix) from error


def open_tokenizer(directory: str):
    """Return the `tokenizers.Tokenizer` of a directory, without the truncation and padding that some are saved with."""
    from tokenizers import Tokenizer

    file = os.path.join(directory, "tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # the Rust half raises a bare Exception, for a missing file too
        raise mistake(
            file, problem=f"cannot be read: {error}", allowed="the tokenizer.json of a Hugging Face tokenizer"
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def any_tokenizer(name: str):
    """Return the `tokenizers.Tokenizer` of data.tokenizer: a directory, or a name on the Hub.

    Raises:
        ValueError: it cannot be opened, or has no tokenizer.json form.
    """
    if os.path.isfile(os.path.join(name, "tokenizer.json")):
        return open_tokenizer(name)
    tokenizer = _fast(name, "data.tokenizer").backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _fast(name: str, key: str):
    """Return transformers' tokenizer, which has a tokenizer.json form. key: of the recipe, or the option."""
    tokenizer = _of_transformers(name, key)
    if not tokenizer.is_fast:
        raise mistake(key, name, problem="has no fast form", allowed="tokenizers with a tokenizer.json")
    return tokenizer


def special_tokens(tokenizer) -> tuple[str, ...]:
    """Return the special tokens of a `tokenizers.Tokenizer`, longest first."""
    tokens = (token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    return tuple(sorted(tokens, key=len, reverse=True))


def added_tokens(tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that the post-processor of a `tokenizers.Tokenizer` puts before and behind a text, such as bos.

    Raises:
        ValueError: it does more than that.
    """
    words = (
        word for word in chain("a0", tokenizer.get_vocab()) if tokenizer.encode(word, add_special_tokens=False).ids
    )
    if (word := next(words, None)) is None:
        return [], []
    bare, whole = tokenizer.encode(word, add_special_tokens=False).ids, tokenizer.encode(word)
    at = whole.special_tokens_mask.index(0)
    if whole.ids[at : at + len(bare)] != bare or whole.special_tokens_mask.count(0) != len(bare):
        raise mistake(
            "--tokenizer",
            problem="its post-processor changes the tokens of a text",
            allowed="one that adds tokens before and behind a text",
            fix="another tokenizer, or another post_processor in its tokenizer.json",
        )
    return whole.ids[:at], whole.ids[at + len(bare) :]


def check_name(tokenizer: str) -> None:
    """Raise ValueError if `tokenizer`, the value of data.tokenizer, is a path without a tokenizer, and cannot be a name
    on the hub either.
    """
    folder = Path(tokenizer)
    if folder.is_dir() and any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*")):
        return
    if os.path.lexists(folder):
        problem = "holds no tokenizer" if folder.is_dir() else "is not a folder"
    elif re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", tokenizer):
        return
    else:
        problem = "does not exist"
    raise mistake(
        "data.tokenizer",
        tokenizer,
        problem=problem,
        allowed="a folder with tokenizer.json, or the name of a Hugging Face tokenizer",
        fix="data.tokenizer=<dataset>/tokenizer, or data.tokenizer=null for that of the data",
    )


def check_opens(tokenizer: str) -> None:
    """Raise ValueError if the ranks could not open a tokenizer that is not a folder with tokenizer.json."""
    if os.path.isfile(os.path.join(tokenizer, "tokenizer.json")):
        return  # is opened with the data
    _of_transformers(tokenizer, "data.tokenizer")


def _of_transformers(name: str, key: str):
    """Return the tokenizer in a folder, or of that name on the Hub or in its local cache. key: what names it in
    messages.
    """
    from transformers import AutoTokenizer

    why = None if os.path.isdir(name) else unreachable()
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=why is not None)
    # transformers raises OSError, ValueError, KeyError, ImportError and others for a bad name or directory
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        problem = f"cannot be opened: {reason}"
        if why is not None:
            problem = f"is not a folder, and the local cache of the Hugging Face Hub does not hold it ({why})"
        raise mistake(
            key,
            name,
            problem=problem,
            allowed="a folder with tokenizer.json, or the name of a Hugging Face tokenizer that this machine can "
            "reach or has in its cache",
            fix=f"{key}{'=' if key.startswith('data') else ' '}<folder>" if why is not None else "",
        ) from error


def describe(directory: str, source: str) -> TokenizerRecord:
    """Return the manifest's record of a tokenizer directory."""
    vocabulary, folder = open_tokenizer(directory).get_vocab(with_added_tokens=True), Path(directory)
    if not vocabulary:
        raise mistake(
            f"{directory}/tokenizer.json",
            problem="holds no tokens",
            allowed="a tokenizer with tokens",
            fix="copy it again",
        )
    try:
        eos = json.loads((folder / "tokenizer_config.json").read_text("utf-8")).get("eos_token")
        if isinstance(eos, dict):  # written by transformers before 5
            eos = eos["content"]
    except (ValueError, KeyError, AttributeError, RecursionError) as error:
        raise mistake(
            f"{directory}/tokenizer_config.json", problem=f"cannot be read: {error}", fix="copy it again"
        ) from error
    sha256 = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    return TokenizerRecord(source, sha256, max(vocabulary.values()) + 1, vocabulary.get(eos), eos)


def tokenizer_digest(name: str) -> str:
    """Return a digest that tokenizers share if they turn text into the same ids, however their files are written; of a
    name on the hub the name, without a request.
    """
    file = os.path.join(name, "tokenizer.json")
    return _digest(name, os.stat(file).st_mtime_ns) if os.path.isfile(file) else name


@lru_cache(maxsize=64)
def _digest(directory: str, _: int) -> str:
    tokenizer = open_tokenizer(directory)
    if (processor := tokenizer.post_processor) is not None:
        written = json.loads(processor.__getstate__())
        # transformers writes this one for none
        if written["type"] == "TemplateProcessing" and not written["special_tokens"]:
            tokenizer.post_processor = None
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:16]


def vocabulary_size(tokenizer: str) -> int | None:
    """Return the entries of the tokenizer in a directory with a tokenizer.json; None for a name on the hub, without a
    request.
    """
    has_file = os.path.isfile(os.path.join(tokenizer, "tokenizer.json"))
    return open_tokenizer(tokenizer).get_vocab_size() if has_file else None

# SPDX-License-Identifier: Apache-2.0
"""A published model's folder, and its files other than the weights: the tokenizer, its chat template, the settings of
generation. Imports no torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.hub import unreachable
from zaya_plugin.ground.whole_file import write_whole

CONFIG = "config.json"
# Files of a model other than its weights: what a tokenizer's `save_pretrained` writes, with the vocabulary in
# the form of its class, its code and all chat templates; the settings of generation; the licence. A list, since a
# folder may hold weights in other formats too.
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.spm",
    "*.tiktoken",
    "tekken.json",
    "*.codes",
    "normalizer.json",
    "tokenization_*.py",
    "*.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
# Parts of a tokenizer that add tokens to every text.
ADDS_TOKENS = ("TemplateProcessing", "BertProcessing", "RobertaProcessing")


def resolve(source: str, *, download: bool = True, key: str = "SOURCE") -> Path:
    """Return the folder of a source: a folder, or ORGANISATION/NAME[@REVISION] on the Hugging Face Hub.

    Args:
        download: whether files that the local cache lacks may be fetched. key: what names the source in messages.

    Raises:
        ValueError: it is neither, or the Hub does not give it.
    """
    if Path(source).is_dir():
        if not any(Path(source).glob("*.safetensors*")):
            raise without_weights(Path(source), key)
        return Path(source)
    name, _, revision = source.partition("@")
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise mistake(
            key,
            source,
            problem="must be a folder or a name on the Hub",
            allowed="a folder, or a name on the Hub such as Zyphra/ZAYA1-base",
        )
    from huggingface_hub import snapshot_download

    why = unreachable() if download else None
    try:
        folder = snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=["*.safetensors", "*.safetensors.index.json", CONFIG, *COMPANION_FILES],
            local_files_only=not download or why is not None,
        )
    except Exception as error:  # of the Hub, of its connection, of the cache
        raise mistake(
            key,
            source,
            problem=f"the Hub does not give it ({why or str(error).splitlines()[0]})",
            allowed="a folder, or a name on the Hub that this machine can reach or has in its cache",
        ) from error
    return Path(folder)


def check_push(name: str) -> None:
    """Raise ValueError unless a folder can be pushed to the repository `name` on the Hub: before hours of an export."""
    from huggingface_hub import get_token

    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        allowed = "ORGANISATION/NAME on the Hugging Face Hub"
        raise mistake("--push", name, problem="is not a repository's name", allowed=allowed)
    why = "no token of the Hub is known" if get_token() is None else unreachable()
    if why is not None:
        fix = "HF_TOKEN=<token that may write> in the environment, or `hf auth login`; HF_ENDPOINT for another Hub"
        raise mistake("--push", name, problem=why, allowed="a Hub that answers and a token", fix=fix)


def push(folder: Path, name: str) -> str:
    """Upload the files of a folder in one commit to the repository `name`, which is made, private, where it does not
    exist. Return the commit's address. The token comes from the environment or the Hub's login.

    Raises:
        ValueError: the Hub refuses it, or the connection fails; the same call uploads what is missing.
    """
    from huggingface_hub import HfApi

    hub = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        return hub.upload_folder(folder_path=folder, repo_id=name, commit_message="Export of zaya_plugin").commit_url
    except Exception as error:  # of the Hub, of its connection
        problem = f"the upload of {folder} failed: {str(error).strip().splitlines()[0]}"
        fix = f"hf upload {name} {folder} once this is repaired"
        raise mistake(
            "--push", name, problem=problem, allowed="a repository that the token may write", fix=fix
        ) from error


def without_weights(folder: Path, key: str) -> ValueError:
    """Return the error of a source without safetensors files, often a checkpoint. key: as in `resolve`."""
    fix = "a checkpoint of a run needs no import: `zaya generate`, `zaya eval` and `zaya checkpoint export` read it"
    if key == "handover.from_hf":
        export = f"`zaya checkpoint export {folder} --output DIR`"
        fix = f"of an import what it was made from; of a run {export}, then handover.from_hf=DIR"
    allowed = "the folder of a published model, or its name on the Hub"
    return mistake(key, folder, problem="holds no *.safetensors files", allowed=allowed, fix=fix)


def check_new(output: Path) -> None:
    """Raise ValueError if the folder of an export exists and is not empty."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise mistake("--output", output, problem="exists", allowed="a folder that is new or empty")


def copy_companions(source: Path, target: Path, special_tokens: bool = True) -> None:
    """Copy the files other than the weights from the folder `source` to the folder `target`,
    which is made if there are any.

    special_tokens: False takes from the tokenizer what adds tokens to every text.
    """
    for path in (path for pattern in COMPANION_FILES for path in source.glob(pattern) if path.is_file()):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
    if not special_tokens and adds_tokens(target):
        file, stated = target / "tokenizer.json", target / "tokenizer_config.json"
        content = _json(file)
        content["post_processor"] = _bare(content["post_processor"])
        write_whole(file, json.dumps(content, indent=2, ensure_ascii=False))
        # Classes of transformers initialise that part again unless these say no.
        config = {**_json(stated), "add_bos_token": False, "add_eos_token": False}
        write_whole(stated, json.dumps(config, indent=2, ensure_ascii=False))


def adds_tokens(folder: Path) -> bool:
    """Return whether the tokenizer in a folder adds tokens to every text."""
    processor = _json(folder / "tokenizer.json").get("post_processor")
    return _bare(processor) != processor


def _bare(processor: dict | None) -> dict | None:
    """Return the post-processor of a tokenizer.json without what adds tokens."""
    if processor is None:
        return None
    if processor.get("type") == "Sequence":
        parts = [part for part in map(_bare, processor.get("processors", ())) if part is not None]
        return {**processor, "processors": parts} if parts else None
    return None if processor.get("type") in ADDS_TOKENS else processor


def json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the content of a JSON file, an object in which no name comes twice.

    Raises:
        ValueError: it is something else; the message names `where`.
    """
    try:
        content = json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise mistake(where, problem=f"is not JSON ({error})") from error
    if not isinstance(content, dict):
        raise mistake(where, problem="is not a JSON object")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} comes twice")
    return values


def tokenizer_entries(folder: Path) -> int | None:
    """Return one more than the largest id of the tokenizer in a folder; None without a tokenizer.json."""
    vocabulary = _vocabulary(folder)
    return max(vocabulary.values()) + 1 if vocabulary else None


def token_ids(folder: Path) -> dict[str, Any]:
    """Return the ids of the tokens bos, eos and pad by generation_config.json, else by tokenizer_config.json; without
    those that neither names.
    """
    stated, config, vocabulary = _json(folder / "generation_config.json"), _json(folder / "tokenizer_config.json"), None
    ids = {}
    for name in ("bos", "eos", "pad"):
        if stated.get(f"{name}_token_id") is not None:
            ids[name] = stated[f"{name}_token_id"]
            continue
        token = config.get(f"{name}_token")
        token = token["content"] if isinstance(token, dict) else token  # written by transformers before 5
        vocabulary = _vocabulary(folder) if vocabulary is None else vocabulary
        if token in vocabulary:
            ids[name] = vocabulary[token]
    return ids


def _vocabulary(folder: Path) -> dict[str, int]:
    content = _json(folder / "tokenizer.json")
    try:
        entries = content.get("model", {}).get("vocab", {})
        if isinstance(entries, list):  # of a unigram model: pairs of token and score
            entries = {token: index for index, (token, _) in enumerate(entries)}
        vocabulary = entries | {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        if wrong := next((token for token, index in vocabulary.items() if type(index) is not int or index < 0), None):
            raise ValueError(f"{wrong!r} must have a number")
        return vocabulary
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise mistake(str(folder / "tokenizer.json"), problem=f"is not a valid tokenizer file ({error!r})") from error


def _json(path: Path) -> dict[str, Any]:
    return json_object(path.read_bytes(), str(path)) if path.is_file() else {}

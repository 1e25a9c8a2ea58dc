# SPDX-License-Identifier: Apache-2.0
"""`zaya data check`: read datasets whole and compare every byte with their manifests. No torch."""

import argparse
import os
import warnings

from zaya_plugin.commands.datasets import data_parser, recipe_of
from zaya_plugin.commands.parser import TOKENIZER, Parser
from zaya_plugin.data.fingerprint import fingerprint
from zaya_plugin.data.prepared import MARKS, DatasetWarning, check_dataset, locate, tokenizer_of
from zaya_plugin.data.sources import find_sources, named_datasets
from zaya_plugin.data.tokenizer import describe
from zaya_plugin.ground.progress import bar

DESCRIPTION = """\
Compare every byte of datasets with the checksums of their manifests, and every token id with the vocabulary.

A start of a run compares sizes, counts and fingerprints; of files above 64 MB it reads 256 stretches of 64 KiB.
With a recipe, given as for zaya train, all of its datasets are checked, and that they have one tokenizer."""
EXAMPLES = """\
examples:
  zaya data check data/web data/code
  zaya data check other/corpus_text_document --tokenizer weights/zaya1/tokenizer
  zaya data check experiment=zaya1_base data.path=data/web"""


def parser() -> Parser:
    return data_parser("check", _check, DESCRIPTION, EXAMPLES, TOKENIZER, datasets="datasets (directory or prefix)")


def _check(options: argparse.Namespace, _: None) -> None:
    """Check each dataset and print its size and fingerprint.

    Raises:
        ValueError: see `check_dataset` and `find_sources`.
    """
    recipe = recipe_of(options)
    tokenizer = options.tokenizer
    if recipe is not None:
        tokenizer = tokenizer or recipe.data.tokenizer
        find_sources(recipe)
    record = describe(tokenizer, tokenizer) if tokenizer is not None else None
    paths = options.datasets if recipe is None else [path for _, path in named_datasets(recipe)]
    for path in dict.fromkeys(paths):
        prefixes = locate(path)[1].values()
        files = [file for prefix in prefixes for end in (".bin", ".idx", MARKS) if os.path.isfile(file := prefix + end)]
        with (
            warnings.catch_warnings(record=True) as unknown,
            bar(os.path.basename(os.path.normpath(path)), sum(map(os.path.getsize, files))) as shown,
        ):
            warnings.simplefilter("always", DatasetWarning)
            checked = check_dataset(path, record and record.vocab_size, full=True, progress=shown.update)
        compared = "token ids compared" if tokenizer_of(path) is None else "all checksums fit"
        for name, indexed in checked.items():
            counts = f"{indexed.documents:,} documents, {indexed.tokens:,} tokens"
            print(f"{path}: {name}: {counts}, fingerprint {fingerprint(indexed.prefix)}, {compared}")
        for warning in unknown:
            print(f"warning: {warning.message}")

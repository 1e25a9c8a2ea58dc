# SPDX-License-Identifier: Apache-2.0
"""`zaya convert import|export|roundtrip`: published weights into a checkpoint, and a checkpoint into published weights.
Starts no ranks; needs no device.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from zaya_plugin.config.option_numbers import INT32, MOST_STEPS, whole_number
from zaya_plugin.errors import mistake

WHAT = """\
Moves weights between checkpoints and the layouts in which ZAYA1 models are published.

SOURCE is a folder, or a name on the Hugging Face Hub such as Zyphra/ZAYA1-base (NAME@REVISION for a revision). Its
layout is recognised by the tensors' names: native, legacy, smoe or primus. CKPT is a run directory, a directory of
iter_* folders, or one of these. Tensors are read and written in pieces: a model of any size needs little memory. What
was killed continues when the command is given again."""
EXAMPLES = """\
examples:
  zaya convert import Zyphra/ZAYA1-base --output weights/zaya1 --write-recipe my/model/zaya1.yaml
  zaya convert export runs/sft --output exports/sft --verify                  for transformers and vLLM
  zaya convert export runs/sft --output exports/sft_sglang --layout legacy    for SGLang
  zaya convert roundtrip Zyphra/ZAYA1-base --layout legacy                    compares every tensor; keeps nothing

Exit codes: 0, 1 the comparison failed, 2 a mistake on the command line or in the files."""
LAYOUTS = ("native", "legacy")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "zaya convert", description=WHAT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(dest="command", required=True)

    def add(name: str, what: str, given: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=what, description=what)
        one.add_argument("given", metavar=given)
        return one

    def exports(one: argparse.ArgumentParser) -> None:
        one.add_argument("--layout", choices=LAYOUTS, default="native", help="default: native")

    one = add("import", "write a checkpoint of step 0 from published weights", "SOURCE")
    one.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    one.add_argument("--vocab-size", type=whole_number(0, INT32), help="rows of the embedding; default: as in SOURCE")
    one.add_argument("--recipe", type=Path, help="a recipe.yaml whose model section has to fit")
    one.add_argument(
        "--write-recipe", type=Path, metavar="FILE", help="write the model section as a file of the group model"
    )
    one = add("export", "write safetensors files, config.json and all that belongs to them", "CKPT")
    one.add_argument("--output", type=Path, required=True, help="a folder that is new or empty")
    exports(one)
    one.add_argument("--step", type=whole_number(0, MOST_STEPS), help="this checkpoint; default: the newest")
    one.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="default: as the run computed, or as the imported files were"
    )
    one.add_argument("--tokenizer", help="folder of the tokenizer; none: without one; default: that of the checkpoint")
    one.add_argument(
        "--vocab-size", type=whole_number(0, INT32), help="rows of the embedding; default: as in the checkpoint"
    )
    one.add_argument(
        "--verify", action="store_true", help="compare every tensor, and logits where the memory allows it"
    )
    one = add("roundtrip", "import, export and compare in a temporary folder", "SOURCE")
    exports(one)
    one.add_argument(
        "--folder", type=Path, help="where the temporary folder is made; it takes twice the weights' bytes"
    )
    return made


def main(words: list[str]) -> int:
    options = parser().parse_args(words)
    if (rows := getattr(options, "vocab_size", None)) is not None and rows < 1:
        raise mistake("--vocab-size", rows, problem="is no number of rows", allowed="1 or more")
    try:
        return COMMANDS[options.command](options)
    except OSError as error:
        raise mistake(
            str(getattr(options, "output", None) or options.given),
            problem=f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}",
            fix="give the command again once this is repaired; it continues behind the last whole file",
        ) from error


class _Bar:
    """A progress bar of bytes that begins when the work's size is known."""

    def __init__(self, title: str):
        self.title, self.bar = title, None

    def begins(self, size: int) -> None:
        from tqdm import tqdm

        self.bar = tqdm(total=size, unit="B", unit_scale=True, desc=self.title, leave=False, file=sys.stderr)

    def __call__(self, count: int) -> None:
        self.bar.update(count)

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *_) -> None:
        if self.bar is not None:
            self.bar.close()


def import_(options: argparse.Namespace) -> int:
    from zaya_plugin.checkpoint.convert.description import Description
    from zaya_plugin.checkpoint.convert.importing import import_model, open_source, size_of

    recipe = None
    if options.recipe is not None:
        from zaya_plugin.config.compose import load_recipe

        recipe = Description.of_recipe(load_recipe(options.recipe), vocab_size=1)
    source = open_source(options.given, recipe)
    for note in source.notes:
        print(f"note: {note}")
    if recipe is not None and (different := recipe.differences(source.model)):
        raise mistake(
            "--recipe",
            options.recipe,
            problem=f"its model is another one (here and in {source.name}): {different}",
            fix=recipe.fix(source.model),
        )
    if options.vocab_size is not None:
        source = source.with_rows(options.vocab_size)
    if options.write_recipe is not None:
        write_recipe(options.write_recipe, source.model)
        print(
            f"{options.write_recipe}: the model section; its RoPE base is stage.rotary_base={source.model.rotary_base}"
        )
    with _Bar("import") as bar:
        folder = import_model(source, options.output, bar, bar.begins)
    print(f"{folder}: {source.layout} model of {size_of(source):,} parameters, {len(source.tensors)} tensors")
    return 0


def write_recipe(path: Path, model) -> None:
    """Write a file of the recipe group `model`, under the file's name."""
    import yaml

    keys = {key.removeprefix("model."): value for key, value in model.overrides().items() if key.startswith("model.")}
    begin = (
        f"# zaya train --config-dir {path.parent.parent} model={path.stem} stage.rotary_base={model.rotary_base} ...\n"
    )
    content = begin + yaml.safe_dump({"name": path.stem, **keys}, sort_keys=False)
    if path.parent.absolute().name != "model" or path.suffix != ".yaml":
        raise mistake(
            "--write-recipe", path, problem="is no file of the group model", allowed="DIRECTORY/model/NAME.yaml"
        )
    if path.exists() and (not path.is_file() or path.read_text() != content):
        raise mistake("--write-recipe", path, problem="exists with other content", allowed="a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def export(options: argparse.Namespace) -> int:
    from zaya_plugin.checkpoint.convert import exporting
    from zaya_plugin.data.tokenizer import tokenizer_digest

    trained = exporting.open_checkpoint(exporting.folder_of(Path(options.given), options.step))
    if (tokenizer := _tokenizer(options.tokenizer, trained)) is not None:
        trained.check_tokenizer(tokenizer, tokenizer_digest(str(tokenizer)))
    planned = exporting.plan(trained, options.layout, options.dtype, tokenizer, options.vocab_size)
    for change in planned.changes:
        print(f"note: {change}")
    with _Bar("export") as bar:
        folder = exporting.export_model(planned, options.output, bar, bar.begins)
    print(f"{folder}: {len(planned.tensors)} tensors in the {planned.layout} layout")
    return _verify(planned, folder) if options.verify else 0


def _verify(planned, folder: Path) -> int:
    from zaya_plugin.checkpoint.convert import model_card, verification

    try:
        with _Bar("verify") as bar:
            bar.begins(sum(tensor.bytes for tensor in planned.tensors))
            lines = verification.verify(planned, folder, bar)
    except ValueError as error:
        print(f"zaya: {error}", file=sys.stderr)
        return 1
    model_card.add_verified(folder, lines)
    print("\n".join(f"verified: {line}" for line in lines))
    return 0


def _tokenizer(given: str | None, trained) -> Path | None:
    """Return the folder of the tokenizer to copy; None for none."""
    if given == "none":
        return None
    named = given or trained.tokenizer
    if named is None or not (Path(named) / "tokenizer.json").is_file():
        raise mistake(
            "--tokenizer",
            given,
            problem=f"{named} has no tokenizer.json" if named else "the checkpoint names no tokenizer",
            allowed="a folder with tokenizer.json, or none",
            fix="--tokenizer FOLDER, or --tokenizer none",
        )
    return Path(named)


def roundtrip(options: argparse.Namespace) -> int:
    from zaya_plugin.checkpoint.convert import exporting, verification
    from zaya_plugin.checkpoint.convert.importing import import_model, open_source

    source = open_source(options.given)
    for note in source.notes:
        print(f"note: {note}")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        directory, output = Path(temporary, "checkpoint"), Path(temporary, "export")
        with _Bar("import") as bar:
            folder = import_model(source, directory, bar, bar.begins)
        planned = exporting.plan(exporting.open_checkpoint(folder), options.layout)
        with _Bar("export") as bar:
            exporting.export_model(planned, output, bar, bar.begins)
        if different := verification.differences(source, open_source(output)):
            print("\n".join(f"zaya: {line}" for line in different), file=sys.stderr)
            return 1
    print(
        f"{source.name}: {source.layout} -> checkpoint -> {options.layout}: {len(source.tensors)} tensors are equal bit by bit"
    )
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {"import": import_, "export": export, "roundtrip": roundtrip}

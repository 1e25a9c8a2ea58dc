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

from zaya_plugin.checkpoint import progress, reading
from zaya_plugin.checkpoint.convert.model_folder import check_new, resolve
from zaya_plugin.config.option_parser import OptionParser
from zaya_plugin.ground.errors import mistake, of_the_machine
from zaya_plugin.ground.option_numbers import INT32, MOST_STEPS, whole_number

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
    out = OptionParser(
        "zaya convert", description=WHAT, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = out.add_subparsers(dest="command", required=True)

    def add(name: str, what: str, metavar: str) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=what, description=what)
        one.add_argument("given", metavar=metavar)
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
    one.add_argument(
        "--no-verify",
        dest="compare",
        action="store_false",
        help="do not compare the checkpoint's files with their checksums, which reads all of them",
    )
    one = add("roundtrip", "import, export and compare in a temporary folder", "SOURCE")
    exports(one)
    one.add_argument(
        "--folder", type=Path, help="where the temporary folder is made; it takes twice the weights' bytes"
    )
    return out


def main(words: list[str], prepare_torch: Callable[[], None] = lambda: None) -> int:
    """Run `zaya convert`; raises ValueError for a user's mistake. prepare_torch: called before torch is imported."""
    options = parser().parse_args(words)
    if (rows := getattr(options, "vocab_size", None)) is not None and rows < 1:
        raise mistake("--vocab-size", rows, problem="is no number of rows", allowed="1 or more")
    try:
        return COMMANDS[options.command](options, prepare_torch)
    except OSError as error:
        if (text := of_the_machine(error, getattr(options, "output", None) or options.given, offline=True)) is None:
            raise
        raise ValueError(f"{text} The command continues behind the last whole file.") from error


def import_(options: argparse.Namespace, prepare_torch: Callable[[], None]) -> int:
    folder, recipe = resolve(options.given), None
    if options.recipe is not None:
        from zaya_plugin.config.compose import load_recipe

        if not options.recipe.is_file():
            allowed = "the recipe.yaml of a run with this model"
            raise mistake("--recipe", options.recipe, problem="there is no such file", allowed=allowed)
        recipe = load_recipe(options.recipe)
    prepare_torch()
    from zaya_plugin.checkpoint.convert.description import Description
    from zaya_plugin.checkpoint.convert.importing import import_model, open_source, size_of

    recipe = None if recipe is None else Description.of_recipe(recipe, vocab_size=1)
    source = open_source(folder, recipe, options.given)
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
    with progress.bar("import") as bar:
        folder = import_model(source, options.output, bar.update, bar.reset)
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


def export(options: argparse.Namespace, prepare_torch: Callable[[], None]) -> int:
    check_new(options.output)
    if options.tokenizer not in (None, "none"):
        _tokenizer_folder(options.tokenizer, options.tokenizer)
    checkpoint = reading.begin(Path(options.given), options.step, compare=options.compare)
    prepare_torch()
    from zaya_plugin.checkpoint.convert import exporting
    from zaya_plugin.data.tokenizer import tokenizer_digest

    trained = exporting.open_checkpoint(checkpoint)
    if (tokenizer := _tokenizer(options.tokenizer, trained)) is not None:
        trained.check_tokenizer(tokenizer, tokenizer_digest(str(tokenizer)))
    planned = exporting.plan(trained, options.layout, options.dtype, tokenizer, options.vocab_size)
    for change in planned.changes:
        print(f"note: {change}")
    with progress.bar("export") as bar:
        folder = exporting.export_model(planned, options.output, bar.update, bar.reset)
    print(f"{folder}: {len(planned.tensors)} tensors in the {planned.layout} layout")
    return _verify(planned, folder) if options.verify else 0


def _verify(planned, folder: Path) -> int:
    from zaya_plugin.checkpoint.convert import model_card, verification

    try:
        with progress.bar("verify") as bar:
            bar.reset(sum(tensor.bytes for tensor in planned.tensors))
            lines = verification.verify(planned, folder, bar.update)
    except ValueError as error:
        print(f"zaya: {error}", file=sys.stderr)
        return 1
    model_card.add_verified(folder, lines)
    print("\n".join(f"verified: {line}" for line in lines))
    return 0


def _tokenizer(option: str | None, trained) -> Path | None:
    """Return the folder of the tokenizer to copy; None for none."""
    return None if option == "none" else _tokenizer_folder(option, option or trained.tokenizer)


def _tokenizer_folder(option: str | None, folder: str | None) -> Path:
    if folder is None or not (Path(folder) / "tokenizer.json").is_file():
        raise mistake(
            "--tokenizer",
            option,
            problem=f"{folder} has no tokenizer.json" if folder else "the checkpoint names no tokenizer",
            allowed="a folder with tokenizer.json, or none",
            fix="--tokenizer FOLDER, or --tokenizer none",
        )
    return Path(folder)


def roundtrip(options: argparse.Namespace, prepare_torch: Callable[[], None]) -> int:
    published = resolve(options.given)
    if options.folder is not None and not options.folder.is_dir():
        raise mistake("--folder", options.folder, problem="is no folder", allowed="a folder that exists")
    prepare_torch()
    from zaya_plugin.checkpoint.convert import exporting, verification
    from zaya_plugin.checkpoint.convert.importing import import_model, open_source

    source = open_source(published, name=options.given)
    for note in source.notes:
        print(f"note: {note}")
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        directory, output = Path(temporary, "checkpoint"), Path(temporary, "export")
        with progress.bar("import") as bar:
            folder = import_model(source, directory, bar.update, bar.reset)
        imported = reading.begin(folder, compare=False)  # every tensor is compared below
        planned = exporting.plan(exporting.open_checkpoint(imported), options.layout)
        with progress.bar("export") as bar:
            exporting.export_model(planned, output, bar.update, bar.reset)
        if different := verification.differences(source, open_source(output)):
            print("\n".join(f"zaya: {line}" for line in different), file=sys.stderr)
            return 1
    print(
        f"{source.name}: {source.layout} -> checkpoint -> {options.layout}: {len(source.tensors)} tensors are equal bit by bit"
    )
    return 0


COMMANDS: dict[str, Callable[[argparse.Namespace, Callable[[], None]], int]] = {
    "import": import_,
    "export": export,
    "roundtrip": roundtrip,
}

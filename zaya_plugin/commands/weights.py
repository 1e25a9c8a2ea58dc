# SPDX-License-Identifier: Apache-2.0
"""`zaya checkpoint import|export|roundtrip`: published weights into a checkpoint, and a checkpoint into published
weights. Starts no ranks; needs no device.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from zaya_plugin.checkpoint import reading
from zaya_plugin.checkpoint.convert.model_folder import check_new, check_push, push, resolve
from zaya_plugin.commands.parser import STEP, command, option
from zaya_plugin.commands.process import prepare_torch
from zaya_plugin.ground.errors import mistake, of_the_machine
from zaya_plugin.ground.option_numbers import INT32, whole_number
from zaya_plugin.ground.progress import bar

LAYOUT = option(
    "--layout", choices=("native", "legacy", "smoe"), default="native", help="of the weights; default: native"
)


SOURCE = option(
    "model",
    metavar="SOURCE",
    help="a folder, or a name on the Hugging Face Hub such as Zyphra/ZAYA1-base (NAME@REVISION for a revision); its "
    "layout is recognised by the tensors' names: native, legacy, smoe or primus",
)
CKPT = option("model", metavar="CKPT", help="a run directory, a directory of iter_* folders, or one of these")


def continues(action: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Add to errors of the machine that the same command continues."""

    @functools.wraps(action)
    def run(options: argparse.Namespace) -> int:
        try:
            return action(options)
        except OSError as error:
            if (text := of_the_machine(error, options.output, offline=True)) is None:
                raise
            raise ValueError(f"{text} The command continues behind the last whole file.") from error

    return run


@command(
    "checkpoint import",
    SOURCE,
    option("--output", type=Path, required=True, metavar="DIR", help="directory of the checkpoint"),
    option("--vocab-size", type=whole_number(1, INT32), help="rows of the embedding; default: as in SOURCE"),
    option("--recipe", type=Path, metavar="FILE", help="a recipe.yaml whose model section has to fit"),
    option("--write-recipe", type=Path, metavar="FILE", help="write the model section as a file of the group model"),
    imports_large_packages=True,
)
@continues
def import_(options: argparse.Namespace) -> int:
    """Write a checkpoint of step 0 from published weights.

    Tensors are read and written in pieces: a model of any size needs little memory. The same command again continues an
    interrupted one.

    examples:
      zaya checkpoint import Zyphra/ZAYA1-base --output weights/zaya1 --write-recipe my/model/zaya1.yaml

    Exit codes: 0, 1 the comparison failed, 2 a mistake on the command line or in the files.
    """
    folder, recipe = resolve(options.model), None
    if options.recipe is not None:
        from zaya_plugin.config.compose import load_recipe

        if not options.recipe.is_file():
            raise mistake(
                "--recipe", options.recipe, problem="no such file", allowed="the recipe.yaml of a run with this model"
            )
        recipe = load_recipe(options.recipe)
    prepare_torch()
    from zaya_plugin.checkpoint.convert.description import Description
    from zaya_plugin.checkpoint.convert.importing import import_model, open_source, size_of

    recipe = None if recipe is None else Description.of_recipe(recipe, vocab_size=1)
    source = open_source(folder, recipe, options.model)
    _print_notes(source.notes)
    if recipe is not None and (different := recipe.differences(source.model)):
        raise mistake(
            "--recipe",
            options.recipe,
            problem=f"describes another model than {source.name}; the recipe's and its values: {different}",
            fix=recipe.fix(source.model),
        )
    if options.vocab_size is not None:
        source = source.with_rows(options.vocab_size)
    if options.write_recipe is not None:
        _write_recipe(options.write_recipe, source.model)
        print(
            f"{options.write_recipe}: the model section; its RoPE base is stage.rotary_base={source.model.rotary_base}"
        )
    with bar("import") as shown:
        folder = import_model(source, options.output, shown.update, shown.reset)
    print(f"{folder}: {source.layout} model of {size_of(source):,} parameters, {len(source.tensors)} tensors")
    return 0


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}")


def _write_recipe(path: Path, model) -> None:
    """Write a file of the recipe group `model`, under the file's name."""
    import yaml

    keys = {key.removeprefix("model."): value for key, value in model.overrides().items() if key.startswith("model.")}
    begin = (
        f"# zaya train --config-dir {path.parent.parent} model={path.stem} stage.rotary_base={model.rotary_base} ...\n"
    )
    content = begin + yaml.safe_dump({"name": path.stem, **keys}, sort_keys=False)
    if path.parent.absolute().name != "model" or path.suffix != ".yaml":
        raise mistake(
            "--write-recipe", path, problem="must be a file of the group model", allowed="DIRECTORY/model/NAME.yaml"
        )
    if path.exists() and (not path.is_file() or path.read_text() != content):
        raise mistake("--write-recipe", path, problem="exists with other content", allowed="a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


@command(
    "checkpoint export",
    CKPT,
    LAYOUT,
    option("--output", type=Path, required=True, metavar="DIR", help="a folder that is new or empty"),
    STEP,
    option("--dtype", choices=("bf16", "fp32"), help="default: as the run computed, or as the imported files were"),
    option(
        "--tokenizer", metavar="DIR", help="folder of the tokenizer; none: without one; default: that of the checkpoint"
    ),
    option("--vocab-size", type=whole_number(1, INT32), help="rows of the embedding; default: as in the checkpoint"),
    option(
        "--adapter",
        action="store_true",
        help="of a run with optim.lora: write the adapter for peft in place of the merged model",
    ),
    option("--base", metavar="SOURCE", help="where the adapter's base is now; default: where the run has read it"),
    option("--verify", action="store_true", help="compare every tensor, and logits where the memory allows it"),
    option(
        "--push",
        metavar="NAME",
        help="then upload the folder to ORGANISATION/NAME on the Hugging Face Hub, made private if it is new; the "
        "token comes from HF_TOKEN or the Hub's login",
    ),
    option(
        "--no-verify",
        dest="compare",
        action="store_false",
        help="do not compare the checkpoint's files with their checksums, which reads all of them",
    ),
    imports_large_packages=True,
)
@continues
def export(options: argparse.Namespace) -> int:
    """Write safetensors files, config.json and the other files that a published model has.

    Tensors are read and written in pieces: a model of any size needs little memory. The same command again continues an
    interrupted one.

    examples:
      zaya checkpoint export runs/sft --output exports/sft --verify                  for transformers and vLLM
      zaya checkpoint export runs/sft --output exports/sft_sglang --layout legacy    for SGLang
      zaya checkpoint export runs/sft --output exports/sft --verify --push my-team/zaya-sft     and upload it
      zaya checkpoint export runs/lora --output exports/adapter --adapter            for peft

    Exit codes: 0, 1 the comparison failed, 2 a mistake on the command line or in the files.
    """
    check_new(options.output)
    if options.push is not None:
        check_push(options.push)
    if options.tokenizer is not None:
        _tokenizer(options.tokenizer, None)
    checkpoint = reading.begin(Path(options.model), options.step, compare=options.compare)
    prepare_torch()
    from zaya_plugin.checkpoint.convert import exporting
    from zaya_plugin.data.tokenizer import tokenizer_digest

    trained = exporting.open_checkpoint(checkpoint, options.base)
    if (tokenizer := _tokenizer(options.tokenizer, trained.tokenizer)) is not None:
        trained.check_tokenizer(tokenizer, tokenizer_digest(str(tokenizer)))
    code = (_export_adapter if options.adapter else _export_model)(trained, options, tokenizer)
    if options.push is not None and code == 0:
        print(f"pushed: {push(options.output, options.push)}")
    return code


def _export_model(trained, options: argparse.Namespace, tokenizer: Path | None) -> int:
    from zaya_plugin.checkpoint.convert import exporting

    planned = exporting.plan(trained, options.layout, options.dtype, tokenizer, options.vocab_size)
    _print_notes(planned.changes)
    with bar("export") as shown:
        folder = exporting.export_model(planned, options.output, shown.update, shown.reset)
    print(f"{folder}: {len(planned.tensors)} tensors in the {planned.layout} layout")
    return _verify(planned, folder) if options.verify else 0


def _export_adapter(trained, options: argparse.Namespace, tokenizer: Path | None) -> int:
    from zaya_plugin.checkpoint.convert.peft_folder import export_adapter

    of_models = {"--layout": options.layout == "legacy", "--vocab-size": options.vocab_size, "--verify": options.verify}
    if unfit := next((name for name, value in of_models.items() if value), None):
        raise mistake(
            unfit,
            problem="is for a whole model, and --adapter writes an adapter of transformers' native layout",
            fix=f"leave out {unfit} or --adapter",
        )
    count = export_adapter(trained, options.output, options.dtype, tokenizer, options.base)
    print(f"{options.output}: {count} tensors of an adapter for peft")
    return 0


def _verify(planned, folder: Path) -> int:
    from zaya_plugin.checkpoint.convert import model_card, verification

    try:
        with bar("verify") as shown:
            shown.reset(sum(tensor.bytes for tensor in planned.tensors))
            lines = verification.verify(planned, folder, shown.update)
    except ValueError as error:
        print(f"zaya: {error}", file=sys.stderr)
        return 1
    model_card.add_verified(folder, lines)
    print("\n".join(f"verified: {line}" for line in lines))
    return 0


def _tokenizer(typed: str | None, own: str | None) -> Path | None:
    """Return the folder of the tokenizer to copy: --tokenizer, else the checkpoint's own; None for none."""
    if typed == "none":
        return None
    if (folder := typed or own) is None or not (Path(folder) / "tokenizer.json").is_file():
        raise mistake(
            "--tokenizer",
            typed,
            problem=f"{folder} has no tokenizer.json" if folder else "the checkpoint names no tokenizer",
            allowed="a folder with tokenizer.json, or none",
            fix="--tokenizer FOLDER, or --tokenizer none",
        )
    return Path(folder)


@command("checkpoint roundtrip", SOURCE, LAYOUT, imports_large_packages=True)
def roundtrip(options: argparse.Namespace) -> int:
    """Import, export and compare every tensor, in a temporary folder (TMPDIR) of twice the weights' bytes.

    Tensors are read and written in pieces: a model of any size needs little memory.

    examples:
      zaya checkpoint roundtrip Zyphra/ZAYA1-base --layout legacy

    Exit codes: 0, 1 the comparison failed, 2 a mistake on the command line or in the files.
    """
    published = resolve(options.model)
    prepare_torch()
    from zaya_plugin.checkpoint.convert import exporting, verification
    from zaya_plugin.checkpoint.convert.importing import import_model, open_source

    source = open_source(published, name=options.model)
    _print_notes(source.notes)
    with tempfile.TemporaryDirectory() as temporary:
        directory, output = Path(temporary, "checkpoint"), Path(temporary, "export")
        with bar("import") as shown:
            folder = import_model(source, directory, shown.update, shown.reset)
        imported = reading.begin(folder, compare=False)  # every tensor is compared below
        planned = exporting.plan(exporting.open_checkpoint(imported), options.layout)
        _print_notes(planned.changes)
        with bar("export") as shown:
            exporting.export_model(planned, output, shown.update, shown.reset)
        if different := verification.differences(source, open_source(output)):
            print("\n".join(f"zaya: {line}" for line in different), file=sys.stderr)
            return 1
    print(
        f"{source.name}: {source.layout} -> checkpoint -> {options.layout}: {len(source.tensors)} tensors are equal "
        "bit by bit"
    )
    return 0

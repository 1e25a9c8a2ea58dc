# SPDX-License-Identifier: Apache-2.0
"""`zaya checkpoint list|show|verify|prune|adopt|reshape`: the checkpoints of a run, from outside. Starts no ranks;
needs no device.
"""

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from zaya_plugin.checkpoint import manifest, on_disk, places
from zaya_plugin.checkpoint.reading import folder_of
from zaya_plugin.commands.parser import STEP, command, option
from zaya_plugin.config.run_directory import checkpoints_of, iterations
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.option_numbers import MOST_RANKS, MOST_STEPS, real_number, whole_number
from zaya_plugin.ground.progress import bar
from zaya_plugin.ground.whole_file import listing

FACT_CHARACTERS, NAMED_FILES = 100, 16  # at most, of the output of `show`
LEFT = {
    manifest.UNFINISHED: "a save that has not ended",
    manifest.REMOVED: "a removal that has not ended",
    manifest.FAILED: "put aside, because two starts from it had failed at the same step, or by a roll back",
    manifest.DAMAGED: "put aside at a start, because its content does not have its checksums",
    manifest.REPLACED: "put aside by a save of its step, because it was damaged or of another run",
}


RUN = option("run_dir", type=Path, metavar="RUN", help="a run directory, or a directory of iter_* folders")


@contextlib.contextmanager
def held_steps(options: argparse.Namespace, loads_next: bool = False) -> Iterator[tuple[Path, list[int]]]:
    """Yield the directory of checkpoints and the chosen steps, which no run removes until the end. loads_next: without
    --step also the checkpoint that the next start loads where the newest is damaged.
    """
    step, every = getattr(options, "step", None), getattr(options, "all", False)
    if step is not None and every:
        raise mistake("--all", problem=f"--step {step} was given too", allowed="one of the two")
    places.require_answer(options.run_dir, "RUN")
    places.require_answer(checkpoints_of(options.run_dir), "RUN")
    newest = folder_of(options.run_dir, step, "RUN")
    directory = newest.parent
    chosen = iterations(directory) if every else [on_disk.iteration_of(newest)]
    loaded = on_disk.latest(directory)[0] if loads_next and step is None else None
    if loaded not in (None, *chosen):
        chosen.insert(0, loaded)
    with contextlib.ExitStack() as held:
        for step in chosen:
            held.enter_context(manifest.hold(on_disk.folder(directory, step)) or contextlib.nullcontext())
        yield directory, chosen


@command("checkpoint list", RUN)
def list_(options: argparse.Namespace) -> int:
    """Print each checkpoint, and whether it is complete, by the names and sizes of its files.

    A checkpoint of this version has a manifest with the size and the checksum of every file. Checkpoints of earlier
    versions and of other programs have none, and are compared with their own index.

    examples:
      zaya checkpoint list runs/zaya1

    Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line.
    """
    with held_steps(options) as (directory, _):
        broken = False
        for step in iterations(directory):
            folder = on_disk.folder(directory, step)
            damage = on_disk.problems(directory, step)
            if not folder.is_dir():
                continue  # its run has removed it
            state = (
                "damaged: " + "; ".join(damage)
                if damage
                else "complete" + ", no manifest" * (not on_disk.has_manifest(folder))
            )
            when = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.stat().st_mtime))
            print(f"{step:>9}  {_size(_bytes(_files(folder))):>9}  {when}  {state}")
            broken |= bool(damage)
        for end, reason in LEFT.items():
            for left in sorted(directory.glob(f"iter_*{end}")):
                print(f"{left.name}: {reason}")
        return int(broken)


@command(
    "checkpoint show",
    RUN,
    STEP,
    option("--json", action="store_true", help="print all of it: every file's checksum, the recipe's values"),
)
def show(options: argparse.Namespace) -> int:
    """Print the contents of a checkpoint's manifest: the run that wrote it, its data and files. Names and sizes are
    compared.

    examples:
      zaya checkpoint show runs/zaya1 --step 12000

    Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line.
    """
    with held_steps(options) as (directory, steps):
        folder = on_disk.folder(directory, steps[0])
        damage = on_disk.problems(directory, steps[0])
        try:
            content = manifest.read(folder)
        except ValueError:  # without a manifest, or it is damaged
            content = {"files": _files(folder)}
        if options.json:
            print(json.dumps({"folder": str(folder), "problems": damage, **content}, indent=1))
            return int(bool(damage))
        files = content.pop("files")
        print(folder)
        for name, text in _rows(content):
            print(f"  {name:19} {text}")
        largest = max((file["bytes"] for file in files.values()), default=0)
        print(f"  {'files':19} {len(files)}, {_size(_bytes(files))}, the largest of {_size(largest)}")
        for name, file in files.items() if len(files) <= NAMED_FILES else ():
            print(f"  {_size(file['bytes']):>16} {file.get('xxh3_128', 'no checksum'):32}  {name}")
        print("complete" if not damage else "damaged: " + "; ".join(damage))
        return int(bool(damage))


def _rows(content: dict, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the lines of a manifest's facts, but for the recipe's values."""
    for key, value in content.items():
        if key in (manifest.RECIPE, "xxh3_128") or value is None:
            continue
        if isinstance(value, dict) and any(isinstance(one, dict) for one in value.values()):
            yield from _rows(value, f"{prefix}{key}.")
        else:
            text = ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, dict) else str(value)
            yield prefix + key, text if len(text) <= FACT_CHARACTERS else text[: FACT_CHARACTERS - 3] + "..."


@command(
    "checkpoint verify",
    RUN,
    STEP,
    option("--all", action="store_true", help="all checkpoints"),
    option("--limit", type=real_number(1e-6, 1e6), metavar="GB/S", help="read no faster than this"),
)
def verify(options: argparse.Namespace) -> int:
    """Read all files of a checkpoint that has a manifest and compare them; they are then in the page cache. Other
    checkpoints are compared with their own index.

    examples:
      zaya checkpoint verify runs/zaya1 --all
      zaya checkpoint verify runs/zaya1 --limit 2             before a restart, on each node: fills its page cache

    Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line.
    """
    with held_steps(options, loads_next=True) as (directory, steps):
        broken = False
        for step in steps:
            folder = on_disk.folder(directory, step)
            if not folder.is_dir():
                print(f"{folder.name}: was removed by its run")
                continue
            begin = time.monotonic()
            damage = _damage(directory, step, options.limit)
            seconds = max(time.monotonic() - begin, 1e-3)
            intact = "complete by its own index; it has no manifest, so nothing was read. Fix: zaya checkpoint adopt"
            if on_disk.has_manifest(folder):
                size = _bytes(_files(folder))
                intact = f"intact, read {_size(size)} in {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s"
            print(f"{folder.name}: {intact}" if not damage else f"{folder.name}: damaged\n  " + "\n  ".join(damage))
            broken |= bool(damage)
        return int(broken)


@command(
    "checkpoint prune",
    RUN,
    option("--keep-last", type=whole_number(1, MOST_STEPS), default=3, help="keep this many of the newest; default: 3"),
    option("--keep-every", type=whole_number(1, MOST_STEPS), help="also keep those at multiples of this many steps"),
    option("--dry-run", action="store_true", help="print the folders that would be removed"),
)
def prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints that are complete and have a manifest.

    examples:
      zaya checkpoint prune runs/zaya1 --keep-last 3 --keep-every 10000 --dry-run

    Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line.
    """
    with held_steps(options) as (directory, _):
        for step in on_disk.removable(directory, options.keep_last, options.keep_every):
            folder = on_disk.folder(directory, step)
            if options.dry_run:
                print(f"would remove {folder}")
            elif on_disk.remove(directory, step):
                print(f"removed {folder}", flush=True)
            else:
                print(f"{folder} stays: another program is reading it", flush=True)
        return 0


@command("checkpoint adopt", RUN, STEP)
def adopt(options: argparse.Namespace) -> int:
    """Trust a checkpoint of an earlier version or of another program as it is, and write its manifest.

    examples:
      zaya checkpoint adopt runs/old --step 500

    Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line.
    """
    with held_steps(options) as (directory, steps):
        folder = on_disk.folder(directory, steps[0])
        if damage := on_disk.problems(directory, steps[0]):
            print(f"{folder}: damaged\n  " + "\n  ".join(damage))
            return 1
        if on_disk.has_manifest(folder):
            print(f"{folder} has a manifest")
            return 0
        files = {}
        with bar(folder.name, _bytes(_files(folder))) as shown:
            for path in filter(Path.is_file, folder.iterdir()):
                files[path.name] = manifest.describe(path)
                shown.update(files[path.name]["bytes"])
        manifest.write(folder, steps[0], files, adopted=True)
        print(f"{folder}: manifest written, {len(files)} files")
        return 0


@command(
    "checkpoint reshape",
    RUN,
    STEP,
    option("--output", type=Path, required=True, metavar="DIR", help="the run directory of the new checkpoint"),
    option(
        "--files",
        type=whole_number(1, MOST_RANKS),
        required=True,
        help="number of files; usually one for each rank that will load them",
    ),
)
def reshape(options: argparse.Namespace) -> int:
    """Write a checkpoint in another number of files.

    examples:
      zaya checkpoint reshape runs/old --output runs/new --files 64       for 64 ranks: runs/new/checkpoints/iter_*

    The same command again continues an interrupted one.

    Exit codes: 0, 1 a checkpoint is damaged, 2 a mistake on the command line.
    """
    with held_steps(options) as (directory, steps):
        from zaya_plugin.checkpoint.reshape import reshape as reshaped

        source = on_disk.folder(directory, steps[0])
        final = on_disk.folder(checkpoints_of(options.output), steps[0])
        if damage := _damage(directory, steps[0]):
            print(f"{source}: damaged\n  " + "\n  ".join(damage))
            return 1
        if not on_disk.has_manifest(source):
            print(f"{source} has no manifest: complete by its own index, its content is not checked")
        total = sum(path.stat().st_size for path in source.glob("*.distcp"))
        with bar(final.name, total) as shown:
            kept, files = reshaped(source, final, options.files, shown.update)
        before = f", {kept} of them written before" if kept else ""
        print(f"{final}: {files} files{before}; to train on: run_dir={options.output} resume=must")
        return 0


def _damage(directory: Path, step: int, limit: float | None = None) -> list[str]:
    """Return the damage of a checkpoint; reads all files if it has a manifest. limit: GB a second."""
    folder, texts = on_disk.folder(directory, step), on_disk.problems(directory, step)
    if texts or not on_disk.has_manifest(folder):
        return texts
    files = manifest.read(folder)["files"]
    pace = places.Pace(None if limit is None else limit * 1e9)
    with bar(folder.name, _bytes(files)) as shown:
        return manifest.damaged(folder, list(files), lambda count: (shown.update(count), pace(count)), files)


def _bytes(files: dict[str, dict]) -> int:
    return sum(file["bytes"] for file in files.values())


def _files(folder: Path) -> dict[str, dict]:
    """Return the bytes of each file, as far as they can be read."""
    try:
        return {name: {"bytes": size} for name, size in sorted(listing(folder).items()) if size is not None}
    except OSError:  # `problems` names it
        return {}


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"

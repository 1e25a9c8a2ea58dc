# SPDX-License-Identifier: Apache-2.0
"""Build a dataset next to its final name, under a lock, so that the final name only ever shows a whole dataset.

<output>            the dataset; appears by one rename
<output>.partial/   plan.json, tokenizer/, parts/ and final/ of a run that is under way or was interrupted
<output>.replaced/  the dataset that --overwrite replaces, for the moment between two renames
<output>.lock       held while a process works on any of them

A plan holds the arguments that decide the content, by option name. A run of `zaya data prepare` continues the
unfinished one of the same plan; `pack` and `bundle` only copy, and begin from the start. A finished dataset of the same
plan is taken as it is.
"""

import json
import os
import shutil
from collections.abc import Callable

from zaya_plugin.config.run_directory import check_creatable
from zaya_plugin.data.prepared import MANIFEST, Manifest, load_manifest
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.lock import locked
from zaya_plugin.ground.whole_file import sync, write_whole

INPUT_FILES = "input files"
INPUT_TIMES = "modification times of the input files"
# Entries of a plan that are fingerprints.
FINGERPRINTS = {INPUT_FILES: "names or sizes have changed", INPUT_TIMES: "have changed"}
OVERWRITE = "give --overwrite to replace it, or choose another --output"


class Workspace:
    """The files of one output.

    Args:
        output: directory of the dataset.
        overwrite: whether a dataset or an unfinished run of another plan may be replaced.
    """

    def __init__(self, output: str, overwrite: bool = False):
        self.output, self.overwrite = os.path.abspath(output), overwrite
        self.partial = self.output + ".partial"
        self.replaced = self.output + ".replaced"
        self.plan_file = os.path.join(self.partial, "plan.json")
        self.tokenizer = os.path.join(self.partial, "tokenizer")
        self.parts = os.path.join(self.partial, "parts")
        self.final = os.path.join(self.partial, "final")

    def dataset(self, plan: dict, build: Callable[[], None]) -> tuple[Manifest, bool]:
        """Return the dataset of a plan, and whether it was complete; `build` fills `final` if it was not.

        Raises:
            ValueError: see zaya_plugin.ground.lock.locked and `_complete`.
        """
        manifest = self._complete(plan)
        if manifest is not None and not os.path.exists(self.partial):
            return manifest, True
        check_creatable(os.path.dirname(self.output), "--output")
        with locked(self.output, "preparing"):
            if dataset := self._complete(plan):  # another process may have made it before this one got the lock
                self.discard()  # left by a run that was killed after the dataset got its name
                return dataset, True
            build()
            self.publish()
        return load_manifest(self.output), False

    def _complete(self, plan: dict) -> Manifest | None:
        """Return the manifest of the output if this plan made it; None if it is to be made.

        Raises:
            ValueError: the output is something else, and may not be replaced.
        """
        if not os.path.exists(self.output) or (os.path.isdir(self.output) and not os.listdir(self.output)):
            return None
        try:
            manifest = load_manifest(self.output)
        except ValueError:
            damaged = os.path.isfile(os.path.join(self.output, MANIFEST))
            if self.overwrite and damaged:
                return None
            why = "its manifest.json is damaged or of another version" if damaged else "it has no manifest.json"
            raise mistake(
                "--output",
                self.output,
                problem=f"exists and is not a dataset that this command may replace: {why}",
                allowed="a free name, an empty directory, or a dataset of `zaya data`",
                fix=OVERWRITE if damaged else "choose another --output",
            ) from None
        if self.overwrite:
            return None
        if different := _differences(manifest.arguments, plan):
            raise mistake(
                "--output",
                self.output,
                problem=f"holds a dataset made with other arguments: {different}",
                fix=OVERWRITE,
            )
        return manifest

    def begin(self, plan: dict, defaults: dict | None = None) -> dict:
        """Start a run, or continue the unfinished one of the same plan, with an empty `final`; return its plan with the
        defaults it began with.

        Args:
            defaults: entries that are stored with a new plan and not compared with an earlier one.

        Raises:
            ValueError: `<output>.partial` holds an unfinished run of another plan, or was not made by this project.
        """
        begun = self._plan()
        different = "" if begun is None else _differences(begun, plan)
        if begun is None or different:
            self._refuse_other_work(different)
            self.discard()
            os.makedirs(self.partial)
            begun = {**(defaults or {}), **plan}
            write_whole(self.plan_file, json.dumps(begun, indent=2).encode())
        shutil.rmtree(self.final, ignore_errors=True)
        os.makedirs(self.final)
        return begun

    def _refuse_other_work(self, different: str) -> None:
        """Raise ValueError if `<output>.partial` may not be removed. different: entries that differ from its plan."""
        if different and not self.overwrite and self.has_work():
            raise mistake(
                "--output",
                self.output,
                problem=f"{self.partial} holds an unfinished run with other arguments: {different}",
                fix="give --overwrite to drop it, or choose another --output",
            )
        others = os.path.isdir(self.partial) and not os.path.isfile(self.plan_file) and os.listdir(self.partial)
        if others and not all(name.startswith("plan.json.") for name in others):
            raise mistake(
                "--output",
                self.output,
                problem=f"{self.partial} is in the way: it was not made by `zaya data`",
                fix="move it, or choose another --output",
            )

    def _plan(self) -> dict | None:
        try:
            with open(self.plan_file, encoding="utf-8") as stream:
                return json.load(stream)
        except (FileNotFoundError, ValueError):
            return None

    def discard(self) -> None:
        """Remove an unfinished run; its plan last, because a directory without plan is never removed."""
        for directory in (self.final, self.parts, self.tokenizer, self.tokenizer + ".tmp"):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(self.partial, ignore_errors=True)

    def has_work(self) -> bool:
        """Return whether dropping an unfinished run would lose finished work."""
        parts = os.path.isdir(self.parts) and os.listdir(self.parts)
        return bool(os.path.isdir(self.tokenizer) or parts)

    def drop_work(self) -> None:
        """Remove finished work, so that a command with other arguments needs no --overwrite."""
        shutil.rmtree(self.parts, ignore_errors=True)
        shutil.rmtree(self.tokenizer, ignore_errors=True)

    def publish(self) -> None:
        """Give the whole dataset in `final` its name, in place of an older one, and remove the other files."""
        for folder, _, files in os.walk(self.final):
            for name in files:
                sync(os.path.join(folder, name))
            sync(folder)
        if os.path.isdir(self.output) and not os.listdir(self.output):
            os.rmdir(self.output)
        elif os.path.exists(self.output):
            self._remove_replaced()
            os.rename(self.output, self.replaced)
        os.rename(self.final, self.output)
        sync(os.path.dirname(self.output))
        self.discard()
        self._remove_replaced()

    def _remove_replaced(self) -> None:
        if os.path.isfile(os.path.join(self.replaced, MANIFEST)):
            shutil.rmtree(self.replaced)


def _differences(then: dict, now: dict) -> str:
    """Return the entries that differ, in words; entries that `now` does not have are not compared."""
    words = [
        f"{key}: {FINGERPRINTS.get(key) or f'it was made with {then.get(key)!r}, now {now[key]!r}'}"
        for key in now
        if then.get(key) != now[key]
    ]
    return "; ".join(words)

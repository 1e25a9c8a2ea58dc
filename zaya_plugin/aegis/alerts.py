# SPDX-License-Identifier: Apache-2.0
"""Alerts: the user's hook command, and W&B where the run is online. Each is a program with a deadline that this one
starts and never waits for, so that no alert can delay the decider.

    python -m zaya_plugin.aegis.alerts      sends one alert to W&B; JSON on stdin
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import print_line, printable
from zaya_plugin.ground.parent_death import die_with_parent
from zaya_plugin.ground.secrets import without_secrets

HOOK_SECONDS, WANDB_SECONDS = 10.0, 60.0
AT_ONCE, WAITING = 4, 64  # programs, and alerts that wait for one to end
SHOWN_BYTES = 2000  # of the error messages of a program
# The hook gets these variables alone: a token for its own use belongs into a file of its own.
FOR_HOOK = re.compile(r"(PATH|HOME|USER|LOGNAME|LANG|LC_\w+|TZ|TMPDIR|SLURM_JOB_ID|SLURM_CLUSTER_NAME)$")
FOR_WANDB = re.compile(
    rf"{FOR_HOOK.pattern[:-2]}|WANDB_\w+|NETRC|PYTHONPATH|VIRTUAL_ENV|SSL_CERT_\w+|REQUESTS_CA_BUNDLE"
    r"|(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy)$"
)
ONLINE = re.compile(r"run-\d{8}_\d{6}-(\S+)")
OWN = "-aegis"  # end of the id of the supervisor's W&B run; the training's own run belongs to its rank


@dataclass
class _Program:
    """A program that delivers one alert over one channel."""

    channel: str
    process: subprocess.Popen
    deadline: float
    errors: bytes = b""

    def poll(self, now: float) -> str | None:
        """Return "ok" or what went wrong, None while it runs. It is killed at its deadline."""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self.process.stderr.fileno(), 65536):
                self.errors = (self.errors + read)[-4 * SHOWN_BYTES :]
        code = self.process.poll()
        if code is None and now < self.deadline:
            return None
        late = code is None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)  # what it has started, too
        self.process.stderr.close()
        if late:
            return "not done in time; it was killed"
        lines = self.errors.decode(errors="replace").strip().splitlines() or [""]
        return "ok" if code == 0 else f"exit code {code} {printable(lines[-1])}".strip()


@dataclass
class _Alert:
    text: str
    body: dict[str, Any]
    left: list[str]
    running: list[_Program] = field(default_factory=list)
    delivered: dict[str, str] = field(default_factory=dict)


class Alerts:
    """Delivers alerts. hook: the words of the user's command, () for none. run_dir: of the training run."""

    def __init__(
        self,
        hook: Sequence[str] = (),
        run_dir: Path | None = None,
        hook_seconds: float = HOOK_SECONDS,
        wandb_seconds: float = WANDB_SECONDS,
    ):
        self.hook, self.run_dir = list(hook), run_dir
        self.seconds = {"hook": hook_seconds, "wandb": wandb_seconds}
        self.alerts: deque[_Alert] = deque()
        self._reported: set[str] = set()

    def send(self, text: str, level: str = "warn", **facts: Any) -> None:
        """Begin to deliver an alert. level: info, warn or error. facts: further plain data; secrets are removed from all
        of it.
        """
        if len(self.alerts) >= WAITING:
            return self._report("alert", f"more than {WAITING} wait; further ones are left out")
        body = {"text": text, "level": level, "time": time.time(), "host": socket.gethostname(), **facts}
        channels = ["hook"] * bool(self.hook) + ["wandb"] * (online_run(self.run_dir) is not None)
        body = _plain(body)
        self.alerts.append(_Alert(body["text"], body, channels))
        self._start()
        return None

    def poll(self) -> list[tuple[str, dict[str, str]]]:
        """Return the alerts that are done since the last call, each with the answer of every channel."""
        now, done = time.monotonic(), []
        for alert in self.alerts:
            for program in list(alert.running):
                if (answer := program.poll(now)) is not None:
                    alert.running.remove(program)
                    self._answer(alert, program.channel, answer)
        while self.alerts and not self.alerts[0].left and not self.alerts[0].running:
            alert = self.alerts.popleft()
            done.append((alert.text, alert.delivered))
        self._start()
        return done

    def close(self, seconds: float = 2.0) -> list[tuple[str, dict[str, str]]]:
        """Wait for alerts under way, end what is late, and return the alerts that are done."""
        deadline, done = time.monotonic() + seconds, self.poll()
        while self.alerts and time.monotonic() < deadline:
            time.sleep(0.02)
            done += self.poll()
        for alert in self.alerts:
            alert.left.clear()
            for program in alert.running:
                program.deadline = 0.0
        return done + self.poll()

    def _start(self) -> None:
        free = AT_ONCE - sum(len(alert.running) for alert in self.alerts)
        for alert in self.alerts:
            while alert.left and free > 0:
                channel = alert.left.pop(0)
                try:
                    alert.running.append(self._program(channel, alert.body))
                    free -= 1
                except (OSError, ValueError) as error:
                    self._answer(alert, channel, f"cannot be started ({error})")

    def _program(self, channel: str, body: dict[str, Any]) -> _Program:
        command, kept = self.hook, FOR_HOOK
        if channel == "wandb":
            command, kept = [sys.executable, "-m", "zaya_plugin.aegis.alerts"], FOR_WANDB
            run = online_run(self.run_dir)
            if run is None:
                raise ValueError("the run is not online any more")
            body = {"run": run, **body}
        with tempfile.TemporaryFile() as file:  # no pipe, which a program that does not read could fill
            file.write(json.dumps(body).encode() + b"\n")
            file.seek(0)
            process = subprocess.Popen(
                command,
                stdin=file,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={name: value for name, value in os.environ.items() if kept.match(name)},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        os.set_blocking(process.stderr.fileno(), False)
        return _Program(channel, process, time.monotonic() + self.seconds[channel])

    def _answer(self, alert: _Alert, channel: str, answer: str) -> None:
        alert.delivered[channel] = answer
        if answer != "ok":
            self._report(channel, answer)

    def _report(self, channel: str, problem: str) -> None:
        if channel not in self._reported:
            self._reported.add(channel)
            name = {"hook": "--hook", "wandb": "W&B"}.get(channel, channel)
            print_line(f"an alert was not delivered by {name}: {problem}; printed once, the journal has every alert")


def _plain(value: Any) -> Any:
    """Return plain data without control characters, long texts and secrets."""
    if isinstance(value, str):
        return printable(without_secrets(value))
    if isinstance(value, Mapping):
        return {printable(str(name)): _plain(item) for name, item in list(value.items())[:50]}
    if isinstance(value, (list, tuple, set)):
        return [_plain(item) for item in list(value)[:50]]
    return value if isinstance(value, (bool, int, float, type(None))) else printable(str(value))


def online_run(run_dir: Path | None) -> dict[str, Any] | None:
    """Return project, entity, group, name and id of the newest online W&B run of a run directory; None: there is none.

    The runs of a curriculum are in the directories of its stages.
    """
    if run_dir is None:
        return None
    try:
        folders = [*run_dir.glob("wandb/run-*"), *run_dir.glob("*/wandb/run-*")]
        newest = max(folders, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None or (name := ONLINE.fullmatch(newest.name)) is None:
            return None
        logger = _logger(newest.parents[1] / "recipe.yaml")
    except OSError:
        return None
    return {
        "project": logger.get("wandb_project") or "zaya",
        "entity": logger.get("wandb_entity"),
        "group": logger.get("wandb_group"),
        "name": f"{logger.get('wandb_name') or newest.parents[1].name}{OWN}",
        "id": f"{name[1]}{OWN}",
    }


def _logger(recipe: Path) -> dict[str, Any]:
    import yaml

    try:
        logger = yaml.safe_load(recipe.read_text()).get("logger")
    except (OSError, AttributeError, yaml.YAMLError):
        return {}
    return logger if isinstance(logger, dict) else {}


def main() -> int:
    """Send the alert on stdin to W&B, from a run of the supervisor's own."""
    body = json.load(sys.stdin)
    import wandb

    with tempfile.TemporaryDirectory(prefix="zaya-aegis-wandb-", ignore_cleanup_errors=True) as folder:
        settings = wandb.Settings(silent=True, console="off", init_timeout=30)
        run = wandb.init(mode="online", dir=folder, resume="allow", job_type="aegis", settings=settings, **body["run"])
        title = f"zaya aegis: {body.get('cause') or body['level']}"
        run.alert(title=title[:63], text=body["text"], level=body["level"].upper(), wait_duration=0)
        run.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Bytes that a run does not choose: rank logs, the kernel's, files of ranks, messages of an agent, and a damaged journal.
None of them may end an agent, the decider or a command.
"""

import json
import random
import time
from pathlib import Path

import pytest

from tests.aegis.journals import ONE_CRASH, TWO_STAGES
from tests.aegis.lone_decider import Wire, peer_of
from zaya_plugin.aegis import link
from zaya_plugin.aegis.agent import EVIDENCE_BYTES, Agent
from zaya_plugin.aegis.attempt_phases import Phase
from zaya_plugin.aegis.collectors.kernel_log import KernelLog
from zaya_plugin.aegis.collectors.rank_files import FlightRecorder, Guards, read_beats
from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.rules import Reader, Rules
from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.protocol import (
    Beat,
    Checkpoint,
    Ended,
    EndSignal,
    EvidenceBatch,
    FreePort,
    Join,
    RankExit,
    message_of,
    row_of,
    to_json,
)
from zaya_plugin.aegis.run_record import Record
from zaya_plugin.aegis.settings import Settings

DEEP = "[" * 200_000
RULES = Rules.load()
# What a line may hold apart from words: digits of other scripts, numbers that no float or int takes, escapes,
# halves of pairs.
PIECES = (
    "\x00",
    "\x1b[2J",
    "é",
    "\U0001f600",
    "9" * 400,
    "٣",
    "²",
    "\u2028",
    '"',
    "\\",
    "%s",
    "{",
    "Traceback (most",
    DEEP[:999],
)


def broken(text, rnd):
    """`text` with some damage."""
    for _ in range(rnd.randrange(1, 4)):
        at = rnd.randrange(len(text) + 1)
        kind = rnd.randrange(4)
        if kind == 0:
            text = text[:at] + rnd.choice(PIECES) + text[at:]
        elif kind == 1:
            text = text[:at] + text[at + rnd.randrange(1, 8) :]
        elif kind == 2:
            text = text[:at]
        else:
            text = text[:at] + text[max(0, at - 20) : at] * rnd.randrange(2, 30) + text[at:]
    return text


def test_damaged_lines_of_every_rule_are_read(tmp_path):
    rnd = random.Random(5)
    for source in ("rank", "kernel"):
        reader, now = Reader(RULES, source, "n1", 0), 1e9
        for rule in RULES:
            for sample in (*rule.samples, *rule.near):
                now += 100.0
                for each in reader.read(broken(sample, rnd).encode("utf-8", "surrogatepass"), now):
                    assert Evidence.from_json(json.loads(json.dumps(each.to_json()))) == each


@pytest.mark.parametrize("code", ["1٣", "9" * 30])
def test_an_exit_code_in_digits_of_another_script_or_of_any_length_ends_no_agent(code):
    (found,) = Reader(RULES, "rank", "n1", 0).read(f"srun: error: n2: task 3: Exited with exit code {code}", 1e9)
    assert "exit_code" not in found.values and found.rank in (0, 3)


def test_a_kernel_line_with_an_impossible_time_hides_no_other_one(tmp_path):
    (tmp_path / "kernel").write_text("")
    log, now = KernelLog("n1", tmp_path / "kernel"), time.time()
    stamps = (
        f"1,2,{'9' * 400},-;one\n",
        f"[{'9' * 400}.{'9' * 400}] two\n",
        "[ ٣.٣] three\n",
        "\x00\xff" * 3000 + "\n",
    )
    (tmp_path / "kernel").write_text("".join(stamps) + "[ 1.0] amdgpu: the last one\n")
    found = log.poll(now)
    assert [each.text for each in found][:3] == ["one", "two", "three"] and found[-1].text == "amdgpu: the last one"
    assert all(each.time <= now + 1 for each in found)


@pytest.mark.parametrize(
    "text", [DEEP, '{"time": 1e999, "rank": 1e999, "kind": [], "text": {}, "request": "1"}', "[1]", "\x00"]
)
def test_a_file_of_one_rank_hides_no_other_rank(tmp_path, text):
    for name, good in (
        ("guard", {"time": 5.0, "rank": 1, "kind": "loss_spike", "text": "9"}),
        ("flight", {"request": "1", "rank": 1, "entries": []}),
    ):
        (tmp_path / f"rank0.{name}.json").write_text(text)
        (tmp_path / f"rank1.{name}.json").write_text(json.dumps(good))
    (tmp_path / "rank0.json").write_text(text)
    (tmp_path / "rank1.json").write_text(
        '{"phase": "train", "step": 3, "step_seconds": "fast", "loss": "nan", "stage": []}'
    )
    assert [each.rank for each in Guards("n1", tmp_path).poll(1.0)] == [1]
    assert [each.rank for each in FlightRecorder("n1", tmp_path).poll(1.0)] == [1]
    assert read_beats(tmp_path) == {1: {"phase": "train", "step": 3, "loss": "nan"}}


def test_evidence_of_any_length_fits_into_messages(tmp_path):
    settings = Settings(("sh",), "rank", "n1", 1, 0, (1,), 1, tmp_path, "127.0.0.1", 1, kernel_log=tmp_path / "kernel")
    agent = Agent(settings, b"s" * 32, tmp_path)
    agent.collectors.close()
    sent = []

    class Client(Wire):
        def send(self, body):
            assert len(json.dumps(body)) < link.LINE_BYTES - 80
            sent.extend(body["rows"])

    agent.link = Client()
    for number in range(300):
        agent.report(Evidence(1.0, "n1", "rank", "\U0001f600" * 500, number, "traceback", {"line": "\x01" * 500}))
    agent.report(Evidence(1.0, "n1", "rank", "large", 300, "traceback", {"line": "x" * EVIDENCE_BYTES}))
    agent._send_evidence()
    assert [row["rank"] for row in sent] == [*range(301)] and "values" in sent[0] and "values" not in sent[300]


STRANGE = (None, True, -1, 10**30, 1e308, "x", "", [], [[]], {}, {"a": 1}, ["n2"], "n2")
MESSAGES = (
    *map(
        to_json,
        (
            Join(1, "n2", "a", 1, [], {}),
            Beat(1, 1.0, {"1": {"phase": "train", "step": 3, "step_seconds": 0.1}}),
            RankExit(1, 1, 0, 1.0),
            EvidenceBatch(1, [{"time": 1.0, "node": "n2", "source": "rank", "text": "x"}]),
            Ended(1, []),
            EndSignal(1, 15, 1),
            FreePort(2, 1),
        ),
    ),
    *({"kind": kind, "generation": 1} for kind in ("Started", "Dumped", "SurvivorsEnded", "", "_", "RankExit", "Stop")),
)


def test_no_message_of_an_agent_ends_the_decider(decider):
    """Of an agent that holds the secret: broken, or of another version. It is refused, and the others are heard."""
    rnd = random.Random(7)
    refused = (link.LinkError, LookupError, TypeError, ValueError, AttributeError, OverflowError)
    for _ in range(1500):
        message = json.loads(json.dumps(rnd.choice(MESSAGES)))
        where = message
        while isinstance(where, dict) and where:
            name = rnd.choice([name for name in where if name != "kind"] or [None])
            if name is None:
                break
            if not isinstance(where[name], (dict, list)) or not where[name] or rnd.random() < 0.5:
                where[name] = rnd.choice(STRANGE)
                break
            where = where[name] if isinstance(where[name], dict) else where[name][0]
        try:
            decider.handle(peer_of(decider, "n2").link, message_of(message))
        except refused:
            pass
        if decider.clock.phase is Phase.RUN:
            decider.watch()
        if decider.clock.phase is not Phase.RUN:  # a sign that was right: look on
            decider.clock.since -= 100.0
            if decider.clock.phase is Phase.SETTLE:
                decider.settle()
            decider.clock.enter(Phase.RUN)
            decider.cluster.running, decider.code, decider.cluster.asked = True, None, False
    decider.on_beat(peer_of(decider, "n1"), Beat(decider.cluster.generation, 0.0, {}))
    assert list(read(decider.settings.journal))


def test_a_rank_beyond_the_nodes_of_the_attempt_has_no_node():
    cluster = Cluster(nodes=("n1", "n2"))
    assert [cluster.node_of(rank, 2) for rank in (0, 3, 4, 10**9)] == ["n1", "n2", "", ""]


def test_a_journal_that_is_damaged_anywhere_is_replayed(tmp_path, monkeypatch):
    """Lines that are cut, joined, of the wrong kind, or lost: the run goes on from what can be read."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    rnd, lines = random.Random(3), [json.dumps(each) for each in (*ONE_CRASH[:-1], *TWO_STAGES[:-1])]
    settings = Settings(("zaya", "train"), "rank", "n1", 2, 0, (2,), 8, tmp_path, "h", 1)
    for _ in range(150):
        text = "\n".join(line if rnd.random() < 0.8 else broken(line, rnd) for line in lines if rnd.random() < 0.95)
        settings.journal.write_bytes(text.encode("utf-8", "surrogatepass")[: rnd.randrange(1, 4 * len(text))])
        record = Record(settings)
        record.write(Checkpoint(1))
        record.journal.close()
        assert isinstance(record.cluster.generation, int) and 1 in record.cluster.checkpoints
        assert isinstance(list(read(settings.journal))[-1], Checkpoint)


@pytest.mark.parametrize("wrong", [None, "x", [], {}, -1, True, 10**400, DEEP], ids=lambda each: str(each)[:9])
def test_a_line_with_a_field_of_another_kind_is_left_out_of_the_replay(wrong):
    lines = [json.loads(line) for line in (Path(__file__).parent / "corpus" / "curriculum.jsonl").open()]
    rows = [row_of(line) for line in lines]
    good, applied = Cluster(stages=True).replay(rows), Cluster(stages=True)
    for each in rows:
        applied.apply(each)
    assert good == applied and (good.ended, good.stage, good.best, len(good.failures)) == (True, 1, 300, 1)
    for number, each in enumerate(lines):
        for name in each.keys() - {"kind"}:
            found = Cluster(stages=True).replay([*rows[:number], row_of(each | {name: wrong}), *rows[number + 1 :]])
            assert isinstance(found.generation, int) and isinstance(found.best, (int, float)) and found.ended

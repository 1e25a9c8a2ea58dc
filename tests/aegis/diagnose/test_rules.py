# SPDX-License-Identifier: Apache-2.0
"""The rows of rules.yaml name their samples and no near miss, a user's file is checked, and no line breaks or delays the
search.
"""

import ast
import re
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.aegis.labelled_logs import cases
from tests.cpu_speed import allowed
from zaya_plugin.aegis.collectors import storage
from zaya_plugin.aegis.diagnose import diagnosis, policy
from zaya_plugin.aegis.diagnose.rules import A_MINUTE, Reader, Rules

try:
    from re import _constants as sre
    from re import _parser as sre_parser
except ImportError:  # Python 3.10
    import sre_constants as sre
    import sre_parse as sre_parser

RULES = Rules.load()
WITH_LINES = [rule for rule in RULES if rule.pattern]
# The classes of a survey of failures on AMD clusters, which the rows are made from, and those that it names in passing.
SURVEY = """ras_ue ras_ue_block ras_deferred ras_ce aca poison_consumed poison_created bad_pages bad_page_failed ring_timeout
gpu_reset reset_failed page_fault_kernel throttle xgmi memfault_user hsa_exception gpu_hang_user hip_illegal hip_oom
hip_no_device pcie_aer pcie_gone apei mce lockup panic ionic_link bnxt_link mlx5_link ib_port_event ib_fatal_event ib_retry
ib_unreachable watchdog watchdog_last conn_reset store_lost oom_kill shm_bus enospc erofs eacces eio nfs_stall non_finite
loss_spike data traceback port_in_use ckpt_broken time_limit preempt""".split()
NO_LINE = "hang slow_rank agent_lost node_lost unkillable loss_spike sigkill no_requeue counter_ue link_flap".split()


def names(source: str, line: str | bytes) -> list[str]:
    return [rule.name for rule in RULES.match(source, line)]


def test_every_class_of_the_survey_has_a_row():
    assert [name for name in SURVEY + NO_LINE if name not in RULES] == []


def given_names(path: Path) -> set[str]:
    """The names of rules in a file: what collectors find, what evidence carries, and what a cause is compared with."""
    found: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            found += [word.value for word in node.keywords if word.arg == "rule"]
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            found += node.args[5:6] if name == "Evidence" else []
            at = {"evidence": 1, "_report": 1, "_once": 3}.get(name) if path.parent.name == "collectors" else None
            found += [] if at is None else node.args[at : at + 1]
        elif isinstance(node, ast.Compare) and getattr(node.left, "attr", getattr(node.left, "id", "")) in (
            "rule",
            "cause",
        ):
            found += node.comparators
    found += [
        each
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Constant) and re.fullmatch(r"counter_\w+", str(each.value))
    ]
    return {
        each.value for each in found if isinstance(each, ast.Constant) and re.fullmatch(r"[a-z]\w+", str(each.value))
    }


def test_the_figures_of_the_documents_are_those_of_the_labelled_failures():
    text = (Path(__file__).parents[3] / "docs" / "fault-lab.md").read_text()
    labelled = list(cases())
    assert f"{len(labelled)} of {len(labelled)} labelled failures" in text


def test_every_name_that_the_code_gives_has_a_row():
    given = {policy.ENDED_BY_REQUEST, *diagnosis.LISTED_RULES, *diagnosis.TIME_OUTS, *diagnosis.NAMES_LAGGARD}
    given |= {*storage.RULES.values(), "loss_spike", "non_finite", "rank_failed", "signal"}
    for path in Path(policy.__file__).parents[1].rglob("*.py"):
        given |= given_names(path)
    expected = (
        "checkpoint_saved flight_record missing_rank slow_rank hang gpu_missing counter_rdma link_flap memory_low"
    )
    assert {*expected.split()} <= given
    assert sorted(name for name in given if name not in RULES) == []


@pytest.mark.parametrize("rule", WITH_LINES, ids=lambda rule: rule.name)
def test_a_row_names_its_samples_alone_and_none_of_its_near_misses(rule):
    assert rule.samples and rule.near, f"{rule.name}: add samples and near misses (near)"
    for source in rule.source:
        if source != "metrics":
            assert [names(source, line) for line in rule.samples] == [[rule.name]] * len(rule.samples)
            assert [line for line in rule.near if rule.name in names(source, line)] == []


def test_the_end_of_a_fault_is_distinguished_from_the_fault():
    line = "ionic 0000:61:00.0 enp97s0: Link up - 400 Gbps"
    (found,) = RULES.find("kernel", line)
    assert found.recovered and found.rule.name == "ionic_link" and found.values == {"device": "enp97s0"}
    assert names("kernel", line) == [] and names("kernel", line.replace("up", "down")) == ["ionic_link"]


def test_rows_of_the_kernel_and_of_ranks_are_apart():
    assert names("rank", "amdgpu: Saved bad pages 176 reaches threshold value 128") == []
    assert names("kernel", "RuntimeError: No HIP GPUs are available") == []
    assert names("slurm", "RuntimeError: No HIP GPUs are available") == ["hip_no_device"], (
        "srun's file holds ranks' lines"
    )


def test_colours_and_bytes_are_read():
    assert names("rank", b"\x1b[31mRuntimeError: No \x1b[1mHIP GPUs are available\x1b[0m\xff\xfe") == ["hip_no_device"]
    assert names("kernel", b"\x00\x01amdgpu: Poison is created\x00") == ["poison_created"]


def row(**changes) -> str:
    values = {"name": "mine", "source": "rank", "role": "root", "severity": "high", "confidence": "likely"}
    values |= {"action": "restart", "explain": "It is mine.", "pattern": "my failure"} | changes
    return "- " + "\n  ".join(f"{key}: {value}" for key, value in values.items() if value is not None) + "\n"


def test_a_file_of_the_user_adds_and_replaces(tmp_path):
    (tmp_path / "mine.yaml").write_text(row() + row(name="ring_timeout", source="kernel", action="exchange"))
    (tmp_path / "more.yaml").write_text(row(pattern="['their failure', 'our failure']", severity="user"))
    rules = Rules.load([tmp_path / "mine.yaml", tmp_path / "more.yaml"])
    assert len(rules) == len(RULES) + 1 and rules["ring_timeout"].action == "exchange"
    assert [rule.name for rule in rules.match("rank", "this is our failure")] == ["mine"]
    assert rules["mine"].severity == "user" and rules.match("rank", "this is my failure") == []
    assert rules.match("kernel", "ring sdma0 timeout, signaled") == []


def test_a_row_that_replaces_another_one_keeps_its_exit_codes_and_what_it_affects(tmp_path):
    (tmp_path / "mine.yaml").write_text(row(name="segfault", pattern=None) + row(name="no_requeue", exit_code="[3]"))
    rules = Rules.load([tmp_path / "mine.yaml"])
    assert rules.of_exit(139).explain == "It is mine." and rules["segfault"].affects == "state"
    assert (rules.of_exit(3).name, rules.of_exit(93).name) == ("no_requeue", "rank_failed")


@pytest.mark.parametrize(
    "text, told",
    [
        ("name: x", "must hold a list of rows"),
        ("- 3", "row 1: must be a row"),
        ("- {", "not valid YAML"),
        (row(colour="red"), "row 1 (mine), key colour: no such key. Allowed: name, source"),
        (row() + row(name="second", explain=None), "row 2 (second), key explain: is missing"),
        (row(words="[My]"), "key words=My: must be a word in small letters"),
        (row(words="never", samples="['my failure']"), "key words=never: the sample 'my failure' holds none of them"),
        (row(exit_code="many"), "key exit_code=many: must be a whole number"),
        (row(role="either"), "key role=either: no such value. Allowed: root, cascade, confirmation, watch"),
        (row(source="dmesg"), "key source=dmesg: no such value"),
        (row(action="[stop]"), "key action=['stop']: must be text"),
        (row(name="Mine"), "key name=Mine: not a valid name"),
        (row(safe_code="311"), "key safe_code=311: must be text. Fix: put the value in quotes"),
        (row(count="many", within=3), "key count=many: must be a number"),
        (row(count=0), "key count=0: is too small"),
        (row(count=3), "key within: is missing"),
        (row(fallback="maybe"), "key fallback=maybe: must be true or false"),
        (row(pattern="'('"), "key pattern=(: not a valid Python pattern"),
        (row(pattern="'a*'"), "matches every line"),
        (row(pattern="'(a+)+b'"), "repeats a repeated part"),
        (row(pattern=r"'(?:x\d{1,50}){1,50}y'"), "repeats a repeated part"),
        (row(pattern="'a.*b.*c'"), "has more than one repeat without a limit"),
        (row(pattern=r"'a(?:\S| )+b[^x]*c'"), "has more than one repeat without a limit"),
        (row(recover="'.* .*back'"), "key recover=.* .*back: has more than one repeat"),
        (row(pattern=None, recover="back"), "key recover: needs a pattern"),
        (row() + row(), "the row mine comes twice"),
    ],
)
def test_a_mistake_in_a_file_names_row_and_key(tmp_path, text, told):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(told)):
        Rules.load([path])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere.yaml: No such file"):
        Rules.load([tmp_path / "nowhere.yaml"])
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00" * 9)
    with pytest.raises(ValueError, match="not valid YAML"):
        Rules.load([tmp_path / "binary.yaml"])


# ---- the search ----


def words_of_matches(parsed) -> list[str] | None:
    """Return words, in small letters, one of which every match of a pattern holds: of the parts that every match must hold
    the one whose shortest word is the longest.
    """
    candidates: list[list[str]] = []
    run = ""
    for kind, value in [*parsed, (None, None)]:
        if kind is sre.LITERAL and value < 128:
            run += chr(value).lower()
            continue
        candidates += [[run]] if run else []
        run, inner = "", None
        if kind is sre.SUBPATTERN:
            inner = words_of_matches(value[-1])
        elif kind is sre.BRANCH:
            branches = [words_of_matches(branch) for branch in value[1]]
            inner = [word for branch in branches for word in branch] if all(branches) else None
        elif kind in (sre.MAX_REPEAT, sre.MIN_REPEAT) and value[0] > 0:
            inner = words_of_matches(value[2])
        candidates += [inner] if inner else []
    return max(candidates, key=lambda words: min(map(len, words)), default=None)


@pytest.mark.parametrize("rule", WITH_LINES, ids=lambda rule: rule.name)
def test_every_line_that_a_row_matches_holds_one_of_its_words(rule):
    """Proven by the parts of each pattern that a match cannot lack."""
    matches = [words_of_matches(sre_parser.parse(pattern)) for pattern in (*rule.pattern, rule.recover) if pattern]
    assert rule.words and all(
        any(word in text for word in rule.words) for texts in (*matches, map(str.lower, rule.samples)) for text in texts
    )


def test_a_row_without_words_is_compared_with_every_line(tmp_path):
    (tmp_path / "mine.yaml").write_text(row(pattern="'[a-z]{3}q'") + row(name="other", words="[my]"))
    rules = Rules.load([tmp_path / "mine.yaml"])
    assert [rule.name for rule in rules.match("rank", "xxxxxxq")] == ["mine"]
    assert [rule.name for rule in rules.match("rank", "oh, MY my failure")] == ["other"]


PIECES = [text for rule in RULES for text in [*rule.samples, *rule.words]]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(PIECES), st.text(max_size=30), st.binary(max_size=30), st.just("\x1b[31m"), st.just("\0")
        ),
        max_size=8,
    ),
    st.integers(1, 30000),
    st.sampled_from(["kernel", "rank", "slurm", "agent"]),
)
def test_no_line_breaks_the_search(parts, times, source):
    line = b"".join(part if isinstance(part, bytes) else part.encode("utf-8", "surrogatepass") for part in parts)
    line = line * min(times, 1_000_000 // max(len(line), 1))
    began = time.process_time()
    for rule in RULES.match(source, line):
        assert rule.name in RULES
    evidence = Reader(RULES, source, "n1").read(line, 1.0)
    assert all(len(each.text) <= 500 and each.text.isprintable() for each in evidence)
    assert time.process_time() - began < allowed(0.5)


def test_no_pattern_takes_long_on_a_megabyte_made_to_delay_it():
    """Each pattern meets its own words and samples, repeated without the end that it looks for."""
    texts = ["a", " ", "1", "1 ", "a.b", "a=", ": ", "_.", "x" * 70 + ":", "\\", "\t"]
    fillers = [text * (1_000_000 // len(text)) for text in texts]
    slowest = 0.0
    for rule in WITH_LINES:
        starts = {*rule.words, rule.samples[0][:-2], "zaya: a="}
        for start in starts:
            for filler in [start * (1_000_000 // len(start)), *fillers]:
                line = start + filler
                began = time.process_time()
                RULES.find(rule.source[0], line)
                slowest = max(slowest, time.process_time() - began)
    assert slowest < allowed(0.05), "seconds for a line"


def realistic(number: int) -> list[str]:
    kinds = [
        "[2026-11-22 10:00:00] iteration {}/ 10000 | consumed samples: 4096 | elapsed time per iteration (ms): 812.3 | "
        "learning rate: 1.0E-04 | lm loss: 2.3E+00 | grad norm: 0.31 | number of nan iterations: 0 |",
        "INFO:megatron.core.dist_checkpointing: saving checkpoint at iteration {} to runs/zaya1 in torch_dist format",
        "n3:123:456 [0] NCCL INFO Channel {}/0 : 0[0] -> 1[1] via P2P/IPC/read",
        "[rank3]:[W1122 10:00:00.000000000 ProcessGroupNCCL.cpp:4115] Warning: using GPU {} to perform barrier",
    ]
    return [kinds[at % len(kinds)].format(at) for at in range(number)]


def test_20000_lines_take_less_than_a_second_of_one_core():
    lines = realistic(20_000)
    reader = Reader(RULES, "rank", "n1", 3)
    began = time.process_time()
    found = [each for line in lines for each in reader.read(line, 0.0)]
    assert time.process_time() - began < allowed(1) and found == [] and reader.step == 19996


# ---- one log ----


def read(lines: str, **options) -> list:
    reader = Reader(RULES, options.pop("source", "rank"), "n1", **options)
    return [each for line in lines.splitlines() for each in reader.read(line, 5.0)]


def test_a_traceback_is_known_by_exception_and_own_frame():
    (one,) = read(
        "[rank3]: Traceback (most recent call last):\n"
        '[rank3]:   File "/opt/run/train.py", line 3, in main\n'
        '[rank5]:   File "/opt/run/other.py", line 3, in other\n'
        '[rank3]:   File "/opt/venv/lib/python3.12/site-packages/zaya_plugin/data/reader.py", line 40, in next_batch\n'
        '[rank3]:   File "/usr/lib/python3.12/json/decoder.py", line 355, in decode\n'
        "[rank3]: json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"
    )
    assert (one.rule, one.rank, one.node) == ("traceback", 3, "n1")
    assert one.values == {"exception": "JSONDecodeError", "frame": "data/reader.py in next_batch"}


def test_an_exception_of_a_library_alone_keeps_its_innermost_frame():
    (one,) = read(
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.12/runpy.py", line 3, in run\n'
        '  File "/usr/lib/python3.12/site-packages/torch/nn/functional.py", line 40, in linear\n'
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.50 GiB",
        rank=7,
    )
    assert (one.rule, one.rank, one.values["frame"]) == ("hip_oom", 7, "nn/functional.py in linear")


def test_a_traceback_that_was_caught_lends_no_frame_to_the_next_one():
    (one,) = read(
        "Traceback (most recent call last):\n"
        '  File "/opt/run/train.py", line 3, in main\n'
        "caught, and tried again\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.12/runpy.py", line 9, in run\n'
        "ValueError: 3"
    )
    assert one.values["frame"] == "python3.12/runpy.py in run"


def test_a_line_that_comes_a_million_times_is_evidence_twenty_times_a_minute():
    reader = Reader(RULES, "rank", "n1", 0)
    found = [
        each for second in range(180) for _ in range(5) for each in reader.read("Connection reset by peer", second)
    ]
    assert len(found) == 3 * A_MINUTE
    kernel = Reader(RULES, "kernel", "n1")
    line = "amdgpu: 1 correctable hardware errors detected in total in gfx block"
    assert len([each for _ in range(500) for each in kernel.read(line, 1.0)]) == RULES["ras_ce"].count == 100


def test_the_summary_of_torchrun_becomes_exit_codes():
    (one,) = read(
        "  time      : 2026-11-22_10:00:01\n  host      : n2\n  rank      : 1 (local_rank: 1)\n"
        "  exitcode  : -9 (pid: 24668)\n",
        source="agent",
    )
    assert (one.source, one.rule, one.node, one.rank, one.values["exit_code"]) == ("exit", "sigkill", "n2", 1, -9)
    (one,) = read("srun: error: n4: tasks 12-15: Exited with exit code 17", source="slurm")
    assert (one.source, one.rule, one.node, one.rank) == ("exit", "validation_failed", "n4", 12)


@pytest.mark.parametrize(
    "code, rule, word",
    [
        (1, "rank_failed", "failure"),
        (2, "user_error", "wrong"),
        (16, "rerun_other_gpu", "another GPU"),
        (17, "validation_failed", "verdict"),
        (75, "ended_early", "saved"),
        (76, "roll_back_asked", "earlier checkpoint"),
        (93, "no_requeue", "do not help"),
        (100, "hang", "no step"),
        (124, "command_timeout", "timeout"),
        (127, "wrong_command", "could not be started"),
        (137, "sigkill", "SIGKILL"),
        (-9, "sigkill", "SIGKILL"),
        (139, "segfault", "SIGSEGV"),
        (-signal.SIGABRT, "abort", "SIGABRT"),
        (143, "terminated", "SIGTERM"),
        (-signal.SIGXCPU, "signal", "-24"),
        (255, "rank_failed", "255"),
        (-200, "rank_failed", "-200"),
    ],
)
def test_exit_codes_are_rows(code, rule, word):
    assert RULES.of_exit(code).name == rule
    evidence = RULES.exit_evidence(code, 1.0, "n1", 3, step=5)
    assert word in evidence.text and evidence.values == {"exit_code": code, "step": 5}


def test_zero_is_no_evidence():
    assert RULES.of_exit(0) is None

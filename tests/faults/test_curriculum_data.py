# SPDX-License-Identifier: Apache-2.0
"""What the ranks of a curriculum really read: sources over a changing blend, and validation by domain (CPU, fp32)."""

import json
import sysconfig
from collections import defaultdict
from pathlib import Path

import pytest

from tests.faults.micro_curriculum import SMALL
from tests.running import zaya
from zaya_plugin.handover.predecessor import saved_step

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory, corpus) -> dict[str, Path]:
    """Three data sets with one tokenizer."""
    folder = tmp_path_factory.mktemp("sources")
    found = {"web": corpus}
    for name, package in (("code", "asyncio"), ("docs", "email")):
        found[name] = folder / name
        text = Path(sysconfig.get_path("stdlib")) / package
        done = zaya(
            "data",
            "prepare",
            "--output",
            str(found[name]),
            "--input",
            str(text),
            "--glob",
            "*.py",
            "--valid-fraction",
            "0.3",
            "--tokenizer",
            str(corpus / "tokenizer"),
            "--workers",
            "1",
        )
        assert done.returncode == 0, done.stdout
    return found


def blend(sources: dict[str, Path], key: str, **weights: float) -> str:
    return f"{key}=[" + ",".join(f"'{weight} {sources[name]}'" for name, weight in weights.items()) + "]"


def samples_read(log: Path) -> list[tuple[int, str, int]]:
    """Sample, source and position of every read, in order."""
    lines = (line.split() for line in log.read_text().splitlines())
    return [(int(number), source, int(position)) for number, source, position in lines]


def test_no_sample_is_repeated_or_left_out_where_the_blend_changes(tmp_path, ranks, sources):
    """Three stages of 16 samples; the second is killed and goes on, the third has longer sequences. code pauses, docs
    come later.
    """
    words = (
        "experiment=cpu_demo",
        *SMALL,
        "data.order=continuing",
        f"data.path={sources['web']}",
        f"run_dir={tmp_path}",
        "stage.train_iters=8",
        "handover.continuous_lr=false",
        "demo_3:stage.seq_length=48",
        "demo_1:" + blend(sources, "data.blend", web=0.7, code=0.3),
        "demo_2:" + blend(sources, "data.blend", web=0.5, docs=0.5),
        "demo_3:" + blend(sources, "data.blend", code=0.6, docs=0.2, web=0.2),
    )
    ended: dict[str, int] = defaultdict(int)
    for stage, length in (("demo_1", 16), ("demo_2", 16), ("demo_3", 48)):
        log, command, again = tmp_path / f"{stage}.reads", ("curriculum", "--only", stage, *words), 0
        if stage == "demo_2":
            assert ranks.run(*command, kill=("step 5/8", 0.0), reads=log) == -9
            again = saved_step(tmp_path / stage) * 2
            assert 0 < again < len(samples_read(log)), "steps after the checkpoint are taken again"
            killed = len(samples_read(log))
        ranks.finish(*command, reads=log)
        read = samples_read(log)
        numbers = [number for number, _, _ in read]
        if stage == "demo_2":
            assert numbers == [*range(killed), *range(again, 16)]
        else:
            assert numbers == list(range(16))
        places = {number: (source, position) for number, source, position in read}
        assert all(places[number] == (source, position) for number, source, position in read), (
            "the same samples as before the kill"
        )
        by_source = defaultdict(list)
        for source, position in places.values():
            by_source[source].append(position)
        for source, positions in by_source.items():
            assert sorted(positions) == list(range(ended[source], ended[source] + length * len(positions), length)), (
                stage,
                source,
            )
            ended[source] += length * len(positions)
    assert len(ended) == 3 and sum(ended.values()) == 16 * (16 + 16 + 48)


def test_every_domain_is_validated_as_if_it_were_alone(tmp_path, ranks, sources):
    """Every validation reads each domain's own samples, in the same order over a stop; a run changes no weight for
    being validated.
    """
    words = (
        "train",
        "experiment=cpu_demo",
        *SMALL,
        f"data.path={sources['web']}",
        "stage.train_iters=3",
        "stage.eval_interval=1",
        "stage.eval_iters=2",
        "resume=auto",
    )
    both = (*words, f"run_dir={tmp_path / 'both'}", blend(sources, "data.valid_blend", web=3, docs=1))
    ranks.finish(*both, "exit_interval=2")
    ranks.finish(*both)
    for name in ("web", "docs"):
        ranks.finish(*words, f"run_dir={tmp_path / name}", f"data.valid_path={sources[name] / 'valid'}")
    rows = {
        run: [
            row
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
            if "valid_loss" in (row := json.loads(line))
        ]
        for run in ("both", "web", "docs")
    }
    assert [row["step"] for row in rows["both"]] == [1, 2, 3]
    of_web, of_docs = (f"validation/{sources[name].name}/loss" for name in ("web", "docs"))
    for joint, web, docs in zip(rows["both"], rows["web"], rows["docs"], strict=True):
        assert (joint[of_web], joint[of_docs]) == (web["valid_loss"], docs["valid_loss"])
        assert joint["valid_loss"] == pytest.approx((3 * web["valid_loss"] + docs["valid_loss"]) / 4, rel=1e-12)
    assert len({row[of_docs] for row in rows["both"]}) == 3, "other weights each time"
    assert f" ({sources['web'].name} " in ranks.log.read_text()

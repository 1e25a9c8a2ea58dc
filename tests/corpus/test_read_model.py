# SPDX-License-Identifier: Apache-2.0
"""The read model of `zaya data bundle` against the figures of the ZAYA1-8B report's appendix B."""

import pytest

from zaya_plugin.corpus.bundle import PlannedRun, amplification, least_step_seconds, reads_per_second, stretches


def test_published_figures():
    run = PlannedRun()
    assert run.global_batch_size * run.sequence_length * 4 == 64 * 2**20  # 64 MiB, 16,384 pages a step
    assert reads_per_second(run, 4, 1.0) == pytest.approx(6554, abs=0.5)
    assert least_step_seconds(run, 4, 1.0) == pytest.approx(0.234, abs=0.0005)
    assert least_step_seconds(run, 4, 3.0) == pytest.approx(3 * 0.23406, abs=1e-4)


def test_amplification_grows_with_the_documents_of_a_sequence():
    run = PlannedRun()
    assert stretches(4096, tokens=10**9, documents=10**6) == pytest.approx(5.096)
    assert amplification(run, 4, stretches(4096, 10**9, 10**6)) == pytest.approx(1 + 5.096 / 4)
    assert amplification(run, 4, stretches(4096, 10**9, 10**6, packed=True)) == 1.25
    assert reads_per_second(run, 4, 1.25) == pytest.approx(8192, abs=0.5)


def test_model_against_counted_pages():
    """Pages that sequences of random documents touch in a file, counted."""
    import numpy as np

    rng = np.random.RandomState(0)
    lengths = rng.randint(200, 1800, 4000)
    starts = np.concatenate(([0], np.cumsum(lengths)))
    order = rng.permutation(len(lengths))
    pages, samples, left, touched = 0, 0, 4096, []
    for document in order:
        begin, end = int(starts[document]), int(starts[document + 1])
        while begin < end:
            take = min(left, end - begin)
            touched.append((begin * 4 // 4096, ((begin + take) * 4 - 1) // 4096))
            begin, left = begin + take, left - take
            if left == 0:
                pages += len({page for a, b in touched for page in range(a, b + 1)})
                samples, left, touched = samples + 1, 4096, []
    counted = pages / samples / (4096 * 4 / 4096)
    modelled = amplification(PlannedRun(), 4, stretches(4096, int(lengths.sum()), len(lengths)))
    assert counted == pytest.approx(modelled, rel=0.02)

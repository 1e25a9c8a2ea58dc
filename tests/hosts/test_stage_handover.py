# SPDX-License-Identifier: Apache-2.0
"""Which samples a stage gets; that they, the weights and the momenta are handed over exactly is in
tests/faults/test_curriculum.py.
"""

from zaya_plugin.config.compose import compose


def test_a_stage_takes_its_part_of_the_shared_order():
    from zaya_plugin.hosts.stage_handover import stage_part, stage_samples

    whole = compose(["experiment=cpu_demo", "stage.train_iters=8"])
    first = compose(["experiment=cpu_demo", "stage.train_iters=5", "handover.planned_samples=128"])
    second = compose(
        ["experiment=cpu_demo", "stage.train_iters=3", "handover.first_sample=80", "handover.planned_samples=128"]
    )
    counts = [stage_samples(recipe, (recipe.stage.train_iters * 16, 64, 0), 64) for recipe in (whole, first, second)]
    assert counts == [(128, 64, 0)] * 3, "all three build the same set"
    order = list(range(1000, 1128))
    assert stage_part(first, order) is order
    assert list(stage_part(second, order)) == order[80:]


def test_validations_that_are_compared_read_the_same_samples():
    from zaya_plugin.hosts.stage_handover import stage_samples, validation_part

    recipe = compose(["experiment=cpu_demo", "stage.eval_at_start=true"])
    assert stage_samples(recipe, (1440, 256, 0), 64) == (1440, 320, 0), "one validation more than Megatron counts"
    repeated = validation_part(recipe, list(range(320)), 64)
    assert [repeated[i] for i in (0, 63, 64, 319)] == [0, 63, 0, 63] and len(repeated) == 320
    plain = list(range(256))
    assert validation_part(compose(["experiment=cpu_demo"]), plain, 64) is plain

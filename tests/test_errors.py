# SPDX-License-Identifier: Apache-2.0
from zaya_plugin.errors import message, mistake


def test_a_message_names_key_value_problem_allowed_and_fix():
    text = message(
        "optim.z_loss", 1e-4, problem="requires cluster.x=true", allowed="0 with cluster.x=false", fix="optim.z_loss=0"
    )
    assert text == "optim.z_loss=0.0001: requires cluster.x=true. Allowed: 0 with cluster.x=false. Fix: optim.z_loss=0."


def test_values_are_written_as_they_are_typed():
    assert message("a", None, problem="is empty") == "a=null: is empty."
    assert message("a", True, problem="is on.") == "a=true: is on."
    assert message("data/x.bin", problem="does not exist") == "data/x.bin: does not exist."


def test_a_mistake_is_a_value_error():
    error = mistake("--output", "x", problem="exists", fix="--force")
    assert isinstance(error, ValueError) and str(error) == "--output=x: exists. Fix: --force."

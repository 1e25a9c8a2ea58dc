# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.training.spiking_rank RECIPE FIRST LAST`: one rank whose losses of steps FIRST to LAST are 20 higher.

The model and its gradients stay as they are: only what the guard sees spikes.
"""

import sys

from zaya_plugin.hosts import worker


def main(recipe: str, first: str, last: str) -> int:
    from zaya_plugin.hosts.pretrain import Trainer

    training_log = Trainer.training_log

    def spiked(self, stock, loss_dict, total, rate, iteration, *positional, **named):
        if int(first) <= iteration <= int(last) and "lm loss" in loss_dict:
            loss_dict = loss_dict | {"lm loss": loss_dict["lm loss"] + 20}
        return training_log(self, stock, loss_dict, total, rate, iteration, *positional, **named)

    Trainer.training_log = spiked
    return worker.main([recipe])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

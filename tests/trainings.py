"""A training goes on: stopped after some steps and called again, it ends with the same bits."""

import torch
import training

from conftest import refuses


def goes_on(monkeypatch, train, other, after):
    """Trains at once, and in two parts; returns the model, its facts, and those of the parts.

    train(name): a training that is kept under this name. other(name): one of other settings, which
    is refused there.
    """
    whole, facts = train("whole")
    step, done = training.one_step, []

    def stopped(*args):
        if len(done) == after:
            raise KeyboardInterrupt
        done.append(1)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(training, "one_step", stopped)
        refuses(f"stopped after {after} steps", lambda: train("parts"), SystemExit)
    parts, again = train("parts")
    for name, value in whole.state_dict().items():
        assert torch.equal(parts.state_dict()[name], value), name
    refuses("other settings", lambda: other("parts"), SystemExit)
    return whole, facts, again

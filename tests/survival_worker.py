"""A program that trains, to be killed: `python survival_worker.py FOLDER [SCENE ...]`.

It says `iteration NAME K` after each iteration and `result NAME REASON HASH` after each fit.
"""

import hashlib
import os
import resource
import signal
import sys
from pathlib import Path

import torch

import riskfield as rf
from learning_cases import EXACT, TRUNCATED, chain_examples, chain_model, denoising, values

WARM = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-7), rf.FixedPoint(tol=1e-7))
LOSS = rf.losses.UnivariateLogistic()

# What each name fits: a model, data, inference and settings of `fit`.
FITS = {
    "lbfgs": lambda: (
        rf.LinearModel(2, 2, 2),
        denoising(6, side=6),
        WARM,
        {
            "optimiser": rf.optim.LBFGS(iterations=20, memory=5),
            "ridge": 1e-3,
            "validation": denoising(3, side=6, seed=1),
            "warm_start": True,
        },
    ),
    "adam": lambda: (
        rf.Conditional(
            torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(4, 3, dtype=torch.float64)),
            rf.models.Tables(1, 3, 3),
        ),
        chain_examples(20),
        EXACT,
        {"optimiser": rf.optim.Torch(torch.optim.Adam, {"lr": 0.05, "amsgrad": True}, batch_size=6, epochs=12)},
    ),
    "smd": lambda: (
        chain_model(),
        chain_examples(10),
        TRUNCATED,
        {"optimiser": rf.optim.SMD(gain=0.3, batch_size=5, epochs=4), "ridge": 1e-3},
    ),
    "endless": lambda: (chain_model(), chain_examples(10), EXACT, {"optimiser": rf.optim.Torch(epochs=10**6)}),
}


def say(*words):
    print(*words, flush=True)


def kill_at(where, count):
    """Send this process the signal that cannot be caught, in the `count`-th call of a function of the file system."""
    left = [count]
    owner, name = {"fsync": (os, "fsync"), "replace": (os, "replace"), "unlink": (Path, "unlink")}[where]
    function = getattr(owner, name)

    def deadly(*arguments, **settings):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **settings)

    setattr(owner, name, deadly)


def main(folder, scenes):
    torch.set_num_threads(1)
    names, after = ["lbfgs", "adam", "smd"], None
    for scene in scenes:
        kind, _, value = scene.partition("=")
        if kind == "only":
            names = [value]
        elif kind == "full":  # no file may grow beyond 64 bytes after that iteration
            after = int(value)
        else:
            kill_at(kind, int(value))
    for name in names:
        torch.manual_seed(0)
        model, data, inference, settings = FITS[name]()

        def report(record, model, name=name):
            say("iteration", name, record.iteration)
            if record.iteration == after:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

        checkpoint = rf.Checkpoints(Path(folder) / name, every=2)
        settings |= {"checkpoint": checkpoint, "resume": True, "callbacks": [report], "progress": False}
        result = rf.fit(model, data, LOSS, inference, **settings)
        digest = hashlib.sha256(values(model).numpy().tobytes()).hexdigest()
        history = [(r.objective, r.validation, r.evaluations) for r in result.history]
        say("result", name, result.reason.value, digest, hashlib.sha256(repr(history).encode()).hexdigest())
        say("best", name, None if result.best is None else result.best.iteration, len(result.history))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

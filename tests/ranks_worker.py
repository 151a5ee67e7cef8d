"""A program for `torchrun`: `ranks_worker.py FOLDER [raise=K | kill=K]`, where rank 1 fails in iteration K.

Every rank prints the parameters it found as `found RANK NAME HEX`, in bits.
"""

import os
import signal
import sys
from pathlib import Path

import torch

import riskfield as rf
from learning_cases import EXACT, TRUNCATED, chain_examples, chain_model, denoising, values

LOSS = rf.losses.UnivariateLogistic()
WARM = rf.Inference(rf.MessagePassing(rf.TRW(0.5)), rf.Stop(tol=1e-10), rf.FixedPoint(tol=1e-10))
TIGHT = rf.optim.LBFGS(iterations=60, gradient_tol=1e-8, change_tol=1e-15)


def fits(group, **settings):
    """Fits on all ranks that should find what one process finds, by name."""
    share, settings = group.shard, {"progress": False, "ranks": group, "ridge": 1e-2, **settings}

    # An odd number of examples on two graphs, and ranks that begin with different parameters.
    model = chain_model(seed=group.rank)
    data = share([chain_examples(9), chain_examples(4, seed=1, graph=rf.chain(8, 3, tied=True))])
    validation = rf.Validation(share(chain_examples(5, seed=2)), patience=100)
    rf.fit(model, data, LOSS, EXACT, optimiser=TIGHT, validation=validation, **settings)
    yield "lbfgs", model

    model = rf.LinearModel(2, 2, 2)
    rf.fit(model, share(denoising(5, side=5)), LOSS, WARM, warm_start=True, optimiser=TIGHT, **settings)
    yield "warm", model

    model = chain_model()
    stage = rf.learning.Stage(LOSS, EXACT, rf.optim.LBFGS(iterations=10), ridge=1e-2)
    plan = rf.learning.incremental(stage, 20, start=6)
    rf.learning.fit_stages(model, share(chain_examples(20)), plan, progress=False, ranks=group)
    yield "stages", model

    # The batches are the same on any number of ranks. An odd number of examples, so that shares differ.
    mixed = [chain_examples(9), chain_examples(4, seed=1, graph=rf.chain(8, 3, tied=True))]
    model = chain_model()
    optimiser = rf.optim.Torch(torch.optim.Adam, {"lr": 0.1}, batch_size=3, epochs=4)
    rf.fit(model, share(mixed), LOSS, EXACT, optimiser=optimiser, **settings)
    yield "batches", model

    model = chain_model()
    rf.fit(model, share(mixed), LOSS, TRUNCATED, optimiser=rf.optim.SMD(batch_size=4, epochs=2), **settings)
    yield "smd", model

    model = chain_model()  # one batch per epoch
    optimiser = rf.optim.Torch(torch.optim.Adam, {"lr": 0.1}, batch_size=20, epochs=5)
    rf.fit(model, share(chain_examples(20)), LOSS, EXACT, optimiser=optimiser, **settings)
    yield "adam", model


def failing(group, folder, scene):
    """A fit with checkpoints, in which rank 1 fails if the scene says so."""
    kind, _, when = scene.partition("=")

    def fail(record, model):
        if group.rank == 1 and kind and record.iteration == int(when):
            if kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("rank 1 has lost its data")

    model = chain_model(seed=group.rank)
    rf.fit(
        model,
        group.shard(chain_examples(9)),
        LOSS,
        EXACT,
        ridge=1e-3,
        optimiser=rf.optim.LBFGS(iterations=12),
        checkpoint=rf.Checkpoints(Path(folder), every=2),
        resume=True,
        callbacks=[fail],
        ranks=group,
        progress=False,
    )
    return model


def main(folder, scene="all"):
    torch.set_num_threads(1)
    with rf.learning.ranks() as group:
        assert group.size == 2
        found = fits(group) if scene == "all" else [("failing", failing(group, folder, scene))]
        for name, model in found:
            # One write, so that the lines of the ranks do not mix.
            os.write(1, f"found {group.rank} {name} {values(model).numpy().tobytes().hex()}\n".encode())


if __name__ == "__main__":
    main(*sys.argv[1:])

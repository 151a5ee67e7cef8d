"""Data-parallel fits: two processes under torchrun, over Gloo."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import riskfield as rf
from learning_cases import TRUNCATED, chain_examples, chain_model, values
from ranks_worker import failing, fits

TESTS = Path(__file__).parent


def torchrun(*arguments):
    """Run `ranks_worker.py` on two ranks: the exit code, what each rank found by name, and all it said."""
    path = os.pathsep.join([str(TESTS), str(Path(rf.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run(
        [*launcher, str(TESTS / "ranks_worker.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    found = {}
    for line in ran.stdout.splitlines():
        if line.startswith("found"):
            _, rank, name, bits = line.split()
            found.setdefault(name, {})[int(rank)] = torch.tensor(np.frombuffer(bytes.fromhex(bits)))
    return ran.returncode, found, ran.stdout + ran.stderr


def test_two_ranks_find_what_one_process_finds(tmp_path):
    code, found, said = torchrun(tmp_path)
    assert code == 0, said
    alone = dict(fits(rf.learning.Ranks()))
    assert set(found) == set(alone) == {"lbfgs", "warm", "stages", "adam", "batches", "smd"}
    for name, model in alone.items():
        assert torch.equal(found[name][0], found[name][1]), f"{name}: the ranks differ"
        assert torch.allclose(found[name][0], values(model), rtol=1e-5, atol=1e-7), name


def test_a_rank_that_fails_ends_the_job_and_leaves_the_checkpoint(tmp_path):
    """By an error, then by the signal that cannot be caught; then the job is resumed and ends as if undisturbed."""
    code, found, said = torchrun(tmp_path / "run", "raise=5")
    assert code != 0
    assert not found
    assert "RuntimeError: rank 1 has lost its data" in said
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["iteration-00000004.safetensors"]
    code, found, said = torchrun(tmp_path / "run", "kill=8")
    assert code != 0
    assert not found
    assert "SIGKILL" in said or "-9" in said
    assert [path.name for path in (tmp_path / "run").glob("[!.]*")] == ["iteration-00000006.safetensors"]
    code, found, said = torchrun(tmp_path / "run", "")
    assert code == 0, said
    undisturbed = failing(rf.learning.Ranks(), tmp_path / "alone", "")
    for rank in (0, 1):
        assert torch.allclose(found["failing"][rank], values(undisturbed), rtol=1e-6, atol=1e-8)


def test_without_torchrun_there_is_one_rank(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with rf.learning.ranks() as group:
        assert group == rf.learning.Ranks(0, 1)
    assert group.broadcast_bytes(b"as it is") == b"as it is"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize(
    "optimiser", [rf.optim.LBFGS(iterations=15), rf.optim.Torch(epochs=3), rf.optim.SMD(epochs=1)], ids=str
)
def test_a_gpu_finds_what_the_processor_finds(optimiser):
    settings = {"ridge": 1e-2, "optimiser": optimiser, "progress": False}
    here, there = chain_model(), chain_model().to("cuda")
    rf.fit(here, chain_examples(), rf.losses.UnivariateLogistic(), TRUNCATED, **settings)
    rf.fit(there, chain_examples().to("cuda"), rf.losses.UnivariateLogistic(), TRUNCATED, **settings)
    assert torch.allclose(values(here), values(there).cpu(), rtol=1e-8)


def test_shards_are_all_of_the_data():
    data = [chain_examples(5), chain_examples(2, seed=1)]
    shards = [rf.learning.Ranks(rank, 3).shard(data) for rank in range(3)]
    assert [[len(block) for block in shard] for shard in shards] == [[2, 1], [2, 0], [1, 1]]
    for block, whole in enumerate(data):
        rows = torch.cat([shard[block].inputs["nodes"] for shard in shards]).flatten(1)
        assert sorted(rows.tolist()) == sorted(whole.inputs["nodes"].flatten(1).tolist())
    with pytest.raises(ValueError, match=r"at least one example for each of 8 ranks. Got 7."):
        rf.learning.Ranks(0, 8).shard(data)


@pytest.mark.parametrize("counts", [[3], [4, 3], [2, 5], [0, 3, 1], [5, 1, 4]])
def test_ranks_number_all_examples(counts):
    class Some(rf.learning.Ranks):
        def sum_(self, tensor):
            return torch.tensor(counts)

    own = [Some(rank, len(counts)).numbers(count).tolist() for rank, count in enumerate(counts)]
    turns = sorted((turn, rank) for rank, count in enumerate(counts) for turn in range(count))
    assert [own[rank][turn] for turn, rank in turns] == list(range(sum(counts)))


def test_small_stages_are_shared_out_alike():
    from riskfield.learning.stages import _subset

    class Two(rf.learning.Ranks):
        def sum_(self, tensor):
            return tensor.fill_(10) if len(tensor) == 2 else tensor.fill_(20)  # a count of each rank, or of both

    data = chain_examples(20)
    whole = _subset(data, 7, 3, rf.learning.Ranks())[0].labels.tolist()
    parts = []
    for rank in (0, 1):
        group = Two(rank, 2)
        parts += _subset(group.shard(data), 7, 3, group)[0].labels.tolist()
    assert sorted(parts) == sorted(whole)

"""UAI files: what is read, what is refused and in which words, what is written."""

import math
import os
import random
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import riskfield as rf
from cases import lines_run
from riskfield.io.uai import MAX_FREE_STATES, read_mar, read_pr, write_mpe

UAI_FOLDER = Path(os.environ.get("RISKFIELD_UAI") or Path(__file__).parents[2] / "shared" / "uai")
needs_instances = pytest.mark.skipif(
    not UAI_FOLDER.is_dir(),
    reason="set RISKFIELD_UAI to a folder of instances of the UAI 2014 competition: NAME.uai, NAME.uai.evid, .MAR, .PR",
)

# Three variables with 2, 3 and 2 states; a scope out of order, a constant, a zero, a factor of one variable.
SMALL = """MARKOV
3
2 3 2
4
2 1 0
0
1 2
3 0 1 2

6
 1 2
 3 4
 5 6
1
 2.5
2
 0 1e-3
12
 1 2 3 4 5 6 7 8 9 10 11 12
"""


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="model.uai"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def uai_text(graph, tables, kind="MARKOV"):
    """The model as a file, its factors in order."""
    scopes = [graph.scope(k) for k in range(graph.num_factors)]
    lines = [kind, str(graph.num_variables), " ".join(map(str, graph.num_states)), str(len(scopes))]
    lines += [f"{len(s)} {' '.join(map(str, s))}" for s in scopes]
    for table in tables:
        lines += [str(table.size), " ".join(repr(float(v)) for v in table.ravel())]
    return "\n".join(lines) + "\n"


class TestModel:
    def test_reads_everything_in_its_place(self, write):
        model = rf.io.read_uai(write(SMALL))
        graph = model.graph
        assert model.kind == "MARKOV"
        assert graph.num_states.tolist() == [2, 3, 2]
        assert [graph.scope(k) for k in range(3)] == [(1, 0), (2,), (0, 1, 2)]
        assert model.theta.dtype == torch.float64
        assert graph.factor(model.theta, 0)[1, 0] == math.log(3)  # variable 1 in state 1, variable 0 in state 0
        assert graph.factor(model.theta, 1).tolist() == [-math.inf, math.log(1e-3)]
        assert graph.factor(model.theta, 2)[1, 0, 1] == math.log(8)
        assert not model.theta[: graph.node_size].any()
        assert model.log_constant == math.log(2.5)

    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.replace("\n", "\r\n"),
            lambda t: " ".join(t.split()),
            lambda t: "\ufeff" + t,
            lambda t: t.replace("MARKOV", "markov"),
            lambda t: "\n\n" + t.replace(" ", "\t") + "\n\n",
        ],
    )
    def test_white_space_and_case_do_not_matter(self, write, change):
        plain, changed = rf.io.read_uai(write(SMALL)), rf.io.read_uai(write(change(SMALL), "changed.uai"))
        assert torch.equal(plain.theta, changed.theta)

    def test_bayes(self, write):
        assert rf.io.read_uai(write("BAYES 1 2 1 1 0 2 .3 .7")).kind == "BAYES"

    def test_no_factors_and_no_variables(self, write):
        assert rf.io.read_uai(write("MARKOV 2 2 2 0")).theta.tolist() == [0, 0, 0, 0]
        assert rf.io.read_uai(write("MARKOV 0 0")).graph.num_variables == 0

    def test_zero_constant_is_minus_infinity(self, write):
        assert rf.io.read_uai(write("MARKOV 1 2 1 0 1 0")).log_constant == -math.inf

    def test_impossible_model_is_for_inference_to_refuse(self, write):
        model = rf.io.read_uai(write("MARKOV 1 2 1 1 0 2 0 0"))
        with pytest.raises(rf.errors.ImpossibleEvidenceError):
            rf.infer(model.graph, model.theta)

    def test_exact_of_the_small_model(self, write):
        model = rf.io.read_uai(write(SMALL))
        t = [np.arange(1, 7).reshape(3, 2), 2.5, np.array([0, 1e-3]), np.arange(1, 13).reshape(2, 3, 2)]
        joint = np.einsum("ba,,c,abc->abc", *t)
        solution = rf.infer(model.graph, model.theta, rf.Exact())
        value = float(solution.log_partition) + model.log_constant
        assert value == pytest.approx(math.log(joint.sum()), rel=1e-12)
        assert model.graph.node(solution.mu, 1).numpy() == pytest.approx(joint.sum((0, 2)) / joint.sum())

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(data=st.data())
    def test_round_trip(self, write, data):
        states = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
        variables = list(range(len(states)))
        scope = st.lists(st.sampled_from(variables), min_size=1, max_size=3, unique=True)
        graph = rf.FactorGraph(states, data.draw(st.lists(scope, max_size=6)))
        shapes = [[states[v] for v in graph.scope(k)] for k in range(graph.num_factors)]
        value = st.one_of(st.just(0.0), st.floats(5e-324, 1e300))
        tables = [
            np.array(data.draw(st.lists(value, min_size=math.prod(s), max_size=math.prod(s)))).reshape(s)
            for s in shapes
        ]
        model = rf.io.read_uai(write(uai_text(graph, tables)))
        assert model.graph.num_states.tolist() == states
        for k, table in enumerate(tables):
            assert model.graph.scope(k) == graph.scope(k)
            with np.errstate(divide="ignore"):
                assert np.array_equal(model.graph.factor(model.theta, k).numpy(), np.log(table))

    def test_entries_are_not_read_one_by_one(self, write):
        n = 2000
        scopes = "\n".join(f"2 {k} {k + 1}" for k in range(n - 1))
        tables = "4\n0.25 0.5 1.125 2.0625\n" * (n - 1)
        path = write(f"MARKOV\n{n}\n{'2 ' * n}\n{n - 1}\n{scopes}\n{tables}")
        model = rf.io.read_uai(path)
        assert lines_run(lambda: rf.io.read_uai(path)) < 10 * n  # a Python loop over the entries would run far more
        assert model.graph.factor(model.theta, n - 2)[1, 1] == math.log(2.0625)


# (file, what the message must say)
MALFORMED = [
    ("", "expected the word MARKOV or BAYES. Found the end of the file after 0 tokens"),
    (" \n", "expected the word MARKOV or BAYES"),
    ("MARKOF 1 2 0", "expected the word MARKOV or BAYES at token 1 (line 1). Found 'MARKOF'"),
    ("3 2 2", "expected the word MARKOV or BAYES"),
    ("MARKOV", "expected the number of variables, a whole number of at least 0. Found the end"),
    ("MARKOV\n-1", "expected the number of variables, a whole number of at least 0 at token 2 (line 2). Found '-1'"),
    ("MARKOV\n2.5\n2 2 0", "Found '2.5'"),
    ("MARKOV\ntwo", "expected a number at token 2 (line 2). Found 'two'"),
    ("MARKOV 1000000000000 2 2 0", "the number of variables is 1000000000000 at token 2, but only 3 tokens follow"),
    ("MARKOV 1e300 2 2 0", "expected the number of variables"),
    ("MARKOV nan", "expected the number of variables"),
    (
        "MARKOV 2\n2 0\n0",
        "expected the number of states of variable 1, a whole number of at least 1 at token 4 (line 2)",
    ),
    ("MARKOV 2 2 2", "expected the number of factors"),
    ("MARKOV 1 2 1000000000000", "the number of factors is 1000000000000 at token 4, but only 0 tokens follow"),
    ("MARKOV 1 2 1 -1", "expected the arity of factor 0, a whole number in 0..1"),
    ("MARKOV 1 2 1 999999999999", "expected the arity of factor 0"),
    ("MARKOV 1 2 1 1 1 2 1 1", "expected variable 0 of the scope of factor 0, a whole number in 0..0"),
    ("MARKOV 2 2 2 1 2 0", "expected variable 1 of the scope of factor 0, a whole number in 0..1. Found the end"),
    ("MARKOV 2 2 2 1 2 0 0.5 1 1", "Found '0.5'"),
    ("MARKOV 2 2 2 1 2 1 1 4 1 1 1 1", "expected distinct variables in the scope of factor 0"),
    ("MARKOV 1 2 1 1 0 3 1 1 1", "2, the number of entries of the table of factor 0 at token 7"),
    ("MARKOV 1 2 1 1 0 2 1", "expected 2 entries in the table of factor 0 and their number. Found only 2 tokens"),
    ("MARKOV 1 2 2 1 0 1 0 2 1 1 2 1", "expected 2 entries in the table of factor 1. Found the end of the file"),
    ("MARKOV 1 2 2 1 0 1 0 2 1 1", "expected 2, the number of entries of the table of factor 1"),
    ("MARKOV 1 2 1 1 0 2 1 1 7", "expected the end of the file at token 10 (line 1). Found '7'"),
    ("MARKOV 1 2 1 1 0 2 1 -0.5", "an entry of the table of factor 0, a finite number of at least 0, at token 9"),
    ("MARKOV 1 2 1 1 0 2 nan 1", "Found 'nan'"),
    ("MARKOV 1 2 1 1 0 2 1 inf", "Found 'inf'"),
    ("MARKOV 1 2 1 1 0 2 1 1e400", "Found '1e400'"),
    (
        f"MARKOV 1 2 1 1 0 2 1 0.{'0' * 400}1",
        "expected 0 or a number of at least 5e-324 at token 9 (line 1). Found '0.0",
    ),
    (f"MARKOV 1 2 1 1 0 2 1 0.{'0' * 250}1e-90", "expected 0 or a number of at least 5e-324 at token 9 (line 1)."),
    ("MARKOV 1 2 1 1 0 2 1 1e-400", "expected 0 or a number of at least 5e-324 at token 9 (line 1). Found '1e-400'"),
    ("MARKOV 1 2 1 1 0 2 1 1-2", "expected a number at token 9 (line 1). Found '1-2'"),
    ("MARKOV 1 2 1 1 0 2 1 1_0", "Found '1_0'"),
    ("MARKOV 1 2 1 1 0 2 1 0x1", "Found '0x1'"),
    ("MARKOV 1 2 1 1 0 2 1 1,5", "Found '1,5'"),
    ("MARKOV 1 2 1 1 0 2 1 " + "x" * 5000, "Found 'xxxx"),
    ("MARKOV 40 " + "9 " * 40 + "1 40 " + " ".join(map(str, range(40))) + " 9 1 1", "entries in the table of factor 0"),
    (f"MARKOV 2 2 {MAX_FREE_STATES + 1} 0", "variable 1 has the most"),
    ("MARKOV 1 1000000000000000 0", "expected at most"),
    (b"\x80\x81\xfe\xff", "expected plain text. Found byte 0x80 at offset 0"),
    (b"MARKOV 1 2 0\x00", "expected plain text. Found byte 0x00 at offset 12"),
    ("MARKOV 1 2 0".encode("utf-16"), "expected plain text"),
    ("MARKOV 1 \u00b2 0", "expected plain text"),
]


@pytest.mark.parametrize(("content", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_model(write, content, message):
    path = write(content)
    with pytest.raises(rf.errors.FileFormatError) as caught:
        rf.io.read_uai(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 400 + len(str(path))


def test_missing_file_is_an_ordinary_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        rf.io.read_uai(tmp_path / "absent.uai")


class TestFuzz:
    """Whatever the bytes, the reader returns a model or raises `FileFormatError`, soon."""

    def check(self, path, content):
        path.write_bytes(content)
        message = f"{path}: "
        try:
            model = rf.io.read_uai(path)
        except rf.errors.FileFormatError as error:
            message = str(error)
        else:
            assert model.theta.shape == (model.graph.theta_size,)
            assert not (torch.isnan(model.theta) | (model.theta == math.inf)).any()
            assert not math.isnan(model.log_constant)
        assert message.startswith(f"{path}: ")

    fuzz = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

    @fuzz
    @given(content=st.binary(max_size=200))
    def test_bytes(self, tmp_path, content):
        self.check(tmp_path / "f.uai", content)
        self.check(tmp_path / "f.uai", b"MARKOV " + content)

    @fuzz
    @given(
        words=st.lists(
            st.one_of(
                st.integers(0, 3).map(str),
                st.sampled_from(
                    ["-1", "4", "10", "99999999999999999999", "1e12", "nan", "-inf", "1e-999", "0.5", "x", "-"]
                ),
            ),
            max_size=25,
        )
    )
    def test_tokens(self, tmp_path, words):
        self.check(tmp_path / "f.uai", ("MARKOV " + " ".join(words)).encode())

    @fuzz
    @given(seed=st.integers(0, 2**32))
    def test_mutations(self, tmp_path, seed):
        chance = random.Random(seed)
        content = bytearray(SMALL.encode())
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(content) + 1)
            match chance.randrange(4):
                case 0:
                    content[at : at + 1] = [chance.choice(b"0123456789 -.e\nMx\xff")]
                case 1:
                    del content[at : at + chance.randint(1, 8)]
                case 2:
                    content[at:at] = chance.choice([b" 1 ", b"9", b"0", b"-", b" 100000000000 ", b"e99", b"\n"])
                case 3:
                    content = content[:at]
        self.check(tmp_path / "f.uai", bytes(content))

    @fuzz
    @given(words=st.lists(st.sampled_from(["0", "1", "2", "3", "-1", "9" * 30, "nan", "x", "0.5"]), max_size=8))
    def test_evidence(self, tmp_path, words):
        graph = rf.FactorGraph([2, 3, 2, 4])
        path = tmp_path / "f.evid"
        path.write_text(" ".join(words))
        evidence, message = {}, f"{path}: "
        try:
            evidence = rf.io.read_evidence(path, graph)
        except rf.errors.FileFormatError as error:
            message = str(error)
        assert message.startswith(f"{path}: ")
        assert all(0 <= x < graph.num_states[v] for v, x in evidence.items())


class TestEvidence:
    graph = rf.FactorGraph([2, 3, 2, 2])

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("", {}),
            ("\n \n", {}),
            ("0", {}),
            ("0\n", {}),
            ("1 0", {}),  # one sample without observations
            ("1 2 1", {2: 1}),
            ("1\n1 2 1", {2: 1}),
            ("2 0 1 1 2", {0: 1, 1: 2}),
            ("1 2 0 1 1 2", {0: 1, 1: 2}),
            ("2 0 1 0 1", {0: 1}),
        ],
    )
    def test_reads(self, write, content, expected):
        assert rf.io.read_evidence(write(content), self.graph) == expected

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("1", "expected the number of observed variables to be 0, as 0 tokens follow at token 1"),
            ("2 0 1", "expected the number of observed variables to be 1, as 2 tokens follow"),
            ("0 2 0", "expected the number of observed variables to be 1"),
            ("2 1 0 1 1 1 0", "expected the number of observed variables to be 3"),
            ("2 1 0 1 1 1 0 1", "or the same after a number of samples of 1"),
            ("1000000000000", "expected the number of observed variables to be 0"),
            ("1 4 0", "expected an observed variable, a whole number in 0..3 at token 2 (line 1). Found '4'"),
            ("1 -1 0", "expected an observed variable"),
            ("1 1 3", "expected a state of variable 1, a whole number in 0..2 at token 3"),
            ("1 1 0.5", "Found '0.5'"),
            ("1 one 0", "expected a number at token 2"),
            ("2 0 0 0 1", "expected state 0 again for variable 0 at token 5"),
            (b"\xff\xfe", "expected plain text"),
        ],
    )
    def test_refuses(self, write, content, message):
        path = write(content, "e.evid")
        with pytest.raises(rf.errors.FileFormatError) as caught:
            rf.io.read_evidence(path, self.graph)
        assert message in str(caught.value)
        assert str(caught.value).startswith(f"{path}: ")


class TestAnswers:
    graph = rf.FactorGraph([3, 2, 3], [(0, 1)])

    def mu(self):
        return torch.cat([torch.tensor([0.25, 0.75, 0.2, 0.3, 0.5, 1 / 3, 1e-30, 2 / 3]), torch.zeros(6)]).double()

    def test_marginals_round_trip(self, tmp_path):
        path = tmp_path / "m.MAR"
        rf.io.write_mar(path, self.graph, self.mu())
        assert path.read_text().startswith("MAR\n3 3 0.2")
        read = read_mar(path, self.graph)
        torch.testing.assert_close(read, self.mu()[:8], rtol=1e-11, atol=0)
        rf.io.write_mar(path, self.graph, read)
        assert torch.equal(read_mar(path, self.graph), read)

    def test_older_files_count_samples(self, write):
        graph = rf.FactorGraph([2, 1])
        for text in ("MAR\n2 2 .5 .5 1 1", "MAR\n1\n2 2 .5 .5 1 1"):
            assert read_mar(write(text), graph).tolist() == [1, 0.5, 0.5]
        assert read_pr(write("PR\n1\n2")) == read_pr(write("PR 2")) == pytest.approx(math.log(100))

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("", "expected the word MAR."),
            ("PR 3", "expected the word MAR at token 1"),
            ("MAR", "expected the number of variables"),
            ("MAR 2 2 1 0 2 1 0", "expected the number of variables, a whole number in 3..3 at token 2"),
            ("MAR 3 3 1 0 0 3 1 0 3 1 0 0", "expected the number of states of variable 1, 2, at token 7"),
            ("MAR 3 3 1 0 0 2 1 0 3 1 0", "expected 11 numbers after the number of variables. Found the end"),
            ("MAR 3 3 1 0 0 2 1 0 3 1 0 0 0", "expected the end of the file at token 14"),
            ("MAR 3 3 1 0 0 2 1.5 0 3 1 0 0", "expected a probability at token 8 (line 1). Found '1.5'"),
            ("MAR 3 3 1 0 0 2 nan 0 3 1 0 0", "expected a probability"),
        ],
    )
    def test_malformed_marginals(self, write, content, message):
        with pytest.raises(rf.errors.FileFormatError) as caught:
            read_mar(write(content), self.graph)
        assert message in str(caught.value)

    @pytest.mark.parametrize("content", ["", "PR", "PR nan", "PR inf", "PR 1 2 3", "PR 2 3", "MAR 1", "PR x"])
    def test_malformed_partition_function(self, write, content):
        with pytest.raises(rf.errors.FileFormatError):
            read_pr(write(content))

    @pytest.mark.parametrize("value", [0.0, -1234.56789, 1e5, -math.inf])
    def test_partition_function_round_trip(self, tmp_path, value):
        rf.io.write_pr(tmp_path / "m.PR", value)
        assert read_pr(tmp_path / "m.PR") == pytest.approx(value, rel=1e-11)

    def test_states(self, tmp_path):
        write_mpe(tmp_path / "m.MPE", self.graph, torch.tensor([2, 1, 0]))
        assert (tmp_path / "m.MPE").read_text() == "MPE\n3 2 1 0\n"
        with pytest.raises(ValueError, match=r"of variable 1 must lie in 0..1"):
            write_mpe(tmp_path / "n.MPE", self.graph, torch.tensor([2, 2, 0]))

    def test_refused_numbers_write_nothing(self, tmp_path):
        with pytest.raises(ValueError, match="without a batch"):
            rf.io.write_mar(tmp_path / "m", self.graph, self.mu()[None])
        with pytest.raises(ValueError, match=r"`mu` must hold finite numbers. Got NaN or infinity."):
            rf.io.write_mar(tmp_path / "m", self.graph, self.mu() * math.nan)
        for value in (math.nan, math.inf):
            with pytest.raises(ValueError, match="must be finite or -inf"):
                rf.io.write_pr(tmp_path / "m", value)
        assert list(tmp_path.iterdir()) == []


class TestAtomicWrites:
    @pytest.mark.parametrize("broken", ["fsync", "replace"])
    def test_failure_leaves_the_old_file_and_nothing_else(self, tmp_path, monkeypatch, broken):
        path = tmp_path / "m.PR"
        rf.io.write_pr(path, 1.0)
        old = path.read_bytes()

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, broken, fail)
        with pytest.raises(OSError, match="No space left"):
            rf.io.write_pr(path, 2.0)
        assert path.read_bytes() == old
        assert list(tmp_path.iterdir()) == [path]

    def test_follows_links_and_umask(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link.PR").symlink_to(tmp_path / "real" / "m.PR")
        before = os.umask(0o022)
        try:
            rf.io.write_pr(tmp_path / "link.PR", 1.0)
        finally:
            os.umask(before)
        assert (tmp_path / "link.PR").is_symlink()
        assert stat.S_IMODE((tmp_path / "real" / "m.PR").stat().st_mode) == 0o644

    def test_missing_folder(self, tmp_path):
        with pytest.raises(FileNotFoundError):
            rf.io.write_pr(tmp_path / "absent" / "m.PR", 1.0)


@needs_instances
class TestInstances:
    """Competition instances with exact answers printed to 6 digits."""

    def load(self, name):
        model = rf.io.read_uai(UAI_FOLDER / f"{name}.uai")
        evidence = rf.io.read_evidence(UAI_FOLDER / f"{name}.uai.evid", model.graph)
        answer = read_mar(UAI_FOLDER / f"{name}.uai.MAR", model.graph)
        return model, evidence, answer, read_pr(UAI_FOLDER / f"{name}.uai.PR") / math.log(10)

    @pytest.mark.parametrize(
        "name",
        [
            *["Alchemy_11", "Pedigree_11", "Promedus_24", "Segmentation_12"],
            *[
                pytest.param(n, marks=pytest.mark.slow)
                for n in ("DBN_11", "Grids_11", "Grids_13", "ObjectDetection_11")
            ],
        ],
    )
    def test_exact(self, name):
        model, evidence, answer, log10 = self.load(name)
        solution = rf.infer(model.graph, model.theta, rf.Exact(), evidence=evidence)
        assert (solution.mu[: model.graph.node_size] - answer).abs().max() <= 5e-7 * (1 + 1e-3)
        value = (float(solution.log_partition) + model.log_constant) / math.log(10)
        digits = 6 - len(str(abs(int(log10))))
        assert value == pytest.approx(log10, abs=0.5001 * 10**-digits)

    # Undamped sequential loopy belief propagation; largest error of a marginal.
    @pytest.mark.parametrize(
        ("name", "error"),
        [("Segmentation_12", 9e-5), ("Alchemy_11", 1.3e-3), ("Promedus_24", 3.9e-3), ("ObjectDetection_11", 0.034)],
    )
    def test_loopy_belief_propagation(self, name, error):
        model, evidence, answer, _ = self.load(name)
        solution = rf.infer(model.graph, model.theta, evidence=evidence, stop=rf.Stop(tol=1e-8))
        assert solution.converged
        assert (solution.mu[: model.graph.node_size] - answer).abs().max() == pytest.approx(error, rel=0.05)

    def test_toy_models(self):
        for name in ("ChestClinic", "simple5", "grid4x4"):
            model = rf.io.read_uai(UAI_FOLDER / f"{name}.uai")
            assert rf.infer(model.graph, model.theta, rf.Exact()).converged

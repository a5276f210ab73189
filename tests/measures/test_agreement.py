"""Every measure against its slow form, recorded in 50 digits, on inputs on which floats run out."""

import numpy as np
import pytest
import torch

import oracles
import reference
from crate_interp import measures
from oracle_cases import (
    BATCH,
    DIFFERENCES,
    EPS,
    LAMBD,
    LAYERS,
    NUMBERS,
    OTHERS,
    RECORDED,
    SHAPES,
    SHARES,
    SIGMA,
    TENSORS,
    TOKENS,
    in_dtype,
    sample,
)
from selection import few, is_recomputed

PRECISION = {"float64": 1e-12, "float32": 1e-5}


def relative(found, wanted, unit):
    """Returns the errors in units; equal numbers, infinities too, have none."""
    with np.errstate(invalid="ignore"):
        return np.where(found == wanted, 0, abs(found - wanted) / unit)


def check(name, kind, dtype, scale, rel=None, of=lambda x: x, call=None):
    """Compares a measure of the batch with the record of each sample.

    scale(sample, wanted) is what errors are relative to; `of` is applied to both sides.
    """
    for shape in SHAPES:
        s = in_dtype(oracles.inputs(kind, shape), oracles.DTYPES[dtype])
        got = of((call or RECORDED[name])(measures, s))
        assert got.dtype == oracles.DTYPES[dtype] and got.shape[0] == BATCH
        for i in range(BATCH):
            wanted = of(oracles.recorded(name, kind, shape, dtype, i))
            found = got[i].double().numpy()
            assert found.shape == wanted.shape
            tiny = torch.finfo(got.dtype).tiny  # subnormal numbers have few digits
            unit = np.maximum(scale(sample(s, i), wanted), tiny)
            error = relative(found, wanted, unit)
            worst = np.unravel_index(error.argmax(), error.shape)
            where = f"{shape} {i} {worst}: got {found[worst]!r}, wanted {wanted[worst]!r}"
            assert error.max() <= (rel or PRECISION[dtype]), f"{where}, off by {error.max():.1e}"
            case = oracles.case(name, shape, dtype, i)
            if is_recomputed(f"{kind}; {case}"):
                again = of(oracles.computed(name, oracles.inputs(kind, shape), dtype, i))
                stale = relative(again, wanted, unit).max()
                assert stale <= 1e-13, f"the record of {kind}; {case} is off: see `make oracles`"


cases = [pytest.mark.parametrize("dtype", PRECISION), pytest.mark.parametrize("kind", TOKENS)]


def every(names):
    return lambda test: cases[0](cases[1](pytest.mark.parametrize("name", names)(test)))


@every(NUMBERS)
def test_numbers(name, kind, dtype):
    check(name, kind, dtype, lambda s, wanted: abs(wanted))


@every(TENSORS)
def test_tensors(name, kind, dtype):
    check(name, kind, dtype, lambda s, wanted: abs(wanted).max())


@every(DIFFERENCES)
def test_differences(name, kind, dtype):
    _, terms = DIFFERENCES[name]

    def larger_term(s, wanted):
        return np.maximum(abs(np.asarray(terms(s))).max(), abs(wanted))

    check(name, kind, dtype, larger_term)


@every(SHARES)
def test_shares(name, kind, dtype):
    check(name, kind, dtype, lambda s, wanted: 1.0)


@every(["condition_number"])
def test_condition_number(name, kind, dtype):
    """A float64 SVD knows the smallest singular value to the rounding of the largest.

    Where that is all there is, the reciprocal is right to 1e-12.
    """
    if kind in ("rank 2", "repeated") or (kind == "badly scaled" and dtype == "float64"):
        check(name, kind, dtype, lambda s, wanted: 1.0, rel=1e-12, of=lambda x: 1 / x)
    else:
        check(name, kind, dtype, lambda s, wanted: abs(wanted))


@every(["layer_objectives"])
def test_layer_objectives(name, kind, dtype):
    def larger_term(s, wanted):
        first = LAYERS[0](s.z)
        pairs = zip((first, LAYERS[1](first)), s.bases, strict=True)
        terms = [
            reference.objective_terms(z, u, EPS, LAMBD, reference.l0_norm, False) for z, u in pairs
        ]
        return abs(np.array(terms)).max(axis=1)

    check(name, kind, dtype, larger_term, call=lambda m, s: OTHERS[name](m, s).T)


@every(few(["float", "weighted"]))
def test_lasso_solution(name, kind, dtype):
    """The minimum is one, the code may not be: its objective and the conditions of optimality hold.

    A solution that is only rounded to float32 has both.
    """
    tol, most = (1e-10, 20_000) if dtype == "float64" else (1e-8, 5_000)
    for shape in SHAPES:
        s = in_dtype(oracles.inputs(kind, shape), oracles.DTYPES[dtype])
        lambd = LAMBD if name == "float" else s.lambd
        got = measures.lasso_solution(s.z, s.d, lambd, tol=tol, max_steps=most)
        assert got.dtype == oracles.DTYPES[dtype] and got.min() >= 0
        for i in range(BATCH):
            one = sample(s, i)
            lambd_i = LAMBD if name == "float" else one.lambd
            best = reference.lasso_solution(one.z, one.d, lambd_i)
            found = got[i].double().numpy()
            least = reference.lasso_objective(best, one.z, one.d, lambd_i)
            value = reference.lasso_objective(found, one.z, one.d, lambd_i)
            residual = reference.lasso_kkt_residual(found, one.z, one.d, lambd_i) / np.linalg.norm(
                one.z @ one.d, axis=1
            )
            assert (abs(value - least) / least).max() <= 1e-9, f"{shape} {i}: {value} for {least}"
            assert residual.max() <= (1e-9 if dtype == "float64" else 1e-6), (
                f"{shape} {i}: {residual}"
            )


def test_the_reference_of_the_posterior():
    """The formula is what the densities give, for orthonormal bases."""
    s = sample(in_dtype(oracles.inputs("random", "tall"), torch.float64), 1)
    wanted = reference.bayes_mean(s.z, s.orthonormal, SIGMA)
    np.testing.assert_allclose(
        reference.posterior_mean(s.z, s.orthonormal, SIGMA), wanted, rtol=1e-12, atol=1e-13
    )


@pytest.mark.parametrize("n", [1, 2, 35, 4099])
def test_causal_uniform_entropy(n):
    assert measures.causal_uniform_entropy(n) == pytest.approx(
        reference.causal_uniform_entropy(n), rel=1e-12
    )


# the record


@pytest.mark.parametrize("kind", TOKENS)
def test_every_case_is_recorded_and_no_other(kind):
    wanted = {
        oracles.case(name, shape, dtype, i)
        for name in RECORDED
        for shape in SHAPES
        for dtype in PRECISION
        for i in range(BATCH)
    }
    assert set(oracles.read(kind)["wanted"]) == wanted, "run `make oracles`"


def test_a_record_that_is_off_is_noticed(monkeypatch):
    """By a tenth of the runs, in which its oracle is computed again; and by the measure itself."""
    monkeypatch.setitem(globals(), "is_recomputed", lambda case: True)
    kept = oracles.recorded
    check("effective_rank", "random", "float32", lambda s, wanted: abs(wanted))
    for factor, message in ((1 + 1e-9, "see `make oracles`"), (1 + 1e-3, "off by 1.0e-03")):
        monkeypatch.setattr(oracles, "recorded", lambda *of, by=factor: kept(*of) * by)
        with pytest.raises(AssertionError, match=message):
            check("effective_rank", "random", "float32", lambda s, wanted: abs(wanted))

"""Primitives of other libraries run as they were traced, and `explain` says so."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_derivatives import linear_call
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

import jamp
from shared.jaxprs import equations
from tests.jaxprs import products

from .squares import N, arrays, half

pytestmark = [pytest.mark.usefixtures("standard_promotion")]

# A primitive as a library makes it: it holds a jaxpr, and has rules for it.
theirs_p = Primitive("theirs")


def theirs_impl(*args, inside):
    return jaxpr_as_fun(inside)(*args)[0]


def theirs_jvp(primals, tangents, *, inside):
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    run = functools.partial(theirs_impl, inside=inside)
    return jax.jvp(run, tuple(primals), tuple(tangents))


theirs_p.def_impl(theirs_impl)
theirs_p.def_abstract_eval(lambda *args, inside: inside.out_avals[0])
ad.primitive_jvps[theirs_p] = theirs_jvp
mlir.register_lowering(theirs_p, mlir.lower_fun(theirs_impl, multiple_results=False))


def theirs(x, w):
    return theirs_p.bind(x, w, inside=jax.make_jaxpr(jnp.matmul)(x, w))


def model(x, w):
    return jnp.sum(jnp.sin(theirs(x, w) @ w))


@jax.custom_vjp
def rematerialized(x, w):
    return jnp.sin(x @ w)


def backward(residuals, g):
    x, w = residuals
    g = g * jnp.cos(x @ w)
    return g @ w.T, x.T @ g


rematerialized.defvjp(
    lambda x, w: (jnp.sin(x @ w), (x, w)), backward, optimize_remat=True
)


def linear(x, w):
    return linear_call(lambda w, x: x @ w, lambda w, g: g @ w.T, w, x)


@pytest.mark.parametrize(
    ("function", "way"),
    [
        (function, way)
        for function in (rematerialized, linear)
        for way in ("around", "inside", "jit", "checkpoint", "vmap")
        if (function, way) != (linear, "vmap")  # JAX has no rule for it
    ],
)
def test_jax_s_own_that_nobody_trains_through_run_as_they_were_traced(function, way):
    x, w = arrays()
    run = {
        "jit": jax.jit,
        "checkpoint": jax.checkpoint,
        "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[:, None], w)[:, 0],
    }.get(way, lambda f: f)(function)

    def loss(x):
        return jnp.sum(jnp.sin(run(x @ w, w)))

    expected = jax.grad(lambda x: jnp.sum(jnp.sin(function(x @ w, w))))(x)
    found = half()(jax.grad(loss)) if way == "inside" else jax.grad(half()(loss))
    np.testing.assert_allclose(jax.jit(found)(x), expected, rtol=0.02, atol=0.02)
    assert {"float16"} in products(found, x)


@pytest.mark.parametrize("jit", [False, True])
def test_a_primitive_of_another_library_is_left_alone(jit):
    x, w = arrays()
    with half():
        found = (jax.jit(theirs) if jit else theirs)(x, w)
    np.testing.assert_array_equal(found, theirs(x, w))  # nothing was rounded

    region = half()(jax.jit(model) if jit else model)
    assert {"float16"} in products(region, x, w)
    assert {"float32"} in products(region, x, w)
    np.testing.assert_allclose(region(x, w), model(x, w), rtol=0.01)
    expected = jax.grad(model, 1)(x, w)
    for gradient in (jax.grad(region, 1), half()(jax.grad(model, 1))):
        found = gradient(x, w)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=0.05, atol=0.02)


def test_a_jitted_function_gives_it_the_dtypes_that_it_was_traced_with():
    x, w = arrays()

    @jax.jit
    def function(x, w):
        return theirs(x @ w, w)

    found = equations(jax.make_jaxpr(half()(function))(x, w))
    dtypes = [e.invars[0].aval.dtype for e in found if e.primitive is theirs_p]
    assert dtypes == [jnp.float32]
    np.testing.assert_allclose(half()(function)(x, w), function(x, w), rtol=0.02)


@pytest.mark.parametrize("jit", [False, True])
def test_custom_partitioning_is_left_alone(jit):
    x, _ = arrays()

    @custom_partitioning
    def squared(x):
        return x @ x

    squared.def_partition(
        partition=lambda mesh, given, made: None, sharding_rule="i j -> i j"
    )
    function = jax.jit(squared) if jit else squared
    with half():
        found = function(x)
    np.testing.assert_array_equal(found, squared(x))


def test_explain_says_what_is_left_alone():
    explanation = jamp.debug.explain(jax.jit(model), dtype=jnp.float16)(*arrays())
    rules = {row.rule: row.op for row in explanation.rows}
    assert rules["left_alone"] == "dot_general"  # what runs inside of it
    assert any("left_alone" in line for line in explanation.found)


def optimum(solver):
    import optimistix

    def residual(y, w):
        return jnp.tanh(w @ y) + 2 * y - 1

    def squares(y, w):
        return jnp.sum(residual(y, w) ** 2)

    def contraction(y, w):
        return jnp.tanh(w @ y) / 3 + 1

    run, function = {
        "Newton": (optimistix.root_find, residual),
        "LevenbergMarquardt": (optimistix.least_squares, residual),
        "GaussNewton": (optimistix.least_squares, residual),
        "BFGS": (optimistix.minimise, squares),
        "FixedPointIteration": (optimistix.fixed_point, contraction),
    }[solver]
    made = getattr(optimistix, solver)(1e-3, 1e-3)
    return lambda w: run(function, made, jnp.zeros(N), w, throw=False).value


def solution(solver):
    import lineax

    matrix = lambda w: w @ w.T / 4 + jnp.eye(N)
    tag = lineax.positive_semidefinite_tag

    def solved(w):
        right = jnp.linspace(0.0, 1.0, N)
        if solver == "function":
            shape = jax.ShapeDtypeStruct((N,), jnp.float32)
            product = lambda x: x + w.T @ (w @ x)
            operator = lineax.FunctionLinearOperator(product, shape, tag)
            made = lineax.CG(1e-4, 1e-4)
        elif solver == "jacobian":
            function = lambda y, _: jnp.tanh(w @ y) + 2 * y
            operator = lineax.JacobianLinearOperator(function, jnp.zeros(N))
            made = lineax.LU()
        else:
            matrices = matrix(w).astype(jnp.float32)
            operator = lineax.MatrixLinearOperator(matrices, tag)
            made = getattr(lineax, solver)()
        return lineax.linear_solve(operator, right, made).value

    return solved


def path(solver):
    import diffrax

    def solved(w):
        term = diffrax.ODETerm(lambda t, y, w: -jnp.tanh(w @ y))
        steps = diffrax.PIDController(rtol=1e-4, atol=1e-4)
        made, start = getattr(diffrax, solver)(), jnp.linspace(0.0, 1.0, N)
        return diffrax.diffeqsolve(
            term, made, 0, 1, 0.1, start, w, stepsize_controller=steps, throw=False
        ).ys

    return solved


@pytest.mark.parametrize(
    ("library", "make", "solver"),
    [
        *(
            ("optimistix", optimum, name)
            for name in "Newton LevenbergMarquardt GaussNewton BFGS "
            "FixedPointIteration".split()
        ),
        *(
            ("lineax", solution, name)
            for name in "LU QR SVD Cholesky function jacobian".split()
        ),
        *(("diffrax", path, name) for name in "Dopri5 Kvaerno5".split()),
    ],
)
def test_solvers_of_other_libraries(library, make, solver):
    pytest.importorskip(library)
    _, w = arrays()
    function = make(solver)
    inside = half()(function if solver in ("Newton", "LU") else jax.jit(function))

    def loss(function):
        return jax.grad(lambda w: jnp.sum(function(w) ** 2))

    for found, expected in (
        (inside(w), function(w)),
        (loss(inside)(w), loss(function)(w)),
        (half()(loss(function))(w), loss(function)(w)),
    ):
        assert found.dtype == jnp.float32
        error = jnp.linalg.norm(found - expected) / jnp.linalg.norm(expected)
        assert error < 0.01

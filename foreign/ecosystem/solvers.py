"""Calls of diffrax, lineax and optimistix, and programs that solve with them."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import PROGRAM_BOUND, Call, Table
from .jax_numpy import SYMMETRIC

SMALL = SYMMETRIC / 8


def diffrax_calls() -> list[Call]:
    dfx = import_module("diffrax")
    table = Table("diffrax")

    def solve(h: jax.Array, y: jax.Array, solver: Any, **options: Any) -> jax.Array:
        field = lambda t, y, a: -jnp.tanh(a @ y)
        options = {"dt0": 0.1, "max_steps": 256} | options
        term = dfx.ODETerm(field)
        return dfx.diffeqsolve(term, solver, 0.0, 1.0, y0=y, args=h, **options).ys

    control = dfx.PIDController(rtol=1e-3, atol=1e-3)
    makers: dict[str, tuple[Any, dict[str, Any]]] = {
        "Euler": (dfx.Euler(), {}),
        "Tsit5(PIDController)": (dfx.Tsit5(), {"stepsize_controller": control}),
        "Dopri5(SaveAt)": (
            dfx.Dopri5(),
            {"saveat": dfx.SaveAt(ts=jnp.linspace(0.1, 1, 4))},
        ),
        "Tsit5(BacksolveAdjoint)": (dfx.Tsit5(), {"adjoint": dfx.BacksolveAdjoint()}),
    }
    for name, (solver, options) in makers.items():
        wide = lambda a, y, s=solver, o=options: solve(a, y.astype(jnp.float32), s, **o)
        table(name, wide, SMALL, (6,), counts=True)
    half = lambda a, y: solve(a, y, dfx.Tsit5())
    table("Tsit5 from half", half, SMALL, (6,), counts=True)
    times = jnp.linspace(0.0, 1.0, 16)
    linear = lambda h: dfx.LinearInterpolation(times, h).evaluate(0.37)
    table("LinearInterpolation", linear, (16, 4), counts=True)

    def cubic(h: jax.Array) -> jax.Array:
        coefficients = dfx.backward_hermite_coefficients(times, h)
        return dfx.CubicInterpolation(times, coefficients).evaluate(0.37)

    table("CubicInterpolation", cubic, (16, 4), counts=True)

    def noisy(y: jax.Array) -> jax.Array:
        path = dfx.VirtualBrownianTree(0.0, 1.0, 1e-2, (4,), jax.random.key(0))
        drift = dfx.ODETerm(lambda t, y, _: -y)
        noise = dfx.ControlTerm(lambda t, y, _: jnp.eye(4) * 0.1, path)
        return dfx.diffeqsolve(
            dfx.MultiTerm(drift, noise),
            dfx.Euler(),
            0.0,
            1.0,
            0.1,
            y.astype(jnp.float32),
            max_steps=32,
        ).ys

    table("Euler of an SDE", noisy, (4,), counts=True)

    def controlled(h: jax.Array, y: jax.Array) -> jax.Array:
        path = dfx.LinearInterpolation(times, h)
        term = dfx.ControlTerm(lambda t, y, a: jnp.tanh(y)[:, None] * 0.5, path)
        term = term.to_ode()
        return dfx.diffeqsolve(
            term, dfx.Heun(), 0.0, 1.0, 0.1, y.astype(jnp.float32), max_steps=32
        ).ys

    table("Heun of a CDE", controlled, (16, 1), (4,), counts=True)

    def stiff(a: jax.Array, y: jax.Array) -> jax.Array:
        return solve(
            a, y.astype(jnp.float32), dfx.Kvaerno5(), stepsize_controller=control
        )

    program(table, "Kvaerno5", stiff, SMALL, (6,))
    return table.calls


def program(table: Table, name: str, function: Any, *inputs: Any, **more: Any) -> None:
    table(name, function, *inputs, counts=True, bound=PROGRAM_BOUND, **more)


def lineax_calls() -> list[Call]:
    lx = import_module("lineax")
    table = Table("lineax")
    close = {"rtol": 1e-3, "atol": 1e-3}
    dense = {
        "LU": lx.LU(),
        "QR": lx.QR(),
        "SVD": lx.SVD(),
        "AutoLinearSolver": lx.AutoLinearSolver(well_posed=True),
        "GMRES": lx.GMRES(**close),
        "BiCGStab": lx.BiCGStab(**close),
    }
    definite = {"Cholesky": lx.Cholesky(), "CG": lx.CG(**close)}
    for name, solver in (dense | definite).items():
        tags = lx.positive_semidefinite_tag if name in definite else ()

        def solve(
            a: jax.Array, b: jax.Array, solver: Any = solver, tags: Any = tags
        ) -> jax.Array:
            operator = lx.MatrixLinearOperator(a.astype(jnp.float32), tags)
            return lx.linear_solve(operator, b.astype(jnp.float32), solver).value

        table(name, solve, SYMMETRIC, (6,), counts=True)
    halves = lambda a, b: lx.linear_solve(lx.MatrixLinearOperator(a), b, lx.LU()).value
    table("LU of half", halves, SYMMETRIC, (6,))
    mixed = lambda a, b: (
        lx.linear_solve(
            lx.MatrixLinearOperator(a), b.astype(jnp.float32), lx.LU()
        ).value
    )
    table("LU of half and float32", mixed, SYMMETRIC, (6,), counts=True)
    tall = lambda a, b: (
        lx.linear_solve(
            lx.MatrixLinearOperator(a.astype(jnp.float32)),
            b.astype(jnp.float32),
            lx.AutoLinearSolver(well_posed=None),
        ).value
    )
    table("least squares", tall, (8, 3), (8,), counts=True)
    operators(table, lx)
    return table.calls


def operators(table: Table, lx: Any) -> None:
    """Each operator, made of a product that runs in half precision."""
    shape = jax.ShapeDtypeStruct((6,), jnp.float32)
    matrix = lambda a: lx.MatrixLinearOperator(a.astype(jnp.float32))
    apply = lambda a: lx.FunctionLinearOperator(lambda x: a @ x, shape)
    slope = lambda a: lx.JacobianLinearOperator(
        lambda x, _: a @ jnp.tanh(x), jnp.zeros(6, jnp.float32)
    )
    solver = lx.GMRES(rtol=1e-4, atol=1e-4, max_steps=60)
    direct = lx.LU()
    made: dict[str, tuple[Any, Any]] = {
        "MatrixLinearOperator": (matrix, direct),
        "FunctionLinearOperator": (apply, direct),
        "FunctionLinearOperator(GMRES)": (apply, solver),
        "JacobianLinearOperator": (slope, direct),
        "sum of operators": (
            lambda a: matrix(a) + lx.IdentityLinearOperator(shape),
            direct,
        ),
        "product of operators": (lambda a: matrix(a) @ apply(a), direct),
        "transpose": (lambda a: matrix(a).T, direct),
        "TridiagonalLinearOperator": (
            lambda a: lx.TridiagonalLinearOperator(
                *(jnp.diagonal(a, k).astype(jnp.float32) for k in (0, -1, 1))
            ),
            lx.Tridiagonal(),
        ),
        "DiagonalLinearOperator": (
            lambda a: lx.DiagonalLinearOperator(jnp.diagonal(a).astype(jnp.float32)),
            lx.Diagonal(),
        ),
        "TaggedLinearOperator": (
            lambda a: lx.TaggedLinearOperator(matrix(a), lx.lower_triangular_tag),
            lx.Triangular(),
        ),
    }
    for name, (make, solver) in made.items():

        def solve(
            a: jax.Array, b: jax.Array, make: Any = make, solver: Any = solver
        ) -> jax.Array:
            return lx.linear_solve(make(a), b.astype(jnp.float32), solver).value

        program(table, name, solve, SYMMETRIC, (6,))


def optimistix_calls() -> list[Call]:
    optx = import_module("optimistix")
    table = Table("optimistix")
    start = jnp.zeros(6)
    near = {"rtol": 1e-2, "atol": 1e-2}
    close = {"rtol": 1e-3, "atol": 1e-3}
    target = jnp.asarray(np.cos(np.arange(6.0)), jnp.float32)

    def residual(y: jax.Array, a: jax.Array) -> jax.Array:
        return y + 0.5 * jnp.tanh(a @ y) - target

    def energy(y: jax.Array, a: jax.Array) -> jax.Array:
        return jnp.sum(residual(y, a) ** 2)

    def iterate(y: jax.Array, a: jax.Array) -> jax.Array:
        return target - 0.5 * jnp.tanh(a @ y)

    bisect = lambda a: (
        optx.root_find(
            lambda y, a: y**3 + y - jnp.sum(a),
            optx.Bisection(**near),
            0.0,
            a,
            options={"lower": -4.0, "upper": 4.0},
        ).value
    )
    table("Bisection", bisect, SMALL / 4, counts=True)
    others: dict[str, Any] = {
        "Chord": lambda a: optx.root_find(residual, optx.Chord(**close), start, a),
        "Dogleg": lambda a: optx.least_squares(
            residual, optx.Dogleg(**close), start, a
        ),
        "GaussNewton": lambda a: optx.least_squares(
            residual, optx.GaussNewton(**close), start, a
        ),
        "NelderMead": lambda a: optx.minimise(
            energy, optx.NelderMead(**near), start, a, max_steps=1000
        ),
        "NonlinearCG": lambda a: optx.minimise(
            energy, optx.NonlinearCG(**close), start, a
        ),
        "GradientDescent": lambda a: optx.minimise(
            energy, optx.GradientDescent(0.1, **close), start, a
        ),
    }
    for name, run in others.items():
        table(name, lambda a, run=run: run(a).value, SMALL, counts=True)
    programs: dict[str, Any] = {
        "Newton": lambda a: optx.root_find(residual, optx.Newton(**close), start, a),
        "LevenbergMarquardt": lambda a: optx.least_squares(
            residual, optx.LevenbergMarquardt(**close), start, a
        ),
        "BFGS": lambda a: optx.minimise(energy, optx.BFGS(**close), start, a),
        "fixed_point": lambda a: optx.fixed_point(
            iterate, optx.FixedPointIteration(**close), start, a
        ),
    }
    for name, run in programs.items():
        program(table, name, lambda a, run=run: run(a).value, SMALL)
    return table.calls


LIBRARIES = {
    "diffrax": diffrax_calls,
    "lineax": lineax_calls,
    "optimistix": optimistix_calls,
}

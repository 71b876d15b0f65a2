"""Calls of optax and jaxopt."""

from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Call, Table
from .jax_numpy import MANY, SYMMETRIC, TABLE

LABELS = np.arange(64) % 8


def optax_calls() -> list[Call]:
    optax = import_module("optax")
    table = Table("optax")
    losses(table, optax)
    projections(table, optax)
    updates(table, optax)
    return table.calls


def losses(table: Table, optax: Any) -> None:
    chances = jnp.full(TABLE, 0.125)
    hot = jax.nn.one_hot(LABELS, 8)
    signs = jnp.where(LABELS[:, None] > 3, 1.0, -1.0)
    named = {
        "softmax_cross_entropy": lambda h: optax.softmax_cross_entropy(h, hot),
        "softmax_cross_entropy_with_integer_labels": lambda h: (
            optax.softmax_cross_entropy_with_integer_labels(h, LABELS)
        ),
        "sigmoid_binary_cross_entropy": lambda h: optax.sigmoid_binary_cross_entropy(
            h, hot
        ),
        "sigmoid_focal_loss": lambda h: optax.sigmoid_focal_loss(h, hot),
        "poly_loss_cross_entropy": lambda h: optax.losses.poly_loss_cross_entropy(
            h, hot
        ),
        "huber_loss": lambda h: optax.huber_loss(h, hot),
        "l2_loss": lambda h: optax.l2_loss(h, hot),
        "squared_error": lambda h: optax.squared_error(h, hot),
        "log_cosh": lambda h: optax.log_cosh(h, hot),
        "cosine_similarity": lambda h: optax.cosine_similarity(h, chances),
        "cosine_distance": lambda h: optax.cosine_distance(h, chances),
        "hinge_loss": lambda h: optax.hinge_loss(h, signs),
        "kl_divergence": lambda h: optax.kl_divergence(jax.nn.log_softmax(h), chances),
        "convex_kl_divergence": lambda h: optax.convex_kl_divergence(
            jax.nn.log_softmax(h), chances
        ),
        "multiclass_hinge_loss": lambda h: optax.losses.multiclass_hinge_loss(
            h, LABELS
        ),
        "multiclass_perceptron_loss": lambda h: optax.losses.multiclass_perceptron_loss(
            h, LABELS
        ),
        "multiclass_sparsemax_loss": lambda h: optax.losses.multiclass_sparsemax_loss(
            h, LABELS
        ),
        "sparsemax_loss": lambda h: optax.losses.sparsemax_loss(h, hot > 0),
        "ntxent": lambda h: optax.ntxent(h, jnp.asarray(LABELS)),
        "triplet_margin_loss": lambda h: optax.losses.triplet_margin_loss(h, -h, h + 1),
        "smooth_labels": lambda h: optax.softmax_cross_entropy(
            h, optax.smooth_labels(hot, 0.1)
        ),
        "ranking_softmax_loss": lambda h: optax.losses.ranking_softmax_loss(h, hot),
        "dice_loss": lambda h: optax.losses.dice_loss(h, hot),
    }
    for name, function in named.items():
        table(name, function, TABLE, counts=True)
    padding = jnp.zeros((4, 3))

    def ctc(h: jax.Array) -> jax.Array:
        none = jnp.zeros((4, 16))
        labels = jnp.asarray(LABELS[:12].reshape(4, 3) % 7 + 1)
        return optax.ctc_loss(h, none, labels, padding)

    table("ctc_loss", ctc, (4, 16, 8), counts=True)
    padded(table, optax)


def padded(table: Table, optax: Any) -> None:
    """Padding, masks of -1e5 and -1e9, and targets past 65504, beside `h`."""

    def ctc(function: Any) -> Any:
        """Rows of 16, 3, 2 and 0 frames, and 3, 3, 1 and 0 labels."""
        none = jnp.arange(16) >= jnp.array([16, 3, 2, 0])[:, None]
        unused = jnp.arange(3) >= jnp.array([3, 3, 1, 0])[:, None]
        labels = jnp.asarray(LABELS[:12].reshape(4, 3) % 7 + 1)
        masks = none.astype(jnp.float32), labels, unused.astype(jnp.float32)
        return lambda h: function(h, *masks)

    forward = lambda *given: optax.losses.ctc_loss_with_forward_probs(*given)[0]
    table("ctc_loss of a padded batch", ctc(optax.ctc_loss), (4, 16, 8), counts=True)
    table("ctc_loss_with_forward_probs", ctc(forward), (4, 16, 8), counts=True)
    hot = jax.nn.one_hot(LABELS % 6, 8)
    logits = lambda h, least: jnp.where(jnp.arange(8) > 5, least, h)
    for least in (-1e5, -1e9):
        for name in ("softmax_cross_entropy", "safe_softmax_cross_entropy"):
            loss = getattr(optax, name)
            masked = lambda h, loss=loss, least=least: loss(logits(h, least), hot)
            table(f"{name} at {least:.0e}", masked, TABLE, counts=True)
    for name in ("huber_loss", "l2_loss", "squared_error", "log_cosh"):
        loss = getattr(optax, name)
        far = lambda h, loss=loss: loss(h, hot * 7e4)
        table(f"{name} at 7e4", far, TABLE, gradient=False)  # float16 has none of 7e4
    signs = jnp.where(LABELS > 3, 1003.0, -1003.0)
    perceptron = lambda h: optax.losses.perceptron_loss(h[:, 0], signs)
    table("perceptron_loss at 1003", perceptron, TABLE, counts=True)


def projections(table: Table, optax: Any) -> None:
    module = optax.projections
    table.prefix = "optax.projections"
    names = "projection_simplex projection_l1_ball projection_l2_ball"
    names += " projection_l1_sphere projection_l2_sphere projection_non_negative"
    names += " projection_linf_ball projection_hypercube"
    table.each(module, names, (32,), counts=True)


def updates(table: Table, optax: Any) -> None:
    """One update from half-precision gradients of float32 parameters."""
    table.prefix = "optax"
    weights = jnp.ones(TABLE)
    makers = {
        "adamw": lambda: optax.adamw(1e-2),
        "sgd(momentum)": lambda: optax.sgd(1e-2, 0.9),
        "adafactor": lambda: optax.adafactor(1e-2),
        "lamb": lambda: optax.lamb(1e-2),
        "rmsprop": lambda: optax.rmsprop(1e-2),
        "lion": lambda: optax.lion(1e-2),
        "clip_by_global_norm": lambda: optax.clip_by_global_norm(1.0),
        "adaptive_grad_clip": lambda: optax.adaptive_grad_clip(0.1),
        "ema": lambda: optax.ema(0.9),
        "centralize": lambda: optax.centralize(),
        "normalize_by_update_norm": lambda: optax.normalize_by_update_norm(),
    }
    for name, make in makers.items():

        def update(h: jax.Array, make: Any = make) -> Any:
            inner = make()
            return inner.update(h, inner.init(weights), weights)[0]

        table(
            f"{name}.update", update, TABLE, gradient=False, counts="clip" not in name
        )
    table("global_norm", optax.global_norm, MANY, scale=10.0, counts=True)
    table("tree.vdot", lambda h: optax.tree.vdot(h, h), MANY, scale=10.0, counts=True)
    table(
        "incremental_update",
        lambda h: optax.incremental_update(h, jnp.zeros(TABLE), 1e-3),
        TABLE,
    )
    top = lambda h: optax.power_iteration(h, num_iters=50)[0]
    table("power_iteration", top, SYMMETRIC, gradient=False, counts=True)


def jaxopt_calls() -> list[Call]:
    jaxopt = import_module("jaxopt")
    table = Table("jaxopt")
    table.each(
        jaxopt.projection, "projection_simplex projection_l1_ball", (32,), counts=True
    )
    labels = jnp.asarray(LABELS)
    for name in ("multiclass_logistic_loss", "multiclass_sparsemax_loss"):
        loss = jax.vmap(getattr(jaxopt.loss, name))
        table(name, lambda h, loss=loss: loss(labels, h), TABLE, counts=True)
    huber = lambda h: jax.vmap(jaxopt.loss.huber_loss)(jnp.zeros(512), h)
    table("huber_loss", huber, (512,), scale=3.0, counts=True)
    target = jnp.ones(6)

    def residual(x: jax.Array, a: jax.Array) -> jax.Array:
        return a @ x - target

    def objective(x: jax.Array, a: jax.Array) -> jax.Array:
        return 0.5 * jnp.sum(residual(x, a) ** 2) + 0.05 * jnp.sum(x**2)

    makers = {
        "GradientDescent": lambda: jaxopt.GradientDescent(objective, maxiter=200),
        "LBFGS": lambda: jaxopt.LBFGS(objective, maxiter=20, tol=1e-2),
        "NonlinearCG": lambda: jaxopt.NonlinearCG(objective, maxiter=20, tol=1e-2),
        "GaussNewton": lambda: jaxopt.GaussNewton(residual, maxiter=5),
        "LevenbergMarquardt": lambda: jaxopt.LevenbergMarquardt(residual, maxiter=10),
    }
    for name, make in makers.items():

        def solve(a: jax.Array, make: Any = make) -> jax.Array:
            return make().run(jnp.zeros(6), a).params

        table(
            name, solve, SYMMETRIC / 4, gradient=name == "GradientDescent", counts=True
        )
    fixed = lambda x, a: jnp.tanh(a @ x) + 0.5

    def point(a: jax.Array) -> jax.Array:
        solver = jaxopt.FixedPointIteration(fixed, maxiter=50, tol=1e-2)
        return solver.run(jnp.zeros(6), a).params

    table("FixedPointIteration", point, SYMMETRIC / 16, counts=True)
    cube = lambda x, h: x**3 + x - h

    def root(h: jax.Array) -> jax.Array:
        solver = jaxopt.Bisection(cube, -4.0, 4.0, check_bracket=False)
        return solver.run(None, h[0]).params

    table("Bisection", root, (8,), counts=True)
    for name in ("solve_cg", "solve_normal_cg", "solve_lu", "solve_cholesky"):
        solve = getattr(jaxopt.linear_solve, name)
        table(
            f"linear_solve.{name}",
            lambda a, b, s=solve: s(lambda x: a @ x, b),
            SYMMETRIC,
            (6,),
        )
    table.each(jaxopt, "isotonic.isotonic_l2_pav", (16,), gradient=False)
    return table.calls


LIBRARIES = {"optax": optax_calls, "jaxopt": jaxopt_calls}

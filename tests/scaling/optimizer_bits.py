"""Steps of a wrapped optimizer beside the bare one, compared bit for bit.

XLA's CPU backend contracts `a * b + c` into one fused multiply-add, and its choice of
product depends on what else is in the loop. Multiplying gradients by the inverse scale
can thus change the last bit of a moment. So compiled steps are compared without that
instruction: by `python -m tests.scaling.optimizer_bits` under

    XLA_FLAGS=--xla_cpu_max_isa=AVX

It prints the failures as JSON. In the tests LLVM's optimizations are off too, unless
pytest has `--optimized`.
"""

import json

import jax
import jax.numpy as jnp
import optax

import jamp

from ..bits import check_same_bits
from .optimizers import NEEDS_VALUE, OPTIMIZERS

STEPS = 4
SCALE = 2.0**10


def make_params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "kernel": jax.random.normal(keys[0], (16, 8)),
        "bias": jax.random.normal(keys[1], (8,)),
        "head": {"kernel": jax.random.normal(keys[2], (8, 4))},
    }


def make_grads(step):
    params = make_params()
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(100 + step), len(leaves))
    grads = [jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(treedef, grads)


def scaled(grads):
    return jax.tree.map(lambda g: g * SCALE, grads)


def extra_args(name, step):
    return {"value": jnp.float32(3.0 + step)} if name in NEEDS_VALUE else {}


def updated(tx):
    """`(grads, state, params, extra) -> (updates, state)`."""

    def update(grads, state, params, extra):
        tx_ = optax.with_extra_args_support(tx)
        return tx_.update(grads, state, params, **extra)

    return update


def stepped(tx):
    """`(grads, state, params, extra) -> (params, state)`."""

    def step(grads, state, params, extra):
        return jamp.step(tx, grads, state, params, **extra)

    return step


METHODS = (updated, stepped)


def compare_steps(name, method, compile):
    """Runs bare and wrapped side by side and compares bits after each step."""
    factory = OPTIMIZERS[name]
    plain, wrapped = factory(), jamp.dynamic_loss_scale(factory(), init_scale=SCALE)
    plain_step, wrapped_step = compile(method(plain)), compile(method(wrapped))
    params = make_params()
    state, wrapped_state = plain.init(params), wrapped.init(params)
    for step in range(STEPS):
        grads, extra = make_grads(step), extra_args(name, step)
        plain_out, state = plain_step(grads, state, params, extra)
        wrapped_out, wrapped_state = wrapped_step(
            scaled(grads), wrapped_state, params, extra
        )
        check_same_bits(wrapped_out, plain_out)
        check_same_bits(wrapped_state.inner_state, state)
        is_step = method is stepped
        params = plain_out if is_step else optax.apply_updates(params, plain_out)


def main():
    failures = {}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for name in OPTIMIZERS:
            for method in METHODS:
                try:
                    compare_steps(name, method, jax.jit)
                except AssertionError as error:
                    failures.setdefault(name, {})[method.__name__] = str(error)
    print(json.dumps({"compared": list(OPTIMIZERS), "failures": failures}))


if __name__ == "__main__":
    main()

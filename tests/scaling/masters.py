"""What tests of masters share: nests around `master_weights`, ways to step, checks."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jamp
from jamp._scaling.state import MasterWeightsState
from shared.master_weights import nearest

SCALE = 8.0


def several(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


def clipped(tx):
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def injected(tx):
    with_rate = lambda rate: optax.chain(tx, optax.scale(rate))
    return optax.inject_hyperparams(with_rate)(rate=0.5)


def by_name(**transformations):
    """`b` for the leaves of that name, `full` for float32, and `rest`."""
    label = lambda name: {"brain": "b", "b": "b", "full": "full"}.get(name, "rest")
    labels = lambda params: {name: label(name) for name in params}
    return optax.multi_transform(transformations, labels)


def only(*names):
    return lambda tree: {name: name in names for name in tree}


# wrap, a loss scale, an optimizer -> the whole transformation
NESTINGS = {
    "alone": lambda wrap, scale, tx: wrap(tx),
    "scaled": lambda wrap, scale, tx: scale(wrap(tx)),
    "scaled, off": lambda wrap, scale, tx: scale(wrap(tx), enabled=False),
    "scaled statically": lambda wrap, scale, tx: jamp.static_loss_scale(
        wrap(tx), SCALE
    ),
    "scaled inside": lambda wrap, scale, tx: wrap(scale(tx)),
    "scaled, clipped": lambda wrap, scale, tx: scale(clipped(wrap(tx))),
    "MultiSteps inside": lambda wrap, scale, tx: wrap(several(tx)),
    "MultiSteps around": lambda wrap, scale, tx: several(wrap(tx)),
    "MultiSteps inside, scaled": lambda wrap, scale, tx: scale(
        wrap(optax.MultiSteps(tx, 2))
    ),
    "MultiSteps around, scaled": lambda wrap, scale, tx: scale(several(wrap(tx))),
    "multi_transform": lambda wrap, scale, tx: by_name(
        rest=wrap(tx), b=wrap(tx), full=optax.sgd(0.1)
    ),
    "multi_transform, scaled": lambda wrap, scale, tx: scale(
        by_name(rest=wrap(tx), b=wrap(tx), full=wrap(tx))
    ),
    "multi_transform inside, scaled": lambda wrap, scale, tx: scale(
        wrap(by_name(rest=tx, b=tx, full=tx))
    ),
    "half frozen": lambda wrap, scale, tx: scale(
        wrap(by_name(rest=tx, b=optax.set_to_zero(), full=tx))
    ),
    "masked": lambda wrap, scale, tx: optax.masked(
        wrap(tx), only("half", "brain", "w", "b")
    ),
    "masked inside": lambda wrap, scale, tx: wrap(
        optax.masked(tx, only("half", "w", "full"))
    ),
    "injected": lambda wrap, scale, tx: wrap(injected(tx)),
    "injected, scaled": lambda wrap, scale, tx: scale(wrap(injected(tx))),
    "injected outside": lambda wrap, scale, tx: optax.inject_hyperparams(
        lambda rate: wrap(optax.chain(tx, optax.scale(rate)))
    )(rate=0.5),
    "named chain": lambda wrap, scale, tx: optax.named_chain(
        ("clip", optax.clip(1.0)), ("m", wrap(tx))
    ),
    "if finite inside": lambda wrap, scale, tx: wrap(optax.apply_if_finite(tx, 100)),
}


def updated(tx):
    def run(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return run


def stepped(tx):
    return lambda params, state, grads: jamp.step(tx, grads, state, params)


def bits(x):
    x = np.asarray(x)
    return x.view(f"uint{8 * x.dtype.itemsize}")


def is_master(node):
    return isinstance(node, MasterWeightsState)


def masters_in(state):
    """The trees of masters in a state, in either form."""
    nodes = filter(is_master, jax.tree.leaves(state, is_leaf=is_master))
    return [node.master for node in nodes]


def by_path(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def types(tree):
    """What must not change from step to step, for one program and for a scan."""
    of = lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type)
    shapes = jax.eval_shape(lambda: tree)
    return jax.tree.structure(shapes), {p: of(x) for p, x in by_path(shapes).items()}


def check_nearest(params, state):
    """Every half-precision parameter is its master, rounded: all 16 bits."""
    params = by_path(params)
    copied = set()
    for masters in masters_in(state):
        for path, copy in by_path(masters).items():
            copied.add(path)
            assert copy.dtype == jnp.float32
            rounded = nearest(copy, params[path].dtype)
            np.testing.assert_array_equal(bits(params[path]), bits(rounded), path)
    assert copied == {path for path, p in params.items() if p.dtype.itemsize == 2}

"""The equations of a jaxpr, with those of the jaxprs that it holds."""

import jax


def equations(jaxpr):
    """All equations, in the order of the program."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in held_by(eqn):
            yield from equations(inner)


def jaxprs(jaxpr):
    """The jaxpr and all jaxprs that it holds, each without its constants."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield jaxpr
    for eqn in jaxpr.eqns:
        for inner in held_by(eqn):
            yield from jaxprs(inner)


def held_by(eqn):
    leaves = jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr)
    return filter(is_jaxpr, leaves)


def is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")

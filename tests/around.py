"""What runs before a call, or beside it in another thread, must not change the call.

A case makes objects anew and returns calls of them by name. The calls share the objects
and differ in what is around them. It gets a function `pause`, which its calls run in
their middle: where another thread may come in.
"""

import contextlib
import functools
import sys
import threading
from weakref import WeakKeyDictionary

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from shared.jaxprs import held_by

SECONDS = 20  # that one thread waits for the other


def caches():
    """All caches of jamp, by name: those of functions, and those of objects."""
    found = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("jamp._"):
            continue
        for key, value in list(vars(module).items()):
            is_own = getattr(value, "__module__", name) in (name, "weakref", "jamp")
            if isinstance(value, functools._lru_cache_wrapper) and is_own:
                found[f"{name}.{key}"] = value.cache_clear
            elif isinstance(value, WeakKeyDictionary):
                found[f"{name}.{key}"] = value.clear
    return found


def forget():
    """Drops all that jamp keeps of earlier calls."""
    for clear in caches().values():
        clear()


def outcome(call):
    """What a call returns, in a form that can be compared, or the error it raises."""
    try:
        result = call()
    except Exception as error:
        return type(error).__name__, str(error).partition("\n")[0]
    if isinstance(result, ClosedJaxpr):
        return program(result)
    return [seen(leaf) for leaf in jax.tree.leaves(result)]


def seen(leaf):
    if not isinstance(leaf, jax.Array):
        return repr(leaf)
    values = jax.device_get(leaf)
    return str(jax.typeof(leaf)), leaf.weak_type, np.asarray(values).tobytes()


def program(jaxpr):
    """The ops of a jaxpr with the types of what they take and give."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    lines = []
    for eqn in jaxpr.eqns:
        types = [[str(v.aval) for v in side] for side in (eqn.invars, eqn.outvars)]
        precision = str(eqn.params.get("precision"))
        lines.append((eqn.primitive.name, *types, precision))
        lines += map(program, held_by(eqn))
    return [*lines, [str(v.aval) for v in jaxpr.outvars]]


def nothing():
    """The pause of a call that is alone."""


def alone(make):
    """The outcome of each call of a case, with nothing before it."""
    found = {}
    for name in make(nothing):
        forget()
        found[name] = outcome(make(nothing)[name])
    return found


def alike(expected):
    """The names of calls with the same outcome: all others must differ."""
    groups = {}
    for name, found in expected.items():
        groups.setdefault(str(found), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def one_after_another(make, expected):
    """The names of calls that give something else after the others, or again."""
    forget()
    calls, wrong = make(nothing), set()
    for name in [*calls, *reversed(calls)]:
        if outcome(calls[name]) != expected[name]:
            wrong.add(name)
    return sorted(wrong)


class Turns:
    """Two threads that take turns: the first, the second, the first, the second.

    The first one pauses in its middle until the second one has come to its own, and the
    second one until the first has ended.
    """

    def __init__(self):
        self.came = threading.Event(), threading.Event()
        self.ended = threading.Event()

    def first(self):
        self.came[0].set()
        assert self.came[1].wait(SECONDS)

    def second(self):
        self.came[1].set()
        assert self.ended.wait(SECONDS)


@contextlib.contextmanager
def settings():
    """Those of the fixture `standard_promotion`, which another thread does not have."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def beside(make, first, second, shared=False):
    """The outcomes of two calls of a case in two threads, each paused in its middle.

    Args:
      shared: whether both threads have the same objects. They must not trace the same
        jitted function, for which JAX lets the second thread wait.
    """
    turns, found, here = Turns(), [None, None], threading.local()
    pause = lambda: here.pause()
    here.pause = nothing  # while objects are made
    calls = [make(pause)] * 2 if shared else [make(pause), make(pause)]

    def run_first():
        here.pause = turns.first
        with settings():
            try:
                found[0] = outcome(calls[0][first])
            finally:
                turns.came[0].set()
                turns.ended.set()

    thread = threading.Thread(target=run_first)
    here.pause = turns.second
    thread.start()
    assert turns.came[0].wait(SECONDS)
    try:
        found[1] = outcome(calls[1][second])
    finally:
        turns.came[1].set()
        thread.join(SECONDS)
    assert not thread.is_alive()
    return found


def side_by_side(make, expected, distances, shared=False):
    """The pairs of calls of which one gives something else beside the other.

    Args:
      distances: between the places of two calls that make a pair.
    """
    names, wrong = list(expected), []
    for distance in distances:
        for place, first in enumerate(names):
            second = names[place - distance]
            found = beside(make, first, second, shared)
            if found != [expected[first], expected[second]]:
                wrong.append((first, second))
    return wrong

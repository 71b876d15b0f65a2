"""Runs a case through torch and through one of the other libraries."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .cases import Case, streams
from .peers_ops import Input, Peer
from .trajectory import Trajectory, bits, floats


class Reference(NamedTuple):
    """torch's run of a case.

    Attributes:
      run: the state after each step.
      unscaled: the gradients that the optimizers got, where they were not skipped.
      before: the scale that each step used.
    """

    run: Trajectory
    unscaled: np.ndarray
    before: np.ndarray


@functools.cache
def reference(case: Case, device: str) -> Reference:
    """torch's run of a case."""
    from . import torch_side

    run = torch_side.run(case, device)
    base, poison = streams(case)
    first = np.float32(case.init_scale if case.enabled else 1.0)
    before = np.concatenate([[first], floats(run.scale)[:-1]])
    by_step = before[:, None, None]
    inverse = (1 / by_step.astype(np.float64)).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        unscaled = np.where(poison == 0, base * by_step, poison) * inverse
    return Reference(run, unscaled, before)


@functools.cache
def _scan(peer: Peer) -> Any:
    def step(state, x):
        (scaler, train), skipped = peer.step(state, x)
        rest = jnp.stack(skipped), jnp.stack([params for params, _ in train])
        record = peer.read(scaler) | dict(zip(("skipped", "params"), rest, strict=True))
        return (scaler, train), record

    return jax.jit(lambda state, inputs: lax.scan(step, state, inputs))


def run_peer(peer: Peer, case: Case, inputs: Input) -> dict[str, np.ndarray]:
    """A library's run of a case: the fields of `trajectory.Trajectory` that it has."""
    (scaler, train), records = peer.start(case), []
    edges = {0, case.steps}
    for at, method, _ in case.events:
        edges |= {at, at + 1} if method == "update" else {at}
    for start, stop in itertools.pairwise(sorted(edges)):
        for method, value in case.setters(start):
            scaler = peer.change(scaler, method, value)
        before, part = scaler, Input(*(x[start:stop] for x in inputs))
        (scaler, train), record = _scan(peer)((scaler, train), part)
        new_scale = case.new_scale(start)
        if new_scale is not None:  # replaces what the step did to the scaler
            scaler = peer.change(before, "update", new_scale)
            record |= {k: value[None] for k, value in peer.read(scaler).items()}
        records.append({name: np.asarray(values) for name, values in record.items()})
    fields = {k: np.concatenate([r[k] for r in records]) for k in records[0]}
    floating = {"scale", "params"} & fields.keys()
    return fields | {name: bits(fields[name]) for name in floating}

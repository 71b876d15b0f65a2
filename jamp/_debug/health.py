"""`check`: alarms of the loss scale as an exception with likely causes, on the host."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .._checks import is_traced
from .._scaling.metrics import FLAGS, metrics
from .history import History

CAUSES = """\
Likely causes, and how to find the one:
- an inf or nan in the data, or a loss that is inf or nan at any scale (log of 0, 0/0):
  the scale then keeps falling. find_nonfinite(grad_fn)(params, batch) names the line.
- an op that overflows float16 in the forward pass (attention logits, a long sum):
  find_nonfinite names it. Keep it in float32 with autocast(rules={...}) or
  autocast(enabled=False), or make its result smaller: divide before the product.
- parameters that have grown: the learning rate is too high, or clipping or warm-up is
  missing. overflow_report(grads) names the gradients."""

BACKWARD = """\
- gradients that are too large for float16 even without scaling: check whether the loss
  is a sum over the batch instead of a mean."""


def check(
    source: Any, *, floor_steps: int = 32, window: int = 32, skipped_share: float = 0.5
) -> None:
    """Raises if the loss scale says that something is wrong with the run.

    Call it on the host, between steps: it waits for the values. The alarms are those of
    `jamp.metrics`, which are flags and do not wait.

    Args:
      source: an optimizer state or `GradScaler`, what `jamp.metrics` returned, or a
        `jamp.debug.History` of that, whose last row counts.
      floor_steps: limit, as in `jamp.metrics`, for states and scalers. Metrics carry
        flags that were made with the limits given there.
      window: the same.
      skipped_share: the same.

    Raises:
      FloatingPointError: an alarm is on. The message has the numbers and likely causes.
      TypeError: `source` is traced.
      ValueError: `source` is none of these, metrics lack the alarms, or a limit is out
        of its range.

    Examples:
      >>> import jax.numpy as jnp, optax, jamp
      >>> tx = jamp.dynamic_loss_scale(optax.sgd(0.1), init_scale=2.0)
      >>> params = jnp.ones(3)
      >>> opt_state = tx.init(params)
      >>> jamp.debug.check(opt_state)
      >>> for _ in range(2):
      ...     params, opt_state = jamp.step(tx, params * jnp.inf, opt_state, params)
      >>> try:
      ...     jamp.debug.check(opt_state)
      ... except FloatingPointError as error:
      ...     print(str(error).splitlines()[0])
      the loss scale is below 1, at 0.5 (2 steps skipped so far).

    PyTorch: no counterpart.
    """
    is_row = isinstance(source, Mapping) and "loss_scale" in source
    if isinstance(source, History):
        if not len(source):
            return
        source, is_row = {name: source[name][-1] for name in source}, True
    if is_row:
        row: dict[str, Any] = dict(source)
        if missing := [name for name in ("loss_scale", *FLAGS) if name not in row]:
            raise ValueError(
                f"check: the metrics lack {', '.join(missing)}; pass what "
                "jamp.metrics(opt_state) returned, an optimizer state or a GradScaler."
            )
    else:
        limits: dict[str, Any] = {"window": window, "skipped_share": skipped_share}
        row = metrics(source, floor_steps=floor_steps, **limits)
    if any(map(is_traced, row.values())):
        raise TypeError(
            "jamp.debug.check needs values, and was called inside a trace; return "
            "jamp.metrics(opt_state) from the jitted function and check that."
        )
    if stacked := [name for name, value in row.items() if np.ndim(value)]:
        raise ValueError(
            f"check: {stacked[0]} must be one number; got shape "
            f"{np.shape(row[stacked[0]])}. Check stacked states one at a time: "
            "jax.tree.map(lambda x: x[0], jamp.metrics(opt_state))."
        )
    alarms: list[str] = []
    if row.get("scale_below_one"):
        alarms.append(f"is below 1, at {float(row['loss_scale']):g}")
    if row.get("scale_at_floor"):
        alarms.append(f"is stuck at its floor, {float(row['loss_scale']):g}")
    if row.get("many_skips"):
        alarms.append("makes the optimizer skip too many of the last steps")
    if alarms:
        skipped = row.get("skipped_steps")
        total = "" if skipped is None else f" ({int(skipped)} steps skipped so far)"
        causes = CAUSES + ("\n" + BACKWARD if row.get("scale_below_one") else "")
        raise FloatingPointError(
            f"the loss scale {'; it '.join(alarms)}{total}.\n{causes}"
        )

"""The scalars of a training loop, collected without waiting for the device.

A host that reads a value waits until the device has computed it, and the device then
waits for the host's next step. `History` never reads a value that has not arrived. The
scalars of a step become one small vector for each dtype, which is also the copy that
survives when the next step donates their buffers, and whose copy to the host begins at
once. `every` steps are read together, when all of them have arrived.
"""

import contextlib
import functools
import itertools
import operator
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from .._checks import is_traced, number, positive, shown
from .report import percent, text_table

OUTSIDE = (
    "History collects outside of jit: return the metrics from the jitted step, and "
    "append them outside."
)
NO_MESH = jax.sharding.Mesh(np.empty((), dtype=object), ())

LAST = 5  # steps of a printed table

Scalar = bool | int | float | complex
OnHost = np.ndarray | Scalar


class Row(NamedTuple):
    """The values of one step, or of several that `extend` got."""

    names: tuple[tuple[str, ...], ...]  # of each array
    arrays: list[jax.Array]  # [names] or [names, steps], one for each dtype and device
    host: Mapping[str, OnHost]  # values that are not device arrays
    steps: int = 1

    def is_ready(self) -> bool:
        arrays: list[Any] = self.arrays
        return all(array.is_ready() for array in arrays)


def columns_of(rows: Sequence[Row], names: Iterable[str]) -> dict[str, np.ndarray]:
    """The values of several rows by name, [steps], in their dtypes. Waits for them."""
    each = [dict(row.host) for row in rows]
    fetched = jax.device_get([row.arrays for row in rows])
    for values, row, arrays in zip(each, rows, fetched, strict=True):
        for group, array in zip(row.names, arrays, strict=True):
            values |= zip(group, array.reshape(len(group), -1), strict=True)
    column = lambda name: np.concatenate([np.atleast_1d(v[name]) for v in each])
    return {name: column(name) for name in names}


class History:
    """Collects the scalars of a training loop, without making it wait for the device.

        history = jamp.debug.History()
        for batch in batches:
            params, opt_state, loss = train_step(params, opt_state, batch)
            history.append(jamp.metrics(opt_state) | {"loss": loss})
        history["loss"]

    `append` keeps a copy on the device, so the next step may donate what was appended.
    Reading waits: `history["loss"]`, `rows()` and `fetch()` first get the values that
    are still on their way. As with a pandas DataFrame, `len` counts the rows and
    iteration yields the names: `pd.DataFrame(dict(history), index=history.steps)` and
    `np.savez(path, **history)` work. `print(history)` shows the last values that have
    arrived, and does not wait.

    With `on_row`, each step's values are passed on in order as they arrive, for
    TensorBoard or W&B. They are one block late, so call `fetch` when the loop ends, in
    a `finally` if you stop it with Ctrl-C: it passes on the rest.

    Args:
      every: the number of steps that are read together, at least 1.
      on_row: called as `on_row(step, row)` with the step's number and a dict of Python
        scalars, or None.
      start: the number of the first step, for a run that is resumed.

    Raises:
      ValueError: `every` is below 1.
      TypeError: `every` or `start` is not an integer, or `on_row` is not a function.

    Examples:
      >>> import jax.numpy as jnp, jamp
      >>> history = jamp.debug.History(on_row=print)
      >>> for step in range(3):
      ...     history.append({"loss": jnp.float32(1) / (step + 1), "epoch": 0})
      >>> history.fetch()
      0 {'loss': 1.0, 'epoch': 0}
      1 {'loss': 0.5, 'epoch': 0}
      2 {'loss': 0.3333333432674408, 'epoch': 0}
      >>> history["loss"]
      array([1.        , 0.5       , 0.33333334], dtype=float32)

    PyTorch: no counterpart; `loss.item()` waits for the device at every step.
    """

    def __init__(
        self,
        every: int = 100,
        on_row: Callable[[int, dict[str, Any]], object] | None = None,
        start: int = 0,
    ):
        self._every = positive("every", every)
        self._start = number("start", start, operator.index)
        if on_row is not None and not callable(on_row):
            raise TypeError(
                f"on_row must be a function of (step, row); got {on_row!r} of type "
                f"{type(on_row).__name__}."
            )
        self._on_row = on_row
        self._names: tuple[str, ...] = ()
        self._rows: list[Row] = []  # fewer than `every` steps
        self._pending: list[list[Row]] = []  # to be read together
        self._chunks: list[dict[str, np.ndarray]] = []  # here
        self._taken = 0  # steps in the chunks
        self._queue: deque[tuple[int, dict[str, Scalar]]] = deque()  # for on_row
        self._calling = False  # inside on_row

    def append(self, metrics: Mapping[str, ArrayLike]) -> None:
        """Adds the scalars of one step: device arrays of shape [], or Python numbers.

        Args:
          metrics: name -> scalar, with the same names at every step.

        Raises:
          ValueError: the names are not those of the first step, or a value is not a
            scalar.
          TypeError: a value is not a number, or is traced.
        """
        names = self._check_names("append", metrics)
        row = on_devices("append", metrics, names, None)
        self._names = names
        self._rows.append(row)
        if len(self._rows) >= self._every:
            self._close()
        self._take_ready()

    def extend(self, stacked: Mapping[str, ArrayLike]) -> None:
        """Adds several steps at once: arrays [steps], as `lax.scan` stacks them.

        Args:
          stacked: name -> array with one axis, the same length for all.

        Raises:
          ValueError: the names are not those of the first step, or the shapes differ.
          TypeError: a value is not an array of numbers, or is traced.
        """
        names = self._check_names("extend", stacked)
        shapes = {name: np.shape(value) for name, value in stacked.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(
                f"extend: all values need one shape, [steps]; got {shapes}."
            )
        steps = next(iter(shapes[names[0]]), 0)
        row = on_devices("extend", stacked, names, steps)
        self._names = names
        if self._rows:
            self._close()
        self._rows.append(row)
        self._close()
        self._take_ready()

    def fetch(self) -> None:
        """Waits for all steps so far, and passes the remaining ones to `on_row`."""
        if self._rows:
            self._close()
        while self._pending:
            self._take()
        self._call_on_row()

    def __getitem__(self, name: str) -> np.ndarray:
        """The values of all steps so far, [steps], in their own dtype. Waits."""
        if name not in self._names:
            known = ", ".join(self._names) or "nothing, before the first append"
            raise KeyError(f"History has no {name!r}; it has {known}.")
        self.fetch()
        return np.concatenate([chunk[name] for chunk in self._chunks])

    def rows(self) -> list[dict[str, Any]]:
        """A dict of Python scalars for each step so far. Waits."""
        self.fetch()
        return [row for chunk in self._chunks for row in _rows(chunk)]

    def keys(self) -> tuple[str, ...]:
        """The names, in the order of the first `append`."""
        return self._names

    @property
    def steps(self) -> np.ndarray:
        """The numbers of the steps so far, [steps]."""
        return np.arange(self._start, self._start + len(self))

    def __len__(self) -> int:
        """The number of steps so far."""
        waiting = itertools.chain(*self._pending, self._rows)
        return self._taken + sum(row.steps for row in waiting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __repr__(self) -> str:
        text = f"History of {len(self)} steps"
        if len(self) > self._taken:
            text += f", {self._taken} of them on the host"
        if self._taken and "found_inf" in self._names:
            skipped = sum(np.count_nonzero(c["found_inf"]) for c in self._chunks)
            text += f", {skipped} skipped ({percent(skipped / self._taken)})"
        ends = [
            {name: column[-LAST:] for name, column in chunk.items()}
            for chunk in self._chunks[-LAST:]
        ]
        last = [row for chunk in ends for row in _rows(chunk)][-LAST:]
        if not last:
            return text
        end = self._start + self._taken
        header = ("step", *map(str, range(end - len(last), end)))
        lines = [(name, *(_short(row[name]) for row in last)) for name in self._names]
        return f"{text}\n{text_table(header, lines)}"

    def _check_names(self, caller: str, metrics: object) -> tuple[str, ...]:
        if not isinstance(metrics, Mapping):
            raise TypeError(
                f"{caller}: metrics must be a dict of name -> value; "
                f"got {shown(metrics)}."
            )
        if self._names:
            if metrics.keys() == set(self._names):
                return self._names
            missing = [name for name in self._names if name not in metrics]
            new = [name for name in metrics if name not in self._names]
            raise ValueError(
                f"{caller}: every step needs the names of the first; missing: "
                f"{missing}, new: {new}. Use float('nan') where there is no value, "
                "or a second History."
            )
        if not metrics or not all(isinstance(name, str) for name in metrics):
            raise ValueError(f"{caller} needs names for the values; got {metrics!r}.")
        return tuple(metrics)

    def _close(self) -> None:
        # In one statement, so that Ctrl-C finds each row in one place.
        self._pending, self._rows = [*self._pending, self._rows], []

    def _take_ready(self) -> None:
        # The last row is most often the last to arrive.
        while self._pending and all(r.is_ready() for r in reversed(self._pending[0])):
            self._take()
        self._call_on_row()

    def _take(self) -> None:
        rows = self._pending[0]
        chunk = columns_of(rows, self._names)
        self._chunks.append(chunk)
        del self._pending[0]
        if self._on_row is not None:
            self._queue.extend(enumerate(_rows(chunk), self._start + self._taken))
        self._taken += sum(row.steps for row in rows)

    def _call_on_row(self) -> None:
        if self._on_row is None or self._calling:  # on_row may read the history
            return
        self._calling = True
        try:
            while self._queue:
                self._on_row(*self._queue.popleft())  # at most once, even if it raises
        finally:
            self._calling = False


def _rows(chunk: dict[str, np.ndarray]) -> list[dict[str, Scalar]]:
    """The rows of a chunk, as Python scalars."""
    rows = zip(*(column.tolist() for column in chunk.values()), strict=True)
    return [dict(zip(chunk, values, strict=True)) for values in rows]


def _short(value: Scalar) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def on_devices(
    caller: str, metrics: Mapping[str, object], names: Sequence[str], steps: int | None
) -> Row:
    """Checks the values, and begins to copy those on devices to the host.

    Args:
      steps: their number, or None for the scalars of one step.
    """
    given: dict[Hashable, dict[np.dtype, dict[str, jax.Array]]] = {}  # by device
    host, ndim = {}, 0 if steps is None else 1
    for name in names:
        value: Any = metrics[name]
        if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
            value = value.__jax_array__()  # of an nnx.Variable
        if isinstance(value, jax.Array):
            value = _of_device(caller, name, value, ndim)
            (device,) = value.sharding.device_set
            given.setdefault(device, {}).setdefault(value.dtype, {})[name] = value
        else:
            host[name] = _of_host(caller, name, value, ndim)
    groups = [values for by_dtype in given.values() for values in by_dtype.values()]
    arrays: list[jax.Array] = []
    for by_dtype in given.values():  # one call for each device
        arrays += _stacked([list(values.values()) for values in by_dtype.values()])
    # An intended transfer: a user's guard against implicit ones must allow it.
    with jax.transfer_guard_device_to_host("allow"):
        for array in arrays:
            array.copy_to_host_async()
    return Row(tuple(map(tuple, groups)), arrays, host, 1 if steps is None else steps)


def _of_device(caller: str, name: str, value: jax.Array, ndim: int) -> jax.Array:
    """The value, on one device only."""
    if is_traced(value):
        raise TypeError(f"{caller}: {name!r} is traced. {OUTSIDE}")
    if value.ndim != ndim:
        raise _shape_error(caller, name, value.shape, ndim)
    _check_dtype(caller, name, value.dtype)
    if value.is_deleted():
        raise ValueError(
            f"{caller}: the buffer of {name!r} was donated to a later step and is "
            "gone. Append a step's metrics before the next step runs."
        )
    if len(value.sharding.device_set) == 1:
        return value
    if not value.is_fully_replicated:
        raise ValueError(
            f"{caller}: {name!r} is spread over devices, as {value.sharding}; "
            "return it replicated from the jitted step."
        )
    return value.addressable_data(0)


def _of_host(caller: str, name: str, value: object, ndim: int) -> OnHost:
    if isinstance(value, list | tuple | np.ndarray | np.generic):
        value = np.array(value)  # a copy, because the caller may still write to it
        _check_dtype(caller, name, value.dtype)
    elif not isinstance(value, bool | int | float | complex):
        raise TypeError(
            f"{caller}: {name!r} must be a number or an array; got {value!r} of type "
            f"{type(value).__name__}."
        )
    elif isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise ValueError(f"{caller}: {name!r} is an integer of more than 64 bits.")
    if np.ndim(value) != ndim:
        raise _shape_error(caller, name, np.shape(value), ndim)
    return value


def _shape_error(
    caller: str, name: str, shape: tuple[int, ...], ndim: int
) -> ValueError:
    want, advice = (
        ("[steps]", "The scalars of one step go to append.")
        if ndim
        else ("[]", "Log its mean, for example; several steps at once go to extend.")
    )
    return ValueError(
        f"{caller}: {name!r} must have shape {want}; got {shape}. {advice}"
    )


def _check_dtype(caller: str, name: str, dtype: np.dtype) -> None:
    if not _is_number(dtype):
        raise TypeError(
            f"{caller}: {name!r} must hold numbers or bools; got dtype {dtype}."
        )


@functools.lru_cache
def _is_number(dtype: np.dtype) -> bool:
    return dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.number)


def _stacked(groups: list[list[jax.Array]]) -> list[jax.Array]:
    """New arrays on the device of those given, one for each group."""
    with _without_mesh():
        arrays = _stack(groups)
    if any(map(is_traced, arrays)):
        raise TypeError(OUTSIDE)
    if any(a.dtype != group[0].dtype for a, group in zip(arrays, groups, strict=True)):
        # A region's rule has cast them. Without one, autocast need not run on this JAX.
        from .._autocast.region import autocast

        with autocast(enabled=False):
            return _stacked(groups)
    return arrays


@contextlib.contextmanager
def _without_mesh() -> Iterator[None]:
    """Lets jit take arrays on one device inside `jax.set_mesh`, and return nans."""
    with contextlib.ExitStack() as stack, jax.debug_nans(False), jax.debug_infs(False):
        if not jax.sharding.get_abstract_mesh().empty:
            try:
                stack.enter_context(jax.set_mesh(NO_MESH))
            except ValueError:  # inside a trace
                raise TypeError(OUTSIDE) from None
        yield


@jax.jit
def _stack(groups: list[list[jax.Array]]) -> list[jax.Array]:
    # `lax` keeps 64 bits outside of x64 mode as well.
    return [
        lax.concatenate([lax.expand_dims(x, [0]) for x in group], 0) for group in groups
    ]

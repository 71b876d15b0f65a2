"""`explain`: which op runs in which dtype, why, and what that costs."""

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.typing import DTypeLike

from .. import _compat
from .._autocast.conversion import EXPLICIT
from .._autocast.decision import Reason, Recipe, Source
from .._autocast.ops import FUNCTIONS, PRIMITIVES
from .._autocast.region import ambient, autocast
from .._autocast.trace import OBSERVED
from .._autocast.traits import MIXING, PRODUCTS
from .call import is_array, open_call
from .dtypes import given_dtypes, returned_dtypes
from .explanation import Explanation, OpRow, Promotion, Reduction
from .op_location import float_dtypes, site_of
from .residuals import saved_for_backward
from .walk import CAST, Atom, Op, array, flops, nbytes, reduced, variables, walk

HALF = ("float16", "bfloat16")
MANY = 1024


class Kind(NamedTuple):
    """What the ops of one row have in common."""

    op: str
    rule: str
    line: str
    path: str
    backward: bool
    note: str = ""
    dtypes: tuple[tuple[str, ...], ...] = ()  # in and out; not for a function's ops


def explain(
    fn: Callable[..., object],
    dtype: DTypeLike | Recipe | None = None,
    *,
    rules: Mapping[Any, Any] | None = None,
) -> Callable[..., Explanation]:
    """Shows what autocast does to a function: each op, its dtypes, and the rule.

    It traces `fn` without running it, so arguments may be `jax.ShapeDtypeStruct`s. Give
    it the loss function to see also what is kept for the backward pass (with respect to
    the first argument, as in `jax.grad`), or a whole train step to see the backward
    pass. A function that JAX cannot differentiate is explained without these.

    Args:
      fn: any function of pytrees or of Flax, Equinox or Haiku modules, or a Flax module
        or its method.
      dtype: float16, bfloat16 or a recipe, such as "float8": `fn` is put into
        `jamp.autocast(dtype)`. By default, `fn` is explained with only the regions and
        policies that it has itself.
      rules: as in `jamp.autocast`, with `dtype`.

    Returns:
      A function with the arguments of `fn` that returns an `Explanation`. It prints,
      also in a notebook:

      - a row for each kind of op, with the rule that decided, the ops of torch's list
        that the rule mirrors and, if a recipe is asked for, whether a matrix product
        runs in it, or why not;
      - the share of matrix products in the lower dtype;
      - the memory that is kept for the backward pass;
      - half precision that silently became float32, float16 sums that may overflow, and
        matrix products that run in float32, with the line that made their input
        float32. These are also its `found`.

      `to_dict()` has everything, and `to_markdown()` the printed text.

    Raises:
      TypeError: `fn` cannot be called.
      ValueError: `dtype` is not one of these, or `rules` is given without `dtype`.

    Examples:
      >>> import jax, jax.numpy as jnp, jamp
      >>> def loss_fn(params, x):
      ...     return jnp.sum(jax.nn.softmax(x @ params["w"]))
      >>> params, x = {"w": jnp.ones((4, 3))}, jnp.ones((2, 4))
      >>> explanation = jamp.debug.explain(loss_fn, dtype=jnp.float16)(params, x)
      >>> row = explanation.rows[0]
      >>> row.op, row.dtypes, row.rule, row.torch[:2]
      ('dot_general', 'float32 -> float16', 'lower', ('matmul', 'mm'))
      >>> explanation.to_dict()["matmul_share"], explanation.found
      (1.0, [])

    PyTorch: no counterpart.
    """
    if rules is not None and dtype is None:
        raise ValueError("explain(rules=...): give dtype too; rules need a region.")
    region = None if dtype is None else autocast(dtype, rules=rules)

    @functools.wraps(fn, updated=())
    def explained(*args, **kwargs):
        call = open_call("explain", fn, args, kwargs)

        def run(arrays):
            with OBSERVED(True), region or ambient():
                result = call.run(arrays)
            # An Equinox model that a step returns also holds functions, for example.
            return [leaf for leaf in jax.tree.leaves(result) if is_array(leaf)]

        closed = jax.make_jaxpr(run)(call.arrays)
        names = dict(zip(closed.jaxpr.invars, call.names, strict=True))
        ops = list(walk(closed.jaxpr, names))
        saved, refusal = None, ""
        if not any(op.is_backward for op in ops):
            try:
                saved = saved_for_backward(run, call.arrays, call.params())
            except (NotImplementedError, TypeError, ValueError) as error:
                first_line = str(error).partition("\n")[0]
                refusal = f"{type(error).__name__}: {first_line}"
        return Explanation(
            function=call.function,
            rows=rows_of(ops),
            matmul_flops=matmul_flops(ops),
            casts=sum(op.times for op in ops if op.is_cast),
            saved=saved,
            refusal=refusal,
            promotions=promotions(ops),
            reductions=reductions(ops),
        )

    return explained


def rows_of(ops: Iterable[Op]) -> list[OpRow]:
    """Ops of one kind as one row, those with the most work first."""
    groups: dict[Kind, list[Op]] = {}
    for op in ops:
        if not op.is_cast and not is_helper(op) and op.site.dtypes_out:
            groups.setdefault(kind_of(op), []).append(op)
    rows = [op_row(kind, group) for kind, group in groups.items()]
    return sorted(rows, key=lambda row: (-row.flops, -row.bytes))


def is_helper(op: Op) -> bool:
    """Whether autocast adds an op only to run another one, such as a layer's bias."""
    reason, primitive = Reason.read(op.site.rule), op.site.primitive
    if reason.note:
        return primitive not in PRODUCTS
    return reason.name in PRIMITIVES and reason.name != primitive


def kind_of(op: Op) -> Kind:
    site = op.site
    reason = Reason.read(site.rule)
    rule, name = reason.kind, reason.name
    place = site.line, op.path, site.backward
    if reason.source is Source.FUNCTION:  # as one op
        return Kind(name, rule, *place)
    if not site.rule:
        rule = {"": "no region", "off": "off"}.get(site.region, "no rule")
    rule = str(reason._replace(note="")) if reason.source is Source.USER else rule
    dtypes = site.dtypes_in, site.dtypes_out
    return Kind(site.primitive, rule, *place, reason.note, dtypes)


def op_row(kind: Kind, group: list[Op]) -> OpRow:
    inputs = dict.fromkeys(d for op in group for d in given_dtypes(op))
    inputs = inputs or dict.fromkeys(group[0].site.dtypes_in)
    outputs = returned_dtypes(group[-1])
    counts = Counter()
    for op in group:
        counts[op.site.primitive] += op.times
    row = FUNCTIONS.get(kind.op) or PRIMITIVES.get(kind.op)
    listed = kind.rule in ("lower", "float32", "promote")
    return OpRow(
        op=kind.op,
        times=min(counts.values()),  # a function's rarest op runs once per call
        dtypes=f"{', '.join(inputs)} -> {', '.join(outputs)}",
        runs_in=next(iter(group[0].site.dtypes_in), ""),
        rule=kind.rule,
        torch=tuple(row.torch.split()) if row and listed else (),
        line=kind.line,
        path=kind.path,
        backward=kind.backward,
        flops=sum(op.times * flops(op.eqn) for op in group),
        bytes=sum(op.times * sum(map(nbytes, op.results)) for op in group),
        since=widened_at(group[0]) if flops(group[0].eqn) else "",
        note=next(filter(None, (Reason.read(op.site.rule).note for op in group)), ""),
    )


def widened_at(op: Op) -> str:
    """The line at which a float32 input of an op was half precision, or "".

    It is not the op's own line if there is another one, which widened the input first.
    """
    queue, seen, line = deque(variables(op.eqn.invars)), set(), ""
    while queue:
        variable = queue.popleft()
        if variable in seen:
            continue
        seen.add(variable)
        maker = op.made_by.get(variable)
        if maker is None or float_dtypes([variable]) != ("float32",):
            continue
        given = float_dtypes(maker.invars)
        if "float32" not in given and not set(HALF).isdisjoint(given):
            line = site_of(maker).line
            if line != op.site.line:
                break
        queue.extend(variables(maker.invars))
    return line


def matmul_flops(ops: Iterable[Op]) -> dict[str, int]:
    """Floating-point operations of matrix products and convolutions, by dtype."""
    total = Counter()
    for op in ops:
        if op.eqn.primitive.name in PRODUCTS:
            dtype = next(iter(float_dtypes(op.eqn.invars)), "int")
            total[dtype] += op.times * flops(op.eqn)
    return dict(total.most_common())


def promotions(ops: Iterable[Op]) -> list[Promotion]:
    """Where a float32 operand implicitly made a half-precision one float32."""
    found: dict[tuple[str, str, str], Promotion] = {}
    for op in ops:
        if not (op.is_cast and widens(op)) or op.is_backward:
            continue
        explicit = not EXPLICIT.isdisjoint(_compat.codes_of(op.eqn.source_info))
        kind = Reason.read(op.site.rule).kind
        ruled = kind.startswith("float32") or kind in ("rules", "statistic")
        if explicit or ruled:
            continue
        out = op.eqn.outvars[0]
        for user in op.used_by.get(out, ()):
            if user.primitive.name in MIXING and any(
                is_float32(v, op) for v in user.invars if v is not out
            ):
                key = user.primitive.name, op.site.line, op.path
                before = found.get(key, Promotion(*key, 0, 0))
                found[key] = before._replace(
                    times=before.times + op.times,
                    bytes=before.bytes + op.times * nbytes(array(out)) // 2,
                )
                break
    return sorted(found.values(), key=lambda p: -p.bytes)


def widens(op: Op) -> bool:
    given, made = map(float_dtypes, (op.eqn.invars, op.eqn.outvars))
    return given in (("float16",), ("bfloat16",)) and made == ("float32",)


def is_float32(variable: Atom, op: Op) -> bool:
    """Whether a value is itself float32, and not a number that follows arrays."""
    if isinstance(variable, Literal):
        return False
    dtype = getattr(variable.aval, "dtype", None)
    if dtype != jnp.float32:
        return False
    maker = op.made_by.get(variable)
    if maker is None or maker.primitive.name != CAST:
        return True
    return str(array(maker.invars[0]).dtype) not in HALF


def reductions(ops: Iterable[Op]) -> list[Reduction]:
    """Sums in float16 that have so many elements that they may overflow."""
    found: dict[tuple[str, str, str], Reduction] = {}
    for op in ops:
        n = reduced(op.eqn)
        if n < MANY or op.is_backward:
            continue
        given, made = op.site.dtypes_in[0], op.site.dtypes_out[0]
        users = op.used_by.get(op.eqn.outvars[0], ())
        narrowed = given == "float32" and any(
            user.primitive.name == CAST
            and str(array(user.outvars[0]).dtype) == "float16"
            for user in users
        )
        if (given, made) == ("float16", "float16") or narrowed:
            key = op.eqn.primitive.name, op.site.line, op.path
            before = found.get(key, Reduction(*key, 0, n))
            found[key] = before._replace(
                times=before.times + op.times, elements=max(before.elements, n)
            )
    return sorted(found.values(), key=lambda r: -r.elements)

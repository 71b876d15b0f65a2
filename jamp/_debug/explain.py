"""`explain`: which op runs in which dtype, why, and what that costs."""

import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.typing import DTypeLike

from .. import _compat
from .._autocast.attention import ATTENTION
from .._autocast.decision import Kind, Reason, Recipe, Source
from .._autocast.low_precision import FLOAT8
from .._autocast.ops import FUNCTIONS, PRIMITIVES
from .._autocast.region import ambient, autocast
from .._autocast.scaled_float16 import ScaledFloat16
from .._autocast.trace import OBSERVED
from .._autocast.traits import PRODUCTS
from .._autocast.written_casts import EXPLICIT
from .._jaxprs import Atom, is_loop, param, read, variables
from .._tree import HALF_NAMES, PyTree
from .explanation import Explanation, OpRow, Promotion, Saved
from .flat_call import named_results, open_call, takes_a_function, with_params
from .half_risks import half_results, reductions, squares
from .op_location import (
    OUTERMOST,
    Around,
    Location,
    float_dtypes,
    name_of,
    reason_of,
    site_of,
)
from .traits import MIXING, MOVES
from .walk import (
    CAST,
    NO_VALUE,
    WalkedOp,
    array,
    flops,
    inner_jaxprs,
    nbytes,
    walk,
)

REDUCING = ("arg", "reduce_max", "reduce_min", "reduce_sum")
ONE_LOOP = MIXING | MOVES | {"abs", "neg", "sign"}  # with the sum that takes them


@takes_a_function("explain", others=1)
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
        float32. Or that no product at all is in half precision, and whether there is a
        region. These are also its `found`.

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
        around, names = ambient(), []

        def run(arrays):
            with OBSERVED(True), region or around():
                names[:], results = named_results(call.run(arrays))
                return results

        closed = jax.make_jaxpr(run)(call.arrays)
        ops, outs = walk(closed, call.names)
        made_by = {value: op for op in ops for value in op.writes}
        triples = zip(names, outs, closed.out_avals, strict=True)
        made = [(name, v, aval) for name, v, aval in triples if v != NO_VALUE]
        # What has the shape and dtype of an argument is what becomes of it: a parameter
        # that is kept in half precision, or a cache.
        kinds = {(a.shape, a.dtype) for a in call.arrays}
        returned = [
            (name, made_by.get(v))
            for name, v, aval in made
            if (aval.shape, aval.dtype) not in kinds
        ]
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
            promotions=promotions(ops, {v for _, v, _ in made}),
            reductions=reductions(ops),
            squares=squares(ops, made_by),
            half_results=half_results(returned, made_by),
        )

    return explained


def rows_of(ops: Iterable[WalkedOp]) -> list[OpRow]:
    groups: dict[OpRow, list[WalkedOp]] = {}
    for op in ops:
        if not op.is_cast and not is_helper(op) and op.site.dtypes_out:
            groups.setdefault(kind_of(op), []).append(op)
    rows = [counted(kind, group) for kind, group in groups.items()]
    return sorted(rows, key=lambda row: (-row.flops, -row.bytes))


def is_helper(op: WalkedOp) -> bool:
    """Whether autocast adds an op only to run another one, such as a layer's bias."""
    reason, primitive = op.reason, op.site.primitive
    if reason.note:
        return primitive not in (*PRODUCTS, ATTENTION, reason.name)
    return reason.name in PRIMITIVES and reason.name != primitive


def kind_of(op: WalkedOp) -> OpRow:
    """The row that an op belongs to, with nothing counted."""
    site, reason = op.site, op.reason
    is_function = reason.source is Source.FUNCTION  # as one op
    rule = reason.kind or {"": "no region", "off": "off"}.get(site.region, "no rule")
    rule = str(reason._replace(note="")) if reason.source is Source.USER else rule
    return OpRow(
        op=reason.name if is_function else site.primitive,
        times=0,
        dtypes="" if is_function else f"{site.dtypes_in} -> {site.dtypes_out}",
        runs_in="",
        rule=rule,
        torch=(),
        line=site.line,
        path=op.path,
        backward=site.backward,
        flops=0,
        bytes=0,
        note="" if is_function else reason.note,
    )


def counted(kind: OpRow, group: list[WalkedOp]) -> OpRow:
    inputs = dict.fromkeys(d for op in group for d in given_dtypes(op))
    inputs = inputs or dict.fromkeys(group[0].site.dtypes_in)
    outputs = returned_dtypes(group[-1])
    counts = Counter()
    for op in group:
        counts[op.site.primitive] += op.times
    runs_in, work = next(iter(group[0].site.dtypes_in), ""), flops(group[0].eqn)
    # A gradient in a region gets float32 from a product that runs in half precision.
    between = [runs_in] if work and runs_in not in {*inputs, *outputs} else []
    row = FUNCTIONS.get(kind.op) or PRIMITIVES.get(kind.op)
    is_listed = kind.rule in ("lower", "float32", "promote")
    return kind._replace(
        times=min(counts.values()),  # a function's rarest op runs once per call
        dtypes=" -> ".join([", ".join(inputs), *between, ", ".join(outputs)]),
        runs_in=runs_in,
        torch=tuple(row.torch.split()) if row and is_listed else (),
        flops=sum(op.times * flops(op.eqn) for op in group),
        bytes=sum(op.times * sum(map(nbytes, op.results)) for op in group),
        since=widened_at(group[0]) if work else "",
        note=next(filter(None, (op.reason.note for op in group)), ""),
    )


def widened_at(op: WalkedOp) -> str:
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
        if "float32" not in given and not set(HALF_NAMES).isdisjoint(given):
            line = site_of(maker).line
            if line != op.site.line:
                break
        queue.extend(variables(maker.invars))
    return line


def matmul_flops(ops: Iterable[WalkedOp]) -> dict[str, int]:
    """Floating-point operations of matrix products and convolutions, by dtype."""
    total = Counter()
    for op in ops:
        if op.eqn.primitive.name in PRODUCTS or flops(op.eqn):
            dtype = next(iter(float_dtypes(op.eqn.invars)), "int")
            total[dtype] += op.times * flops(op.eqn)
    return dict(total.most_common())


def promotions(ops: Iterable[WalkedOp], returned: set[int]) -> list[Promotion]:
    """Where a float32 operand implicitly made a half-precision one float32, and where
    this costs something."""
    rows: dict[tuple[str, str, str], Promotion] = {}
    readers: dict[int, list[WalkedOp]] = {}
    for op in ops:
        for value in op.reads:
            readers.setdefault(value, []).append(op)
    for op in ops:
        if not (op.is_cast and is_widening(op.eqn)) or op.is_backward:
            continue
        kind = op.reason.kind
        if kind.startswith("float32") or kind in ("rules", "statistic"):
            continue
        codes = _compat.codes_of(op.eqn.source_info.traceback)
        if not EXPLICIT.isdisjoint(map(id, codes)):
            continue
        out = op.eqn.outvars[0]
        for reader in readers.get(op.writes[0], ()):
            user = reader.eqn
            if (
                user.primitive.name in MIXING
                and reader.made_by is op.made_by
                and any(is_float32(v, op) for v in user.invars if v is not out)
                and not casts_after(user, op.used_by)  # a region casts it back
                and not is_for_float32(reader, readers, returned)
            ):
                key = user.primitive.name, op.site.line, op.path
                before = rows.get(key, Promotion(*key, 0, 0))
                rows[key] = before._replace(
                    times=before.times + op.times,
                    bytes=before.bytes + op.times * nbytes(array(out)) // 2,
                )
                break
    return sorted(rows.values(), key=lambda p: -p.bytes)


def is_for_float32(
    op: WalkedOp, readers: Mapping[int, list[WalkedOp]], returned: set[int]
) -> bool:
    """Whether only ops that run in float32 anyway, and sums, read a result.

    So it is where a float32 mask goes before a softmax, or a target into a loss. It is
    not for a layer, which keeps its input, or if what is made of it is kept.
    """
    waiting, seen = [*op.writes], set()
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        if value in returned or not readers.get(value):
            return False
        for reader in readers[value]:
            reason, name = reader.reason, reader.eqn.primitive.name
            if reader.is_backward:
                continue
            if reader.times != op.times or reason.name.endswith(".__call__"):
                return False
            made = reader.site.dtypes_out
            is_float32 = reason.kind == Kind.FLOAT32.value
            if is_float32 or not made or name.startswith(REDUCING):
                continue
            is_function = reason.source is Source.FUNCTION
            if is_function or name not in ONE_LOOP or made != ("float32",):
                return False
            waiting.extend(reader.writes)
    return True


def is_widening(cast: JaxprEqn) -> bool:
    given, made = map(float_dtypes, (cast.invars, cast.outvars))
    return given in (("float16",), ("bfloat16",)) and made == ("float32",)


def is_float32(variable: Atom, op: WalkedOp) -> bool:
    """Whether a value is itself float32, and not a number that follows arrays."""
    if isinstance(variable, Literal):
        return False
    dtype = getattr(variable.aval, "dtype", None)
    if dtype != jnp.float32:
        return False
    maker = op.made_by.get(variable)
    if maker is None or maker.primitive.name != CAST:
        return True
    return str(array(maker.invars[0]).dtype) not in HALF_NAMES


def given_dtypes(op: WalkedOp) -> tuple[str, ...]:
    """The dtypes of an op's inputs before the region cast them.

    For a function that counts as one op, these are the inputs from outside of it.
    """
    reason, given = op.reason, []
    for variable in variables(op.eqn.invars):
        maker = op.made_by.get(variable)
        if maker is None or not reason.kind:
            given.append(variable)
        elif is_cast_for(maker, reason):
            given.append(maker.invars[0])
        elif reason_of(maker) != reason or reason.source is not Source.FUNCTION:
            given.append(variable)
    return float_dtypes(given)


def returned_dtypes(last: WalkedOp) -> tuple[str, ...]:
    """The dtypes of an op's results, after the cast with which `jnp.mean` ends."""
    casts = casts_after(last.eqn, last.used_by)
    made = float_dtypes(v for user in casts for v in user.outvars)
    return made if casts else last.site.dtypes_out


def casts_after(eqn: JaxprEqn, used_by: Mapping[Var, list[JaxprEqn]]) -> list[JaxprEqn]:
    """The casts that belong to an op and take its results, if nothing else does."""
    reason = reason_of(eqn)
    users = [user for v in eqn.outvars for user in used_by.get(v, ())]
    belongs = lambda user: user.primitive.name == CAST and reason_of(user) == reason
    return users if reason.kind and all(map(belongs, users)) else []


def is_cast_for(maker: JaxprEqn, reason: Reason) -> bool:
    """Whether a region cast an input for an op, or a float32 one for an op before it.

    A cast in the user's code has its own name as its reason.
    """
    its = reason_of(maker)
    scales = its.note.endswith(ScaledFloat16.name) or (
        param(maker, "new_dtype") in FLOAT8
    )
    if maker.primitive.name != CAST or scales:
        return False
    return its == reason or (its.name not in ("", CAST) and is_widening(maker))


def saved_for_backward(
    run: Callable[[Sequence[jax.Array]], PyTree],
    arrays: Sequence[jax.Array],
    params: Mapping[int, jax.Array],
) -> list[Saved] | None:
    """The arrays that are kept for the derivative with respect to some of the arrays.

    Neither the arguments themselves count, nor arrays that are filled with one number.
    It is None if there is nothing to differentiate.
    """
    if not params:
        return None

    def residuals(arrays):
        def results(params):
            leaves = jax.tree.leaves(run(with_params(arrays, params)))
            leaves = [x for x in leaves if isinstance(x, jax.Array)]
            return [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

        return jax.tree.leaves(jax.vjp(results, {i: arrays[i] for i in params})[1])

    jaxpr = jax.make_jaxpr(residuals)(list(arrays))
    made = origins(jaxpr, [None] * len(arrays))
    saved = {}
    for variable, origin in zip(jaxpr.jaxpr.outvars, made, strict=True):
        aval = array(variable)
        if origin is not None and jnp.issubdtype(aval.dtype, jnp.floating):
            shape, op = tuple(aval.shape), name_of(*origin)
            saved[variable] = Saved(
                str(aval.dtype), shape, nbytes(aval), origin.site, op
            )
    return list(saved.values())


def origins(
    jaxpr: ClosedJaxpr, given: Sequence[Location | None], around: Around = OUTERMOST
) -> list[Location | None]:
    """The op that made each output; None for an argument, a constant or one number."""

    def results(eqn: JaxprEqn, given: list[Location | None]) -> list[Location | None]:
        here, held = Location(eqn, around), inner_jaxprs(eqn)
        if len(held) == 1 and len(held[0].out_avals) == len(eqn.outvars):
            (body,) = held
            # What a scan returns is not what it is given, even if it only moves it.
            is_call = not is_loop(eqn) and len(body.in_avals) == len(given)
            below = given if is_call else [here] * len(body.in_avals)
            return origins(body, below, around.inside(eqn, body.jaxpr))
        is_filled = eqn.primitive.name == "broadcast_in_dim"
        is_filled = is_filled and isinstance(eqn.invars[0], Literal)
        return [None if is_filled else here] * len(eqn.outvars)

    return read(jaxpr, given, results, lambda value: None)

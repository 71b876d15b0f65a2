"""Reading jaxprs: what their equations hold, for all of jamp.

Names of primitives and of their parameters differ between JAX's releases. Those that
jamp reads are listed here and nowhere else, and `make versions` looks each up in each
release. This module uses public names of JAX alone, so that loss scaling works where
JAX's internals have moved.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

Atom = Var | Literal
JAXPRS = Jaxpr, ClosedJaxpr
V = TypeVar("V")
Equation = Any  # or an op on its way through a region, which has the same two fields

# What is read of each primitive, and, of a scan, `arity`.
PARAMETERS = {
    name: frozenset(parameters.split())
    for names, parameters in {
        "argmax argmin reduce_prod reduce_sum": "axes",
        "broadcast_in_dim": "broadcast_dimensions shape",
        "cond": "branches",
        "conv_general_dilated dot_general": "dimension_numbers",
        "convert_element_type": "new_dtype sharding weak_type",
        "cumprod cumsum stack": "axis",
        "custom_jvp_call": "jvp_jaxpr_fun num_consts symbolic_zeros",
        "dynamic_slice": "slice_sizes",
        "concatenate iota": "dimension",
        "gather": "dimension_numbers mode slice_sizes unique_indices",
        "integer_pow": "y",
        "jit": "donated_invars",
        "name": "name",
        "ragged_dot_general": "",  # and of each product what follows below
        "random_bits": "bit_width",
        "reshape": "new_sizes",
        "scan": "jaxpr length reverse unroll",
        "scatter": "update_jaxpr",
        "scatter-add scatter-mul scatter-sub": "unique_indices",
        "sort": "dimension num_keys",
        "squeeze": "dimensions",
        "top_k": "axis",
        "transpose": "permutation",
        "while": "body_jaxpr body_nconsts cond_jaxpr cond_nconsts",
    }.items()
    for name in names.split()
}
for _product in ("conv_general_dilated", "dot_general", "ragged_dot_general"):
    PARAMETERS[_product] |= {"precision", "preferred_element_type"}
# They run the one jaxpr that they hold once, with their own inputs. `jax.checkpoint` is
# called remat2, and what it makes of a scan is a `call`, `closed_call` or `eval_jaxpr`.
CALLS = frozenset(
    """
    call closed_call compute_on custom_jvp_call custom_vjp_call custom_vmap_call
    eval_jaxpr jit remat2 shard_map xla_metadata_call
    """.split()
)

UNKNOWN = """jamp reads the parameter {parameter!r} of the primitive {name!r}. This \
release of JAX does not have it. Install a release that jamp was tested with."""


def param(eqn: Equation, parameter: str) -> Any:
    """A parameter of an equation; None if its primitive is listed without it."""
    name = eqn.primitive.name
    if parameter not in PARAMETERS.get(name, ()):
        return None
    if parameter not in eqn.params:
        raise NotImplementedError(UNKNOWN.format(parameter=parameter, name=name))
    return eqn.params[parameter]


# The functions that an equation holds.


def called(eqn: Equation) -> Any:
    """The closed jaxpr of an equation that runs it once, with its own inputs, or None.

    Python may have handed the function to JAX: then there is no jaxpr yet.
    """
    if eqn.primitive.name not in CALLS:
        return None
    for value in eqn.params.values():
        if isinstance(value, JAXPRS):
            return value if isinstance(value, ClosedJaxpr) else closed(value)
    return None


def calling(eqn: Equation, jaxpr: Jaxpr | ClosedJaxpr) -> dict[str, Any]:
    """The parameters of such an equation, with another jaxpr."""
    (name,) = [n for n, value in eqn.params.items() if isinstance(value, JAXPRS)]
    return eqn.params | {name: jaxpr}


def bound(eqn: Equation) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """The parameters to bind a custom derivative or a shard_map with.

    And the functions among them, as Python handed them to JAX, or made of its jaxpr.
    """
    params = eqn.primitive.get_bind_params(eqn.params) if held(eqn) else eqn.params
    return params, params["subfuns"]


def with_functions(params: dict[str, Any], *functions: Any) -> dict[str, Any]:
    """Such parameters, with other functions."""
    return params | {"subfuns": functions}


def branches(eqn: Equation) -> tuple[ClosedJaxpr, ...]:
    """The jaxprs of a `cond`, which get its inputs but the first. Others have none."""
    return param(eqn, "branches") or ()


class Loop(NamedTuple):
    """A `scan` or a `while`.

    The body gets constants, what the loop carries, and the slices of a scan. It returns
    what it carries, and what a scan stacks.
    """

    body: ClosedJaxpr
    n_consts: int  # of the body
    n_carry: int
    condition: ClosedJaxpr | None = None  # of a while: of its constants, and the carry
    skipped: int = 0  # how many inputs are constants of the condition, before others

    def split(self, values: list[V]) -> tuple[list[V], list[V], list[V], list[V]]:
        """The inputs: of the condition alone; constants, carry and slices."""
        ends = [0, *itertools.accumulate((self.skipped, self.n_consts, self.n_carry))]
        parts = [values[i:j] for i, j in itertools.pairwise(ends)]
        return *parts, values[ends[-1] :]  # pyright: ignore - of four lists


def is_loop(eqn: Equation) -> bool:
    return eqn.primitive.name in ("scan", "while")


def loop(eqn: Equation) -> Loop:
    """What a loop runs again and again."""
    if eqn.primitive.name == "scan":
        return Loop(param(eqn, "jaxpr"), *arity(eqn))
    body, n_consts = param(eqn, "body_jaxpr"), param(eqn, "body_nconsts")
    condition, skipped = param(eqn, "cond_jaxpr"), param(eqn, "cond_nconsts")
    return Loop(body, n_consts, len(body.in_avals) - n_consts, condition, skipped)


def arity(scan: Equation) -> tuple[int, int]:
    """How many inputs of a `scan` are constants, and how many it carries."""
    if "num_carry" in scan.params:  # before JAX 0.11.0
        return scan.params["num_consts"], scan.params["num_carry"]
    consts, carry, _ = scan.params["ft_in"].unpack()
    return len(consts), len(carry)


def held(eqn: Equation) -> list[tuple[str, ClosedJaxpr]]:
    """The jaxprs that an equation holds, each with its parameter."""
    return [
        (name, closed(jaxpr))
        for name, value in eqn.params.items()
        for jaxpr in (value if isinstance(value, tuple | list) else (value,))
        if isinstance(jaxpr, JAXPRS)
    ]


def inside(eqn: Equation) -> Iterator[JaxprEqn]:
    """The equations of all functions that an equation holds, at any depth."""
    for _, jaxpr in held(eqn):
        yield from equations(jaxpr)


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of all functions in it, at any depth."""
    # From JAX 0.11.0 on, there is one class.
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        yield from inside(eqn)


def closed(jaxpr: Jaxpr | ClosedJaxpr) -> ClosedJaxpr:
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def variables(atoms: Iterable[Atom]) -> list[Var]:
    """The atoms without the literals."""
    return [atom for atom in atoms if not isinstance(atom, Literal)]


# From the inputs of a program to its outputs.


def read(
    jaxpr: ClosedJaxpr,
    inputs: Iterable[V],
    results: Callable[[JaxprEqn, list[V]], Iterable[V]],
    constant: Callable[[Any], V] = lambda value: value,
    literal: Callable[[Any], V] | None = None,
) -> list[V]:
    """Reads a program forward, with something for each of its values.

    It may be the value itself, or what is known of it. It is dropped after its last
    use, so that large arrays do not stay.

    Args:
      results: from an equation, and what there is of its inputs, to its results.
      constant: of a constant, from its value.
      literal: of a number in the program, in the place of `constant`.

    Returns:
      What there is of each output.
    """
    program, number = jaxpr.jaxpr, literal or constant
    known: dict[Var, V] = dict(zip(program.invars, inputs, strict=True))
    known |= zip(program.constvars, map(constant, jaxpr.consts), strict=True)
    last: dict[Var, int] = {}
    for place, eqn in enumerate(program.eqns):
        for atom in eqn.invars:
            if isinstance(atom, Var):
                last[atom] = place
    for atom in program.outvars:
        if isinstance(atom, Var):
            last[atom] = len(program.eqns)

    def of(atom: Atom) -> V:
        return number(atom.val) if isinstance(atom, Literal) else known[atom]

    for place, eqn in enumerate(program.eqns):
        made = results(eqn, [*map(of, eqn.invars)])
        known.update(zip(eqn.outvars, made, strict=True))
        for atom in eqn.invars:
            if isinstance(atom, Var) and last[atom] == place:
                known.pop(atom, None)
    return [*map(of, program.outvars)]


def follow(
    jaxpr: ClosedJaxpr,
    inputs: Iterable[V],
    results: Callable[[JaxprEqn, list[V]], Sequence[V]],
    joined: Callable[[Sequence[V]], V],
    other: V,
) -> list[V]:
    """What is known of the outputs of a program, through calls and branches.

    Args:
      results: of an equation that is neither, from what is known of its inputs.
      joined: of a value that is one of several.
      other: of constants, and of numbers in the program.
    """

    def through(eqn: JaxprEqn, given: list[V]) -> Sequence[V]:
        if (function := called(eqn)) is not None:
            return below(function, given)
        if several := branches(eqn):
            each = [below(branch, given[1:]) for branch in several]
            return [*map(joined, zip(*each, strict=True))]
        return results(eqn, given)

    def below(jaxpr: ClosedJaxpr, inputs: Iterable[V]) -> list[V]:
        return read(jaxpr, inputs, through, lambda value: other)

    return below(jaxpr, inputs)


def follow_loops(
    program: ClosedJaxpr,
    inputs: Sequence[V],
    results: Callable[[JaxprEqn, list[V]], list[V]],
    joined: Callable[[Sequence[V]], V],
    nothing: V,
) -> list[V]:
    """`follow`, also through loops: what is known only grows."""

    def through(eqn: JaxprEqn, given: list[V]) -> list[V]:
        if not is_loop(eqn):
            return results(eqn, given)
        inside = loop(eqn)
        before, consts, carry, slices = inside.split(given)
        more = joined([*before, *consts]) if inside.condition else nothing
        while True:
            made = outputs(inside.body, [*consts, *carry, *slices])
            pairs = zip(carry, made, strict=False)
            new = [joined([old, new, more]) for old, new in pairs]
            if new == carry:
                return [*new, *made[len(new) :]]
            carry = new

    def outputs(jaxpr: ClosedJaxpr, inputs: Sequence[V]) -> list[V]:
        return follow(jaxpr, inputs, through, joined, nothing)

    return outputs(program, inputs)

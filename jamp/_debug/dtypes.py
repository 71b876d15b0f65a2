"""The dtypes that an op gets and returns in a user's code, before a region's casts."""

from jax.extend.core import JaxprEqn

from .._autocast.decision import Reason, Source
from .._autocast.low_precision import FLOAT8
from .._autocast.scaled_float16 import ScaledFloat16
from .op_location import float_dtypes, rule_of
from .walk import CAST, Op, array, nbytes, variables


def given_dtypes(op: Op) -> tuple[str, ...]:
    """The dtypes of an op's inputs before the region cast them.

    For a function that counts as one op, these are the inputs from outside of it.
    """
    rule, given = op.site.rule, []
    is_function = Reason.read(rule).source is Source.FUNCTION
    for variable in variables(op.eqn.invars):
        maker = op.made_by.get(variable)
        if maker is None or not rule:
            given.append(variable)
        elif rule_of(maker) != rule:
            given.append(maker.invars[0] if is_shared_cast(maker) else variable)
        elif is_cast_of_its_own(maker):
            given.append(maker.invars[0])
        elif not is_function:
            given.append(variable)
    return float_dtypes(given)


def returned_dtypes(last: Op) -> tuple[str, ...]:
    """The dtypes of an op's results, after the cast with which `jnp.mean` ends.

    Args:
      last: the last primitive of the op.
    """
    users = [user for v in last.eqn.outvars for user in last.used_by.get(v, ())]
    is_own = lambda user: user.primitive.name == CAST and rule_of(user) == rule
    rule = last.site.rule
    if rule and users and all(map(is_own, users)):
        return float_dtypes(v for user in users for v in user.outvars)
    return last.site.dtypes_out


def is_cast_of_its_own(maker: JaxprEqn) -> bool:
    """Whether an equation only casts an input of an op, and does not scale it."""
    is_scaled = Reason.read(rule_of(maker)).note.endswith(ScaledFloat16.name)
    is_cast = maker.primitive.name == CAST
    return is_cast and not (is_scaled or maker.params["new_dtype"] in FLOAT8)


def is_shared_cast(maker: JaxprEqn) -> bool:
    """Whether a region made a float32 copy of an array for an op, and other ops use it.

    A cast in the user's code has its own name as its reason.
    """
    if not is_cast_of_its_own(maker) or not maker.outvars:
        return False
    widens = nbytes(array(maker.outvars[0])) > nbytes(array(maker.invars[0]))
    return widens and Reason.read(rule_of(maker)).name not in ("", CAST)

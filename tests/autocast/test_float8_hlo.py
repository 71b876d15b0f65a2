"""The form of float8 products that XLA makes float8 kernels of, as jaxprs have it.

A form that XLA does not know gives the same numbers from slower kernels, and nothing
says so. What its GPU compiler makes of these is in `tests/test_compiled_targets.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from shared.jaxprs import jaxprs

pytestmark = pytest.mark.usefixtures("default_precision")

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
TENSORWISE, ROWWISE, GW_HP = "tensorwise", "rowwise", "rowwise_with_gw_hp"
RECIPES = (TENSORWISE, ROWWISE, GW_HP)
X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 48), jnp.float32)


def plain(x, w):
    return jnp.matmul(x, w)


def wide(x, w):
    """Half precision that gives float32."""
    x, w = (y.astype(jnp.bfloat16) for y in (x, w))
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


class Form(NamedTuple):
    """A `dot_general`, and what its result is multiplied by."""

    shape: tuple[int, ...]
    left: str
    right: str
    out: str
    precision: object
    scales: tuple[tuple[int, ...], ...]  # the shapes of the factors
    after: tuple[str, ...]  # the ops that follow


def forms(jaxpr):
    """Those of all products, in the order of the program."""
    found = []
    for inner in {id(j): j for j in jaxprs(jaxpr)}.values():
        made = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
        for eqn in inner.eqns:
            if eqn.primitive.name == "dot_general":
                dtypes = [str(v.aval.dtype) for v in (*eqn.invars, *eqn.outvars)]
                precision = eqn.params["precision"]
                highest = precision and {p.name for p in precision} == {"HIGHEST"}
                chain = followed(inner, made, eqn.outvars[0])
                shape = eqn.outvars[0].aval.shape
                found.append(
                    Form(shape, *dtypes, "HIGHEST" if highest else None, *chain)
                )
    return found


def followed(jaxpr, made, var):
    """What a value is multiplied by, and the ops that take what comes out."""
    scales = []
    while True:
        users = [eqn for eqn in jaxpr.eqns if var in eqn.invars]
        if [eqn.primitive.name for eqn in users] != ["mul"]:
            return tuple(scales), tuple(eqn.primitive.name for eqn in users)
        (factor,) = (v for v in users[0].invars if v is not var)
        scales += factors(made, factor)
        var = users[0].outvars[0]


def factors(made, var):
    """The shapes of what a factor is the product of, before they are broadcast."""
    while (eqn := made.get(var)) and eqn.primitive.name in (
        "broadcast_in_dim",
        "convert_element_type",
    ):
        var = eqn.invars[0]
    if eqn is not None and eqn.primitive.name == "mul" and var.aval.shape:
        return [shape for v in eqn.invars for shape in factors(made, v)]
    return [var.aval.shape]


def in_float8(function, recipe=TENSORWISE, **region):
    region = {"dtype": jamp.Float8(recipe), **region}
    return jamp.autocast(**region)(function)


def both_ways(function):
    """The function's result, and the gradients of its inputs."""

    def run(*args):
        y, backward = jax.vjp(function, *args)
        return y, backward(jnp.ones_like(y))

    return run


def forms_of(function, *args):
    return forms(jax.make_jaxpr(function)(*args))


def gradients_of(function, *args):
    """The products of the left and of the right input's gradient."""
    by_shape = {form.shape: form for form in forms_of(both_ways(function), *args)}
    return by_shape[X.shape], by_shape[W.shape]


HIGHEST = "HIGHEST"
OUT, ROWS, COLUMNS, INNER = (64, 48), (64,), (48,), (32,)


@pytest.mark.parametrize(
    ("recipe", "scales"),
    [(TENSORWISE, ((),)), (ROWWISE, (ROWS, COLUMNS)), (GW_HP, (ROWS, COLUMNS))],
)
def test_the_forward_product_is_multiplied_by_its_scales_alone(recipe, scales):
    (form,) = forms_of(in_float8(plain, recipe), X, W)
    assert form == Form(OUT, E4M3, E4M3, "bfloat16", None, scales, ())


def test_a_float32_result_comes_from_the_product_itself():
    (form,) = forms_of(in_float8(wide), X, W)
    assert form == Form(OUT, E4M3, E4M3, "float32", None, ((),), ())


def test_in_float16_the_product_is_float32_until_it_is_scaled():
    function = in_float8(
        plain, dtype=jnp.float16, rules={lax.dot_general_p: jamp.Float8()}
    )
    (form,) = forms_of(function, X, W)
    cast = ("convert_element_type",)
    assert form == Form(OUT, E4M3, E4M3, "float32", None, ((),), cast)


def test_the_backward_products_are_multiplied_by_a_scalar_and_summed_precisely():
    dgrad, wgrad = gradients_of(in_float8(plain), X, W)
    after = ("convert_element_type",)
    assert dgrad == Form(X.shape, E5M2, E4M3, "bfloat16", HIGHEST, ((),), after)
    assert wgrad == Form(W.shape, E4M3, E5M2, "bfloat16", HIGHEST, ((),), after)


def test_rowwise_backward_products_have_the_scales_of_their_own_rows():
    dgrad, wgrad = gradients_of(in_float8(plain, ROWWISE), X, W)
    after = ("convert_element_type",)
    assert dgrad == Form(X.shape, E4M3, E4M3, "bfloat16", HIGHEST, (ROWS, INNER), after)
    assert wgrad == Form(
        W.shape, E4M3, E4M3, "bfloat16", HIGHEST, (INNER, COLUMNS), after
    )


def test_the_weights_gradient_may_stay_in_half_precision():
    dgrad, wgrad = gradients_of(in_float8(plain, GW_HP), X, W)
    assert (dgrad.left, dgrad.right) == (E4M3, E4M3)
    assert (wgrad.left, wgrad.right, wgrad.scales) == ("bfloat16", "bfloat16", ())


def test_under_vmap_the_product_is_direct_and_has_a_scale_for_each_example():
    stacked = jax.ShapeDtypeStruct((2, *X.shape), X.dtype)
    (form,) = forms_of(jax.vmap(in_float8(plain), (0, None)), stacked, W)
    assert form == Form((2, 64, 48), E4M3, E4M3, "bfloat16", None, ((2,), ()), ())


@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_is_kept_for_the_backward_pass_and_scales(recipe):
    def keep(x, w):
        return jax.vjp(in_float8(plain, recipe), x, w)[1]

    leaves = jax.tree.leaves(jax.eval_shape(keep, X, W))
    kept = [(str(x.dtype), x.size) for x in leaves if x.size]
    arrays = sorted((dtype, size) for dtype, size in kept if size in (X.size, W.size))
    left = "bfloat16" if recipe == GW_HP else E4M3
    assert arrays == sorted([(left, X.size), (E4M3, W.size)])
    scales = [size for dtype, size in kept if dtype == "float32"]
    assert len(kept) == len(arrays) + len(scales)
    expected = {TENSORWISE: [1, 1], ROWWISE: [32, 32], GW_HP: [1]}[recipe]
    assert scales == expected

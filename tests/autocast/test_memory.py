"""What autocast saves for the backward pass, beside a model cast by hand."""

import jax
import jax.numpy as jnp
import pytest

import jamp
from shared.residuals import (
    CASES,
    STYLES,
    arguments,
    loss_of,
    residuals,
    saved_bytes,
    total,
)
from tests.marks import cover


def saved(name, style):
    case = CASES[name]
    return residuals(loss_of(case.model, style), *arguments(case))


@cover()
@pytest.mark.parametrize("name", sorted(CASES, key=["MLP", *CASES].index))
def test_saved_bytes(name, standard_promotion):
    by_hand, autocast = saved(name, "by hand"), saved(name, "autocast")
    assert total(autocast) <= CASES[name].target * total(by_hand)


@cover(quick=2, ci=6)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["MLP", "CNN"])
def test_residuals_are_the_leaves_of_vjp(name, style, standard_promotion):
    case = CASES[name]
    loss, args = loss_of(case.model, style), arguments(case)
    assert total(residuals(loss, *args)) == saved_bytes(loss, *args)


def test_products_of_one_input_share_its_copy():
    def loss(params, x):
        with jamp.autocast(dtype=jnp.float16):
            return jnp.sum((x @ params["a"]) * (x @ params["b"]))

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    kept = residuals(loss, {"a": square, "b": square}, square)
    assert [r.dtype for r in kept] == ["float16"] * 3
    assert sorted(r.op for r in kept) == [
        "convert_element_type",
        "dot_general",
        "dot_general",
    ]


def test_no_value_is_saved_in_float32_as_well(standard_promotion):
    kept = [r for r in saved("MLP", "autocast") if r.bytes > 10**5 and not r.constant]
    assert {r.dtype for r in kept} == {"float16", "bool"}

"""autocast: each op in the dtype that suits it, by a JAX trace that casts.

`region` puts an `AutocastTrace` (`trace`) on top of the trace that is current. For an
op that arrives there (`decision`) it asks once which rule decides (`rules`, over the
tables in `ops`), and calls the function that is registered for the primitive. Those in
`primitives` cast the inputs (`input_casts`) and bind the op on the trace below. Those
in `nested` and `custom` are for ops that hold jaxprs or Python functions, which come
back to the trace, op by op (`rewriting`). `notes` remember what a value was made of,
for `bias` and `conversion`; `products`, `sampling`, `refused` and `scatters` are for
ops of these kinds. A recipe (`float8`, `scaled_float16`) says which products it takes,
and runs them: over one description of their dimensions (`contraction`), with numbers
that have a scale (`low_precision`), and with a derivative of their own (`derivatives`).

May import: `_checks`, `_tree`, `_compat`, `_jaxprs`, `_targets`.
"""

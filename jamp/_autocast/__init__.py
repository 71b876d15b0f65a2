"""autocast: each op in the dtype that suits it, by a JAX trace that casts.

`region`, with its `arguments`, puts an `AutocastTrace` (`trace`) on top of the trace
that is current. For an op that arrives there it reads where the op is (`name_stack`,
`call_stack`), asks once for a `decision` (`rules`, over the tables in `ops` and
`libraries`), and calls the function that is registered for the primitive. Those in
`primitives` find out the casts (`input_casts`), cast each value once and bind the op on
the trace below (`casting`). Those in `nested` and `custom` are for ops that hold jaxprs
or Python functions, which come back to the trace, op by op (`rewriting`). `notes`
remember what a value was made of, for `bias`, `numbers` and `written_casts`;
`one_op`, `products`, `refused`, `scatters` and `picks` are for ops of these kinds.
A recipe (`float8`, `scaled_float16`) says which products it takes, by their `weights`,
and runs them: over one description of their dimensions (`contraction`), with numbers
that have a scale (`low_precision`), and with a derivative of their own (`derivatives`).

May import: `_checks`, `_tree`, `_compat`, `_jaxprs`, `_targets`.
"""

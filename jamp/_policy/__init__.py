"""Policies: which dtypes parameters, computation and results have, by module.

A `Policy` casts trees (`policy.py`) or wraps a function (`wrap.py`). `with_policy`
(`linen.py`, `nnx.py`) runs a model under one, with other policies for its parts:

- `overrides.py` reads the arguments (`Plan`) and finds the policy of a module by its
  path and class (`Place`).
- `surgery.py` makes the classes of which methods and reads can be governed.
- `module_call.py` casts around one call of a module (`ModuleCall`), and says meanwhile
  what parameters are read in (`compute_dtype.py`). Those of NNX look there themselves;
  Linen's lie in boxes that do (`linen_box.py`).
- `linen_call.py` follows a call through a Linen model, from the root to the leaves.
- What stays in float32 all the same (`float32_for.py` has the names) does so in an
  autocast region whose table holds these functions alone (`float32_region.py`).

`policy.py` and `float32_for.py` import no more of `_autocast` than its table of ops, so
that casts work where JAX's private parts have moved.

May import: `_checks`, `_tree`, `_autocast`.
"""

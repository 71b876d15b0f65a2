"""Policies: which dtypes parameters, computation and results have, by module.

A `Policy` casts trees (`policy.py`) or wraps a function (`wrap.py`). `with_policy`
(`linen.py`, `nnx.py`) runs a model under one, with other policies for its parts:

- `overrides.py` reads the arguments (`Plan`) and finds the policy of a module by its
  path and class.
- `surgery.py` makes the classes whose methods and reads a policy governs.
- `module_call.py` casts around one call of a module (`ModuleCall`).
- `float32_region.py` has what holds meanwhile: the dtype that parameters are read in,
  and a region whose table holds only the functions that stay in float32. NNX's
  parameters look there themselves; Linen's are in boxes that do (`linen_call.py`).
- `linen_call.py` follows a call through a Linen model, from the root to the leaves.

`policy.py` imports only the table of ops from `_autocast`, so that casts work where
JAX's private parts have moved.

May import: `_checks`, `_tree`, `_targets`, `_autocast`.
"""

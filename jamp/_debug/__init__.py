"""What mixed precision does to a program, and what went wrong: `jamp.debug`.

`explain` walks a jaxpr (`walk`, `op_location`) and says which op ran in which dtype
(`explanation`). `find_nonfinite` runs a jaxpr with a mark for each value (`record`,
`marks`) and goes back from a nan to its source (`trace_back`), and from an overflow to
the op that swallows it (`trace_forward`). The three reports on
gradients (`grad_reports`, `histogram`) have one measuring pass (`grad_numbers`).
`calibrate` runs a loss in a region with a `probe` that measures each product
(`product_errors`), and chooses a dtype for it (`calibration`). `history` collects the
scalars of a run. `call`, `report` and `plots` serve all.

May import: `_checks`, `_tree`, `_compat`, `_jaxprs`, `_autocast`, `_scaling`.
"""

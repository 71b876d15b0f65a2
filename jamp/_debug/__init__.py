"""What mixed precision does to a program, and what went wrong: `jamp.debug`.

`explain` walks a jaxpr (`walk`, `equations`, `sites`) and says which op ran in which
dtype, as data (`findings`, `explanation`) and as text (`explanation_text`).
`find_nonfinite` runs a jaxpr with a mark for each value (`recorder`, `loops`,
`finiteness`, `marks`) and goes back from a nan to its source (`blame`). `grad_reports`,
`histogram` and `plots` look at gradients. `calibrate` runs a loss in a region with a
`probe` that measures each product (`product_errors`, `product_row`), and chooses a
dtype for it (`choice`, `calibration`, `calibration_plot`). `history` collects the
scalars of a run: each step is packed (`packing`), and several go to the host together
(`blocks`). `report` and `table` print.

May import: `_checks`, `_tree`, `_compat`, `_autocast`, `_scaling`.
"""

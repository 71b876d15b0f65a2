"""What mixed precision does to a program, and what went wrong: `jamp.debug`.

`explain` walks a jaxpr (`walk`, `op_location`) and says which op ran in which dtype
(`explanation`), and what may go wrong (`half_risks`). `find_nonfinite` runs a jaxpr
with a mark for each value (`run_marked`, `marks`) and goes back from a nan to its
source (`sources`), and from an overflow to the op that swallows it (`swallowed`). The
three reports on gradients (`grad_reports`, `grad_histogram`) have one measuring pass
(`grad_numbers`). `calibrate` runs a loss in a region with a `probe` that measures each
product (`product_errors`), and chooses a dtype for it (`calibration`). `history`
collects the scalars of a run, `health` raises its alarms, and `check_step` says what a
step does. `flat_call`, `report`, `traits` and `plots` serve all.

May import: `_checks`, `_tree`, `_compat`, `_jaxprs`, `_autocast`, `_scaling`.
"""

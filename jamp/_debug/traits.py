"""What primitives of JAX do to numbers, as reports see it: one list for each trait."""

from .._autocast.traits import names

# The result is the first input, moved or cast.
MOVES = names("""
    broadcast_in_dim convert_element_type copy reshape sharding_constraint
    slice squeeze stop_gradient transpose
""")
# Results hold an inf or nan exactly where the input does.
PRESERVING = names("""
    abs broadcast_in_dim copy name neg optimization_barrier
    reshape rev sharding_constraint squeeze stop_gradient transpose
""")
# Two inputs, of which the wider one decides the dtype of the result.
MIXING = names("add add_any atan2 div max min mul rem select_n sub")
# They make an inf of finite numbers where the result is too large for its dtype: not
# `div` and `log`, which make one at a pole, where an inf is what the user may want.
OVERFLOWING = names("""
    add add_any conv_general_dilated convert_element_type cosh cumprod
    cumsum dot_general exp exp2 expm1 integer_pow mul psum psum_invariant
    ragged_dot_general reduce_precision reduce_prod reduce_sum reduce_window_sum
    scatter-add scatter-mul scatter-sub sinh square sub
""")
# They make a finite number of an inf that is not the limit that a large number has: not
# `tanh`, `logistic` and others, of which a large number gives the same.
SWALLOWING = names("div exp exp2 expm1 integer_pow pow rsqrt")
# They compare two numbers, and give the smaller one, say, or whether it is the first.
COMPARING = names("clamp ge gt le lt max min")
# They sort along one axis, and give places. Of two infs either one may be the larger.
RANKING = names("argmax argmin sort top_k")
# They choose among the numbers of their inputs.
CHOOSING = names("""
    cummax cummin max min reduce_max reduce_min reduce_window_max reduce_window_min
""")
# Not shown in lists of ops: they move elements, and compute nothing.
UNPRINTED = names("""
    broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice
    gather pad reduce_precision reshape rev slice split squeeze stop_gradient transpose
""")

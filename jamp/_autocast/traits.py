"""What primitives of JAX do, whatever their dtypes: one list for each trait.

The names are JAX's, from all versions that jamp knows. `ops.py` has the dtypes. A test
checks that jamp knows each name from there, from a rule, or from here, as one that is
left alone.
"""

from .._jaxprs import CALLS


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Matrix products and convolutions.
PRODUCTS = _names("conv_general_dilated dot_general ragged_dot_general")
# The result is the first input, moved or cast.
MOVES = _names("""
    broadcast_in_dim convert_element_type copy reshape sharding_constraint
    slice squeeze stop_gradient transpose
""")
# The moves after which it is still known what a value was made of: see `notes.py`.
FOLLOWED = _names("broadcast_in_dim copy reshape slice squeeze transpose")
# The results are the inputs, and eagerly often the same arrays.
UNMOVED = _names("""
    device_put name optimization_barrier pbroadcast pvary reshard
    sharding_constraint stop_gradient
""")
# Results hold an inf or nan exactly where the input does.
PRESERVING = _names("""
    abs broadcast_in_dim copy name neg optimization_barrier
    reshape rev sharding_constraint squeeze stop_gradient transpose
""")
# Each element of the result is made from the elements at its place.
ELEMENTWISE = _names("""
    acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp convert_element_type
    cos cosh digamma div erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p
    log2 logistic max min mul nextafter pow reduce_precision rem rsqrt select_n sin sinh
    sqrt square sub tan tanh
""")
# Their results have the dimensions of their inputs; `stack` has one more.
ALIGNED = ELEMENTWISE | _names("""
    abs ceil concatenate eq floor ge gt le lt ne neg round sign stack
""")
# Two inputs, of which the wider one decides the dtype of the result.
MIXING = _names("add add_any atan2 div max min mul rem select_n sub")
# They make an inf of finite numbers where the result is too large for its dtype: not
# `div` and `log`, which make one at a pole, where an inf is what the user may want.
OVERFLOWING = _names("""
    add add_any conv_general_dilated convert_element_type cosh cumprod
    cumsum dot_general exp exp2 expm1 integer_pow mul psum psum_invariant
    ragged_dot_general reduce_precision reduce_prod reduce_sum reduce_window_sum
    scatter-add scatter-mul scatter-sub sinh square sub
""")
# They make a finite number of an inf that is not the limit that a large number has: not
# `tanh`, `logistic` and others, of which a large number gives the same.
SWALLOWING = _names("div exp exp2 expm1 integer_pow pow rsqrt")
# They compare two numbers, and give the smaller one, say, or whether it is the first.
COMPARING = _names("clamp ge gt le lt max min")
# They sort along one axis, and give places. Of two infs either one may be the larger.
RANKING = _names("argmax argmin sort top_k")
# They choose among the numbers of their inputs.
CHOOSING = _names("""
    cummax cummin max min reduce_max reduce_min reduce_window_max reduce_window_min
""")
# They add or multiply many numbers into one, or their gradients do: see `scatters.py`.
GATHERING = _names("gather scatter-add scatter-mul scatter-sub")
# Not shown in lists of ops: they move elements, and compute nothing.
UNPRINTED = _names("""
    broadcast_in_dim concatenate copy dynamic_slice dynamic_update_slice
    gather pad reduce_precision reshape rev slice split squeeze stop_gradient transpose
""")
# They pick slices of their first input, at the places that the others say.
PICKS = _names("dynamic_slice gather")
# Reductions over a mapped axis.
OVER_AXES = _names("pmax pmin psum psum_invariant")
# They write a value into an array, or into a `Ref`, whose dtype is fixed.
UPDATES = _names("dynamic_update_slice")
REF_WRITES = _names("accum_grad_in_ref addupdate swap")
# They hold functions, and their results are known from inside.
ANNOTATED = CALLS - {"custom_jvp_call"} | {"cond", "scan", "while"}
# They hold functions, or write into a `Ref`, and a rule for them alone decides nothing:
# the ops inside are asked about one by one.
PASSED_THROUGH = REF_WRITES | ANNOTATED - {"custom_vjp_call", "jit"}
# Kernels, callbacks and solvers, which run code that is not that of a jaxpr.
KERNELS = _names("""
    call_exported composite cudnn_fusion custom_lin custom_linear_solve
    custom_partitioning ffi_call fused_call io_callback linear_call pallas_call
    pure_callback remat_opt run_state tpu_custom_call triton_kernel_call
""")
# These and others that run as they were traced.
LEFT_ALONE = KERNELS | _names("""
    approx_top_k dce_sink debug_callback debug_print reduce reduce_window
    select_and_scatter
""")
# Rounding runs as it was traced.
NO_RULE = _names("reduce_precision")

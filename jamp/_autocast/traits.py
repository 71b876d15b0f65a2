"""What primitives of JAX do, whatever their dtypes: one list for each trait.

The names are JAX's, from all versions that jamp knows. `ops.py` has the dtypes. A test
checks that jamp knows each name from there, from a rule, or from here, as one that is
left alone.
"""

from .._jaxprs import CALLS


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Matrix products and convolutions.
PRODUCTS = names("conv_general_dilated dot_general ragged_dot_general")
# The moves after which it is still known what a value was made of: see `notes.py`.
FOLLOWED = names("broadcast_in_dim copy reshape slice squeeze transpose")
# The results are the inputs, and eagerly often the same arrays.
UNMOVED = names("""
    device_put name optimization_barrier pbroadcast pvary reshard
    sharding_constraint stop_gradient
""")
# Each element of the result is made from the elements at its place.
ELEMENTWISE = names("""
    acos acosh add add_any asin asinh atan atan2 atanh cbrt clamp convert_element_type
    cos cosh digamma div erf erf_inv erfc exp exp2 expm1 integer_pow lgamma log log1p
    log2 logistic max min mul nextafter pow reduce_precision rem rsqrt select_n sin sinh
    sqrt square sub tan tanh
""")
# Those whose derivative may overflow or lose digits where they run in half precision.
CURVED = names("""
    acosh asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt cos digamma div erf erfc
    exp2 igamma igammac lgamma logistic polygamma regularized_incomplete_beta rem sin
    sqrt tanh zeta
""")
# They add or multiply many numbers into one, or their gradients do: see `scatters.py`.
GATHERING = names("gather scatter-add scatter-mul scatter-sub")
# They pick slices of their first input, at the places that the others say.
PICKS = names("dynamic_slice gather")
# They make the statistics of a norm, of its input's dimensions or a mapped axis.
REDUCTIONS = names("pmax pmin psum psum_invariant reduce_max reduce_min reduce_sum")
# They stand for one function, whose row decides about all inside.
NAMED = names("custom_jvp_call custom_vjp_call jit")
# They write a value into a `Ref`, whose dtype is fixed.
REF_WRITES = names("accum_grad_in_ref addupdate swap")
# They hold functions, and their results are known from inside.
ANNOTATED = CALLS - {"custom_jvp_call", "custom_vmap_call"} | {"cond", "scan", "while"}
# They hold functions, or write into a `Ref`, and a rule for them alone decides nothing:
# the ops inside are asked about one by one.
PASSED_THROUGH = REF_WRITES | ANNOTATED - {"custom_vjp_call", "jit"}
# Kernels, callbacks and solvers, which run code that is not that of a jaxpr.
KERNELS = names("""
    call_exported composite cudnn_fusion custom_lin custom_linear_solve
    custom_partitioning custom_vmap_call ffi_call fused_call io_callback linear_call
    pallas_call pure_callback remat_opt run_state tpu_custom_call triton_kernel_call
""")
# These and others that run as they were traced.
LEFT_ALONE = KERNELS | names("""
    approx_top_k dce_sink debug_callback debug_print reduce reduce_window
    select_and_scatter
""")

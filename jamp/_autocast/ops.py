"""Which op runs in which dtype under `jamp.autocast`: the tables, as data.

The categories are those of `torch/include/ATen/autocast_mode.h`, the lists that
`torch.autocast("cuda")` uses:

    LOWER           floating inputs are cast to the region's dtype
    FLOAT32         half-precision inputs are cast to float32
    PROMOTE         inputs of several floating dtypes are cast to the widest
    KEEP            runs in the dtype that it is given

and for functions that torch does not list, but that lose too much in half precision:

    STATISTIC       PROMOTE, but FLOAT32 if it was traced in float32: it sums many
    FLOAT32_INSIDE  FLOAT32, but outside the result has the dtype of the input: what no
                    reduction has made, which is a statistic
    ONE_OP          float32 inside, and the result is rounded to the dtype of the input:
                    one kernel in torch, whose derivative is computed in float32 too

A function that reads the dtype of its input has a row that `refuses` some inputs.
`PRIMITIVES` maps the names of JAX's primitives, `FUNCTIONS` the Python functions of JAX
and the libraries around it that torch treats as one op. A function's row applies to all
ops inside the function, so that `softmax` subtracts its maximum in float32 too and
`gelu` does not turn float32 because of the cube inside it. Each row names the torch ops
that it mirrors. The parity suite has the rest of torch's lists, and compares them with
the header of the installed torch.

Ops that are not listed run in the dtypes that they are given. But inside a function
that was traced before the casts reach it, as `jit` and `scan` do, their inputs get the
dtypes that they were traced with. Float64, complex numbers, float8 and integers are
never cast.
"""

from typing import NamedTuple

from .decision import Kind as Kind
from .decision import Refuses
from .refused import as_coarse, as_rounded_labels, as_too_many


class Row(NamedTuple):
    kind: Kind
    torch: str = ""  # the ops of torch's lists that it mirrors, by their names there
    refuses: Refuses | None = None


LOWER, FLOAT32, PROMOTE, KEEP = Kind.LOWER, Kind.FLOAT32, Kind.PROMOTE, Kind.KEEP
STATISTIC, FLOAT32_INSIDE = Kind.STATISTIC, Kind.FLOAT32_INSIDE
ONE_OP = Kind.ONE_OP

# A contraction of two vectors is torch's `dot`, which promotes; see `input_casts.py`.
PRIMITIVES: dict[str, Row] = {
    "dot_general": Row(
        LOWER,
        "matmul mm mv bmm addmm addbmm linear einsum chain_matmul "
        "linalg_multi_dot dot vdot scaled_dot_product_attention",
    ),
    "ragged_dot_general": Row(LOWER),
    "conv_general_dilated": Row(
        LOWER,
        "_convolution convolution conv1d conv2d conv3d conv_tbc conv_transpose1d "
        "conv_transpose2d conv_transpose3d",
    ),
    "acos": Row(FLOAT32, "acos"),
    "asin": Row(FLOAT32, "asin"),
    "cosh": Row(FLOAT32, "cosh"),
    "erf_inv": Row(FLOAT32, "erfinv"),
    "exp": Row(FLOAT32, "exp"),
    "expm1": Row(FLOAT32, "expm1"),
    "log": Row(FLOAT32, "log log2 log10"),
    "log2": Row(FLOAT32, "log2"),
    "log1p": Row(FLOAT32, "log1p"),
    "rsqrt": Row(FLOAT32, "rsqrt"),
    "sinh": Row(FLOAT32, "sinh"),
    "tan": Row(FLOAT32, "tan"),
    "pow": Row(FLOAT32, "pow"),
    "integer_pow": Row(FLOAT32, "pow"),
    "square": Row(FLOAT32, "pow"),
    "reduce_sum": Row(FLOAT32, "sum"),
    "reduce_prod": Row(FLOAT32, "prod"),
    "reduce_window_sum": Row(FLOAT32),
    "cumsum": Row(FLOAT32, "cumsum"),
    "cumprod": Row(FLOAT32, "cumprod"),
    "cumlogsumexp": Row(FLOAT32),
    "atan2": Row(PROMOTE, "atan2"),
    "sub": Row(PROMOTE, "cross"),
}
PRIMITIVES |= dict.fromkeys(  # no kernel takes half precision
    """
    cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu
    ormqr qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve
    """.split(),
    Row(FLOAT32),
)
PRIMITIVES |= dict.fromkeys(
    """
    add add_any clamp concatenate div dynamic_update_slice eq ge gt igamma igamma_grad_a
    igammac le lt max min mul ne nextafter pad polygamma regularized_incomplete_beta rem
    scatter scatter-max scatter-min select_and_gather_add select_and_scatter_add
    select_n stack zeta
    """.split(),
    Row(PROMOTE),
)
PRIMITIVES |= dict.fromkeys(
    "scatter-add scatter-mul scatter-sub".split(), Row(STATISTIC)
)
PRIMITIVES |= dict.fromkeys(
    """
    abs acosh all_gather all_gather_invariant all_to_all argmax argmin asinh atan atanh
    bessel_i0e bessel_i1e broadcast_in_dim cbrt ceil conj convert_element_type copy
    cos cummax cummin device_put digamma dynamic_slice erf erfc exp2
    floor gather imag is_finite lgamma logistic name neg one_minus_square
    optimization_barrier pbroadcast pmax pmin ppermute preduced psum
    psum_invariant pvary real reduce_max reduce_min reduce_scatter reduce_window_max
    reduce_window_min reshape reshard rev round sharding_constraint
    sign sin slice sort split sqrt squeeze stage stop_gradient tanh tie tile top_k
    transpose unreduced_psum unreduced_reduce_scatter unstack vary_unreduced_cast
    """.split(),
    Row(KEEP),
)

# A function is found by its code, or, if it is jitted, by the name and the line that
# JAX records with its jaxpr. A row is skipped if its function does not exist or its
# library is not imported.
FUNCTIONS: dict[str, Row] = {
    "jax.numpy.vecdot": Row(LOWER, "linalg_vecdot"),
    "jax.numpy.linalg.vecdot": Row(LOWER, "linalg_vecdot"),
    "jax.numpy.tensordot": Row(LOWER),  # or it widens the product again
    "flax.linen.PReLU.__call__": Row(LOWER, "prelu"),
    "flax.nnx.PReLU.__call__": Row(LOWER, "prelu"),
    "equinox.nn.PReLU.__call__": Row(LOWER, "prelu"),
    "flax.linen.LSTMCell.__call__": Row(LOWER, "lstm_cell"),
    "flax.linen.OptimizedLSTMCell.__call__": Row(LOWER, "lstm_cell"),
    "flax.linen.GRUCell.__call__": Row(LOWER, "gru_cell"),
    "flax.linen.MGUCell.__call__": Row(LOWER),
    "flax.linen.SimpleCell.__call__": Row(LOWER, "rnn_tanh_cell rnn_relu_cell"),
    "flax.nnx.LSTMCell.__call__": Row(LOWER, "lstm_cell"),
    "flax.nnx.OptimizedLSTMCell.__call__": Row(LOWER, "lstm_cell"),
    "flax.nnx.GRUCell.__call__": Row(LOWER, "gru_cell"),
    "flax.nnx.SimpleCell.__call__": Row(LOWER, "rnn_tanh_cell rnn_relu_cell"),
    "equinox.nn.LSTMCell.__call__": Row(LOWER, "lstm_cell"),
    "equinox.nn.GRUCell.__call__": Row(LOWER, "gru_cell"),
    "haiku.LSTM.__call__": Row(LOWER, "lstm_cell"),
    "haiku.GRU.__call__": Row(LOWER, "gru_cell"),
    "haiku.VanillaRNN.__call__": Row(LOWER, "rnn_relu_cell"),
    # The last carry of a network starts another one's scan, which keeps its dtype.
    "flax.linen.recurrent._select_last_carry": Row(FLOAT32),
    "flax.nnx.nn.recurrent._select_last_carry": Row(FLOAT32),
    "jax.nn.softmax": Row(FLOAT32, "softmax"),
    "jax.nn.log_softmax": Row(FLOAT32, "log_softmax"),
    "jax.nn.logsumexp": Row(FLOAT32, "logsumexp"),
    "jax.nn.softplus": Row(FLOAT32, "softplus"),
    "jax.numpy.sum": Row(FLOAT32, "sum"),
    "jax.numpy.prod": Row(FLOAT32, "prod"),
    "jax.numpy.cumsum": Row(FLOAT32, "cumsum"),
    "jax.numpy.cumprod": Row(FLOAT32, "cumprod"),
    "jax.numpy.mean": Row(STATISTIC),
    "jax.numpy.reciprocal": Row(FLOAT32, "reciprocal"),
    "jax.numpy.linalg.norm": Row(FLOAT32, "norm frobenius_norm nuclear_norm"),
    "jax.numpy.linalg.vector_norm": Row(FLOAT32, "linalg_vector_norm"),
    "jax.numpy.linalg.matrix_norm": Row(FLOAT32, "linalg_matrix_norm"),
    "jax.image.resize": Row(
        FLOAT32,
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d "
        "upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa",
    ),
    "jax.image.scale_and_translate": Row(FLOAT32),
    "flax.linen.LayerNorm.__call__": Row(FLOAT32, "layer_norm native_layer_norm"),
    "flax.linen.RMSNorm.__call__": Row(FLOAT32, "rms_norm"),
    "flax.linen.GroupNorm.__call__": Row(FLOAT32, "group_norm"),
    "flax.nnx.LayerNorm.__call__": Row(FLOAT32, "layer_norm native_layer_norm"),
    "flax.nnx.RMSNorm.__call__": Row(FLOAT32, "rms_norm"),
    "flax.nnx.GroupNorm.__call__": Row(FLOAT32, "group_norm"),
    "equinox.nn.LayerNorm.__call__": Row(FLOAT32, "layer_norm native_layer_norm"),
    "equinox.nn.RMSNorm.__call__": Row(FLOAT32, "rms_norm"),
    "equinox.nn.GroupNorm.__call__": Row(FLOAT32, "group_norm"),
    "haiku.LayerNorm.__call__": Row(FLOAT32, "layer_norm native_layer_norm"),
    "haiku.RMSNorm.__call__": Row(FLOAT32, "rms_norm"),
    "haiku.GroupNorm.__call__": Row(FLOAT32, "group_norm"),
    "keras.ops.layer_normalization": Row(FLOAT32, "layer_norm native_layer_norm"),
    "keras.ops.rms_normalization": Row(FLOAT32, "rms_norm"),
    "flax.linen.avg_pool": Row(FLOAT32_INSIDE),
    "haiku.avg_pool": Row(FLOAT32_INSIDE),
    "equinox.nn.AvgPool1d.__call__": Row(FLOAT32_INSIDE),
    "equinox.nn.AvgPool2d.__call__": Row(FLOAT32_INSIDE),
    "equinox.nn.AvgPool3d.__call__": Row(FLOAT32_INSIDE),
    "flax.linen.BatchNorm.__call__": Row(FLOAT32_INSIDE),
    "flax.nnx.BatchNorm.__call__": Row(FLOAT32_INSIDE),
    "equinox.nn.BatchNorm.__call__": Row(FLOAT32_INSIDE),
    "haiku.BatchNorm.__call__": Row(FLOAT32_INSIDE),
    "optax.squared_error": Row(FLOAT32, "mse_loss"),
    "optax.l2_loss": Row(FLOAT32, "mse_loss"),
    "optax.huber_loss": Row(FLOAT32, "huber_loss smooth_l1_loss"),
    "optax.hinge_loss": Row(FLOAT32, "hinge_embedding_loss"),
    "optax.cosine_similarity": Row(FLOAT32, "cosine_similarity"),
    "optax.cosine_distance": Row(FLOAT32, "cosine_embedding_loss"),
    "optax.kl_divergence": Row(FLOAT32, "kl_div"),
    "optax.losses.kl_divergence_with_log_targets": Row(FLOAT32, "kl_div"),
    "optax.losses.triplet_margin_loss": Row(FLOAT32, "triplet_margin_loss"),
    "optax.sigmoid_binary_cross_entropy": Row(
        FLOAT32, "binary_cross_entropy_with_logits soft_margin_loss"
    ),
    "optax.softmax_cross_entropy": Row(FLOAT32),
    "optax.safe_softmax_cross_entropy": Row(FLOAT32),
    "optax.softmax_cross_entropy_with_integer_labels": Row(FLOAT32, "nll_loss"),
} | dict.fromkeys(
    # torch lists none of these: half precision in, half precision out.
    """
    jax.nn.celu jax.nn.elu jax.nn.gelu jax.nn.glu jax.nn.hard_sigmoid jax.nn.hard_silu
    jax.nn.log_sigmoid jax.nn.mish jax.nn.selu jax.nn.silu jax.nn.soft_sign
    jax.nn.squareplus jax.numpy.hypot jax.numpy.sinc jax.scipy.special.logit
    jax.scipy.special.xlog1py jax.scipy.special.xlogy
    """.split(),
    Row(ONE_OP),
)

FUNCTIONS |= dict.fromkeys(  # sums, squares and counts of many, filters, losses
    """
    e3nn_jax.scatter_mean e3nn_jax.scatter_sum
    jax.nn.standardize jax.numpy.average jax.numpy.bincount jax.numpy.convolve
    jax.numpy.corrcoef jax.numpy.correlate jax.numpy.cov jax.numpy.histogram
    jax.numpy.histogram2d jax.numpy.histogramdd jax.numpy.linalg.matrix_power
    jax.numpy.nanmean jax.numpy.nanstd jax.numpy.nanvar jax.numpy.std jax.numpy.var
    jax.ops.segment_prod jax.ops.segment_sum jax.scipy.linalg.expm
    keras.layers.MelSpectrogram.call
    keras.layers.RandomPerspective._get_transformed_coordinates
    keras.layers.STFTSpectrogram.call
    keras.layers.SpectralNormalization.normalized_weights
    keras.ops.var keras.optimizers.Muon.zeropower_via_newtonschulz5
    keras.regularizers.OrthogonalRegularizer.__call__ keras.src.backend.jax.nn.ctc_loss
    keras.src.ops.image._ssim keras.utils.bounding_boxes.affine_transform
    optax.ctc_loss optax.losses.ctc_loss_with_forward_probs
    optax.losses.multiclass_perceptron_loss optax.losses.multiclass_sparsemax_loss
    optax.losses.perceptron_loss optax.projections.projection_simplex optax.tree.vdot
    penzai.nn.standardization.RMSStandardize.__call__
    penzai.nn.standardization.Standardize.__call__
    tensorflow_probability.substrates.jax.stats.stddev
    tensorflow_probability.substrates.jax.stats.variance
    """.split(),
    Row(FLOAT32),
)
FUNCTIONS |= dict.fromkeys(  # they cast the labels to the dtype of the predictions
    """
    keras.losses.binary_crossentropy keras.losses.binary_focal_crossentropy
    keras.losses.categorical_crossentropy keras.losses.categorical_focal_crossentropy
    keras.losses.categorical_generalized_cross_entropy keras.losses.categorical_hinge
    keras.losses.circle keras.losses.cosine_similarity keras.losses.ctc
    keras.losses.dice keras.losses.hinge keras.losses.huber keras.losses.kl_divergence
    keras.losses.log_cosh keras.losses.mean_absolute_error
    keras.losses.mean_absolute_percentage_error keras.losses.mean_squared_error
    keras.losses.mean_squared_logarithmic_error keras.losses.poisson
    keras.losses.sparse_categorical_crossentropy keras.losses.squared_hinge
    keras.losses.tversky keras.metrics.concordance_correlation
    keras.metrics.pearson_correlation
    """.split(),
    Row(FLOAT32, refuses=as_rounded_labels),
)
FUNCTIONS |= dict.fromkeys(  # they move elements, some by products with zeros and ones
    """
    jax.lax.conv_general_dilated_patches jax.nn.hard_tanh jax.nn.leaky_relu jax.nn.relu
    jax.nn.relu6 jax.numpy.take_along_axis
    keras.src.backend.jax.nn.fold keras.src.ops.image._extract_patches
    keras.src.ops.image._extract_patches_3d
    """.split(),
    Row(KEEP),
)
FUNCTIONS |= dict.fromkeys(  # they choose an approximation by the dtype, in Python
    """
    jax.scipy.special.bessel_jn jax.scipy.special.dawsn jax.scipy.special.erfcx
    jax.scipy.special.exp1 jax.scipy.special.expi jax.scipy.special.expn
    jax.scipy.special.fresnel jax.scipy.special.hyp1f1 jax.scipy.special.hyp2f1
    jax.scipy.special.log_ndtr jax.scipy.special.ndtr jax.scipy.special.ndtri
    jax.scipy.special.owens_t jax.scipy.special.poch jax.scipy.special.sici
    jax.scipy.special.spence jax.scipy.special.sph_harm_y jax.scipy.special.wofz
    jax.scipy.special.zeta
    """.split(),
    Row(FLOAT32),
)
FUNCTIONS |= dict.fromkeys(  # their index into the sorted input is a floating number
    """
    jax.numpy.median jax.numpy.nanmedian jax.numpy.nanpercentile jax.numpy.nanquantile
    jax.numpy.percentile jax.numpy.quantile
    """.split(),
    Row(FLOAT32, refuses=as_too_many),
)
FUNCTIONS |= dict.fromkeys(  # they take a tolerance from the dtype of their input
    """
    jax.numpy.linalg.lstsq jax.numpy.linalg.matrix_rank jax.numpy.linalg.pinv
    jax.numpy.polyfit jax.numpy.roots jax.random.binomial jax.random.multinomial
    jax.scipy.linalg.funm jax.scipy.signal.detrend jax.scipy.sparse.linalg.gmres
    """.split(),
    Row(FLOAT32, refuses=as_coarse),
)
FUNCTIONS |= dict.fromkeys(  # they draw noise in the dtype of their input
    """
    jax.random.bernoulli jax.random.categorical jax.random.choice jax.random.geometric
    jax.random.multivariate_normal
    """.split(),
    Row(FLOAT32, refuses=as_coarse),
)
FUNCTIONS |= dict.fromkeys(  # these draw in the dtype that they are asked for
    """
    jax.random.ball jax.random.beta jax.random.bits jax.random.cauchy
    jax.random.chisquare jax.random.dirichlet jax.random.double_sided_maxwell
    jax.random.exponential jax.random.f jax.random.gamma jax.random.generalized_normal
    jax.random.gumbel jax.random.laplace jax.random.loggamma jax.random.logistic
    jax.random.lognormal jax.random.maxwell jax.random.normal jax.random.orthogonal
    jax.random.pareto jax.random.permutation jax.random.poisson jax.random.rademacher
    jax.random.randint jax.random.rayleigh jax.random.t jax.random.triangular
    jax.random.truncated_normal jax.random.uniform jax.random.wald
    jax.random.weibull_min
    """.split(),
    Row(KEEP),
)

# What a policy keeps in float32 unless it is told otherwise, by the names that
# `float32_for=` takes.
KEPT = {
    "norms": tuple(path for path in FUNCTIONS if path.endswith("Norm.__call__")),
    "softmax": ("jax.nn.softmax", "jax.nn.log_softmax", "jax.nn.logsumexp"),
    "losses": tuple(path for path in FUNCTIONS if path.startswith("optax.")),
}

# Parameters are made in the dtype that they ask for, in any region. NNX makes them when
# a module is constructed; in Equinox they are drawn (`jax.random` above).
EXEMPT = (
    "flax.core.scope.Scope.param",
    "flax.core.scope.Scope.variable",
    "flax.nnx.pytreelib.PytreeMeta.__call__",
    "haiku.get_parameter",
    "haiku.get_state",
)

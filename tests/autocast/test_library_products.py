"""Products that libraries write for other ends than a layer's: none runs in half.

The search reads the sources of the installed libraries. A function that holds a product
has a row in `ops.py`, by itself or by its module, or a reason here.
"""

import functools
import sys
import warnings
from fnmatch import fnmatchcase
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax import lax
from jax.experimental.ode import odeint
from jax.scipy.optimize import minimize
from jax.scipy.spatial.transform import Rotation

import jamp
from jamp._autocast.call_stack import resolve
from jamp._autocast.libraries import LAYERS, MODULES, module_of
from jamp._autocast.ops import FUNCTIONS, Kind
from shared.keras_on_jax import import_keras
from tests.autocast.product_search import Holder, holders
from tests.jaxprs import products
from tests.marks import cover

LAYER = "the product of a layer"
PLAIN = "a way to write a product: its caller decides what it is for"
KERNEL = "a kernel or a reference for one, which runs as it was traced"
BELOW = "a rule of a primitive: JAX calls it below the region"
REFUSED = "inside a function that a region refuses to run in half precision"
OFFLINE = "works on arrays of the host, or before training"
ELSEWHERE = "called by a function that has a row, in another module"

REASONS: dict[str, dict[str, str]] = {
    "optax": {},
    "jax": {
        LAYER: """
            _src.nn.functions._dot_product_attention_core
            _src.nn.functions.scaled_dot_general
            example_libraries.stax.Dense example_libraries.stax.GeneralConv
            example_libraries.stax.GeneralConvTranspose experimental.rnn.lstm_ref
            """,
        PLAIN: """
            _src.lax.convolution.conv _src.lax.convolution.conv_transpose
            _src.lax.convolution.conv_with_general_padding _src.lax.lax.batch_matmul
            _src.lax.lax.dot_general _src.lax.lax.ragged_dot
            _src.lax.other.conv_general_dilated_local _src.numpy.array_methods._dot
            _src.numpy.array_methods._operator_matmul
            _src.numpy.array_methods._operator_rmatmul _src.numpy.einsum._einsum
            _src.numpy.einsum.einsum _src.numpy.linalg.matmul
            _src.numpy.linalg.multi_dot _src.numpy.linalg.tensordot
            _src.numpy.linalg.vecdot _src.numpy.tensor_contractions.dot
            _src.numpy.tensor_contractions.inner _src.numpy.tensor_contractions.matmul
            _src.numpy.tensor_contractions.tensordot
            _src.numpy.tensor_contractions.vdot experimental.sparse.bcoo.*
            experimental.sparse.bcsr.*
            """,
        BELOW: """
            _src.lax.convolution._conv_general_dilated_*
            _src.lax.lax._dot_general_* _src.lax.lax._ragged_dot_general_*
            _src.lax.scaled_dot._scaled_dot_impl _src.numpy.hijax.Einsum.transpose
            _src.tpu.linalg.*
            """,
        REFUSED: "_src.numpy.linalg._pinv _src.numpy.linalg._pinv_jvp",
        KERNEL: """
            *mosaic* *pallas* _src.cudnn.* _src.internal_test_util.*
            _src.lax_reference.*
            """,
    },
    "flax": {
        LAYER: """
            core.nn.attention.dot_product_attention core.nn.linear.*
            linen.attention.dot_product_attention
            linen.attention.dot_product_attention_weights
            linen.experimental.layers_with_named_axes.*.* linen.fp8_ops.*
            linen.linear.*.__call__ linen.linear.Embed.attend
            linen.recurrent.OptimizedLSTMCell.__call__
            nnx.nn.attention.dot_product_attention
            nnx.nn.attention.dot_product_attention_weights nnx.nn.linear.*.__call__
            nnx.nn.linear.*.__init__ nnx.nn.linear.Embed.attend
            nnx.nn.lora.LoRA.__call__
            """,
        PLAIN: "cursor.Cursor.__matmul__ cursor.Cursor.__rmatmul__",
    },
    "equinox": {
        LAYER: """
            nn._attention.dot_product_attention
            nn._attention.dot_product_attention_weights nn._conv.Conv.__call__
            nn._conv.ConvTranspose.__call__ nn._linear.Linear.__call__
            nn._rnn.GRUCell.__call__ nn._rnn.LSTMCell.__call__
            """,
    },
    "haiku": {
        LAYER: """
            _src.attention.MultiHeadAttention.__call__ _src.basic.Linear.__call__
            _src.conv.ConvND.__call__ _src.conv.ConvNDTranspose.__call__
            _src.depthwise_conv.DepthwiseConvND.__call__ _src.embed.Embed.__call__
            _src.recurrent.GRU.__call__
            """,
    },
    "keras": {
        LAYER: """
            src.backend.jax.nn._dot_product_attention_core src.backend.jax.nn.conv
            src.backend.jax.nn.conv_transpose src.backend.jax.nn.depthwise_conv
            src.backend.jax.nn.separable_conv src.backend.jax.rnn.gru
            src.layers.attention.*.* src.layers.convolutional.*.* src.layers.core.*.*
            src.layers.merging.dot.batch_dot src.layers.rnn.*.*
            """,
        PLAIN: """
            src.backend.common.variables.Variable.* src.backend.jax.numpy.*
            src.legacy.backend.* src.ops.nn.Conv.call src.ops.nn.ConvTranspose.call
            src.ops.nn.conv src.ops.nn.conv_transpose src.ops.numpy.*
            """,
        ELSEWHERE: "*.bounding_boxes.bounding_box.BoundingBox.affine",
        OFFLINE: "src.legacy.preprocessing.image.* src.quantizers.gptq.*",
        "another backend": """
            src.backend.numpy.* src.backend.openvino.* src.backend.tensorflow.*
            src.backend.torch.*
            """,
    },
    "penzai": {
        LAYER: """
            deprecated.v1.nn.linear_and_affine.* nn.linear_and_affine.NamedEinsum.*
            nn.linear_and_affine.contract
            """,
        PLAIN: """
            deprecated.v1.toolshed.model_rewiring.RewireComputationPaths.__call__
            toolshed.model_rewiring.RewireComputationPaths.__call__
            """,
    },
    "e3nn_jax": {
        LAYER: """
            _src.legacy.core_tensor_product.* _src.linear.*
            _src.symmetric_tensor_product_haiku.* _src.tensor_products.*
            experimental.linear_shtp.* experimental.voxel_convolution.*
            """,
        PLAIN: "_src.utils.einsum.einsum _src.utils.einsum.einsum_jvp",
        OFFLINE: "_src.utils.math_numpy.basis_intersection",
    },
}
REASONS["numpyro"] = {
    LAYER: "nn.block_neural_arn.BlockMaskedDense nn.masked_dense.MaskedDense"
}
REASONS["tensorflow_probability.substrates.jax"] = {
    LAYER: "experimental.joint_distribution_layers.layers.AffineLayer.__call__"
}
NEWER = {"_src.numpy.hijax.Einsum.transpose"}  # than the oldest JAX
OTHERS = """
    augmax blackjax brax cola diffrax dinosaur distrax dm_pix dynamax dynamiqs flowjax
    jax_cosmo jax_fem jax_md jaxlie jaxns jaxopt jaxsim jraph kfac_jax lineax matfree
    mujoco.mjx optimistix ott pennylane quax rlax tinygp
    """.split()
REASONS |= {root: {} for root in OTHERS}
INSTALLED = [root for root in REASONS if find_spec(root.partition(".")[0])]


def imported(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_keras() if root == "keras" else import_module(root)


@functools.cache
def listed(modules: frozenset[str]) -> frozenset[tuple[str, str]]:
    """The functions whose rows do not lower them, by file and name."""
    rows = (path for path, row in FUNCTIONS.items() if row.kind is not Kind.LOWER)
    codes = filter(None, (resolve(path, modules) for path in rows))
    return frozenset((code.co_filename, code.co_qualname) for code in codes)


def is_listed(holder: Holder, name: str, seen: frozenset[str] = frozenset()) -> bool:
    """Whether a row is for a function of the holder's file, or for all its callers.

    A function that is not private may have callers elsewhere.
    """
    if (holder.file, name) in listed(frozenset(sys.modules)):
        return True
    if not name.rpartition(".")[2].startswith("_"):
        return False
    callers = set(holder.callers.get(name, ())) - seen
    return bool(callers) and all(
        is_listed(holder, caller, seen | {name}) for caller in callers
    )


def unlisted(root) -> list[str]:
    """The functions of a library that hold a product and have no row."""
    folder = Path(imported(root).__file__).parent
    return [
        holder.name
        for holder in holders(str(folder))
        if module_of(holder.file) in (None, "", *LAYERS)
        and not is_listed(holder, holder.qualname)
    ]


@cover()
@pytest.mark.parametrize("root", INSTALLED)
def test_a_product_of_a_library_has_a_row_or_a_reason(root):
    found = unlisted(root)
    patterns = " ".join(REASONS[root].values()).split()
    used = {p for p in patterns for name in found if fnmatchcase(name, p)}
    new = [n for n in found if not any(fnmatchcase(n, p) for p in used)]
    assert not new, f"{root}: a row in ops.py, or a reason here, for {new}"
    stale = set(patterns) - used - NEWER
    assert not stale, f"{root}: no function needs {stale}"


@cover(quick=3)
@pytest.mark.parametrize("root", INSTALLED)
def test_a_row_of_a_module_has_its_module(root):
    folder = Path(imported(root).__file__).parent
    for name in MODULES:
        if f"{name}.".startswith(f"{root}."):
            parts = name.removeprefix(root).replace(".", "/").strip("/")
            places = [folder / parts, folder / "_src" / parts]
            found = [p for p in places if p.is_dir() or Path(f"{p}.py").is_file()]
            assert found, name


def test_the_search_finds_a_product_however_it_is_written(tmp_path):
    lines = """
    def a(x, w): return x @ w
    def b(x, w): x @= w
    def c(x, w): return jnp.einsum("ij,jk", x, w)
    def d(x, w): return lax.dot_general(x, w, ((1, 0), ((), ())))
    def e(x, w): return vmap(jnp.tensordot)(x, w)
    def f(x, w): return x.dot(w)
    def g(x, w): return _dot(x, w)
    def h(x, w, product=lax.dot_general): return product(x, w)
    class I:
        def call(self, x): return (lambda y: ops.matmul(y, y))(x)
    _dot = partial(jnp.dot, precision="highest")
    def no(x, w): return np.dot(x, w) + jnp.outer(x, w)
    """
    (tmp_path / "module.py").write_text("\n".join(s[4:] for s in lines.splitlines()))
    found = {holder.qualname for holder in holders(str(tmp_path))}
    assert found == {*"abcdefgh", "I.call"}


# Calls of libraries with numbers that half precision loses, each near float32.


def numbers(first, last):
    return np.arange(first, last, dtype=np.float32)


EYE3, FAR = np.eye(3, dtype=np.float32), np.float32([320, 3, 4])
RAMP = (numbers(0, 16) * 8192).reshape(1, 1, 4, 4)  # beyond float16, inside float32
ODD = numbers(1003, 1019).reshape(1, 1, 4, 4)  # between two of bfloat16
POSITIONS = numbers(2039, 2055)
HIGH = lax.Precision.HIGHEST
FREQUENCIES = np.float32([1, 0.5, 1e-3])
SPD = np.eye(4, dtype=np.float32) + np.float32(0.1)
LONG = numbers(300, 340)


def arrays(*inputs):
    """Arrays of JAX: what NumPy multiplies is not in a region."""
    return [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in inputs]


def patches(x):
    return lax.conv_general_dilated_patches(x, (2, 2), (1, 1), "VALID")


def ctc(loss=optax.ctc_loss):
    """A padded batch: the second row has more labels than frames."""
    logits = np.sin(numbers(0, 96)).reshape(2, 6, 8)
    lengths = np.zeros((2, 6), np.float32)
    lengths[1, 2:] = 1
    labels = np.int32([[1, 2, 3], [1, 2, 3]])
    return loss, (logits, lengths, labels, np.zeros((2, 3), np.float32))


@functools.cache
def vector_quantizer():
    import haiku as hk

    def run(x):
        return hk.nets.VectorQuantizerEMA(2, 4, 0.25, 0.5)(x, is_training=True)

    made = hk.transform_with_state(run)
    return made, jax.jit(made.init)(jax.random.key(0), np.ones((64, 2), np.float32))


def sums_of_codes(x):
    """What a vector quantizer averages: sums of many rows, made by a product."""
    made, (params, state) = vector_quantizer()
    return made.apply(params, state, jax.random.key(0), x)[1]


@functools.cache
def spectral_norm():
    norm = nn.SpectralNorm(nn.Dense(4, use_bias=False))
    init = functools.partial(norm.init, update_stats=False)
    return norm, jax.jit(init)(jax.random.key(0), SPD)


def largest_singular_value(kernel):
    norm, variables = spectral_norm()
    params = jax.tree.map(lambda _: kernel, variables["params"])
    variables = variables | {"params": params}
    return norm.apply(variables, SPD, update_stats=True, mutable="batch_stats")[1]


CASES = {
    "patches of odd numbers": (patches, (ODD,)),
    "take_along_axis by one-hot of rows": (
        lambda x: jnp.take_along_axis(x, jnp.array([[3], [1]]), 1, mode="one_hot"),
        (RAMP.reshape(2, 8),),
    ),
    "perceptron_loss": (optax.losses.perceptron_loss, (-1003.0, 1.0)),
    "jnp.polymul": (jnp.polymul, (LONG, LONG)),
    "jsp.signal.convolve2d": (jsp.signal.convolve2d, (ODD[0, 0], ODD[0, 0])),
    "optax.ctc_loss": ctc(),
    "optax.ctc_loss_with_forward_probs": ctc(optax.losses.ctc_loss_with_forward_probs),
    "patches beyond float16": (patches, (RAMP,)),
    "take_along_axis by one-hot": (
        lambda x: jnp.take_along_axis(x, jnp.array([3, 1]), 0, mode="one_hot"),
        (ODD.ravel(),),
    ),
    "jsp.linalg.toeplitz": (jsp.linalg.toeplitz, (LONG,)),
    "multivariate_normal.logpdf": (
        lambda x: jsp.stats.multivariate_normal.logpdf(x, jnp.zeros(3), EYE3),
        (FAR[None],),
    ),
    "gaussian_kde": (
        lambda x: jsp.stats.gaussian_kde(x)(jnp.array([310.0, 321.0])),
        (LONG,),
    ),
    "betabinom.logpmf": (
        lambda a: jsp.stats.betabinom.logpmf(3, 9, a, 2 * a),
        (LONG,),
    ),
    "jnp.convolve": (jnp.convolve, (LONG, LONG)),
    "jnp.correlate": (jnp.correlate, (LONG, LONG)),
    "jnp.linalg.matrix_power": (
        lambda x: jnp.linalg.matrix_power(x, 5),
        (10 * SPD,),
    ),
    "jsp.linalg.sqrtm": (lambda x: jsp.linalg.sqrtm(x).real, (1e5 * SPD,)),
    "jsp.linalg.expm": (jsp.linalg.expm, (10 * SPD,)),
    "jax.image.scale_and_translate": (
        lambda x: jax.image.scale_and_translate(
            x, (4, 4), (0, 1), jnp.ones(2), jnp.zeros(2), "linear", antialias=False
        ),
        (ODD[0, 0],),
    ),
    "jax.image.resize": (
        lambda x: jax.image.resize(x, (8, 8), "bilinear"),
        (RAMP[0, 0],),
    ),
    "jsp.ndimage.map_coordinates": (
        lambda x: jsp.ndimage.map_coordinates(LONG, [x], order=1),
        (numbers(0, 20) * np.float32(1.03),),
    ),
    "Rotation.apply": (
        lambda x: Rotation.from_euler("xyz", x / 900).apply(x),
        (np.float32([1003, 2049, 4097]),),
    ),
    "minimize": (
        lambda x: (
            minimize(lambda y: jnp.sum((y - x) ** 2), jnp.zeros(3), method="BFGS").x
        ),
        (FAR,),
    ),
    "power_iteration": (
        lambda x: optax.power_iteration(x, num_iters=50)[0],
        (1e5 * SPD,),
    ),
    "matrix_inverse_pth_root": (
        lambda x: optax.matrix_inverse_pth_root(x, 2),
        (1e4 * SPD,),
    ),
    "nnls": (lambda a: optax.nnls(a, LONG[:4], 100), (100 * SPD,)),
    "multiclass_perceptron_loss": (
        lambda x: optax.losses.multiclass_perceptron_loss(x, jnp.array(1)),
        (LONG * 300,),
    ),
    "multiclass_sparsemax_loss": (
        lambda x: optax.losses.multiclass_sparsemax_loss(x, jnp.array([1])),
        (LONG[None],),
    ),
    "projection_hyperplane": (
        lambda x: optax.projections.projection_hyperplane(x, jnp.ones(40), 1.0),
        (LONG,),
    ),
    "per_example_layer_norm_clip": (  # by `jnp.tensordot`, which has a row of its own
        lambda x: optax.per_example_layer_norm_clip([x], 1003.0)[0],
        (1003 * SPD,),
    ),
    "muon": (
        lambda g: (lambda tx: tx.update({"w": g}, tx.init({"w": g}), {"w": g})[0]["w"])(
            optax.contrib.muon(1.0)
        ),
        (SPD,),
    ),
    "VectorQuantizerEMA": (sums_of_codes, (np.full((64, 2), 3003, np.float32),)),
    "SpectralNorm": (largest_singular_value, (1003.0 * SPD,)),
    "odeint": (
        lambda x: odeint(
            lambda y, t: -0.01 * y * y, x, jnp.array([0.0, 1.0]), rtol=1e-6
        ),
        (np.float32([1.5, 2.5]),),
    ),
}
ANGLES = {
    "outer": lambda t, f: jnp.einsum("bt,k->btk", t[None], f),
    "outer, highest": lambda t, f: jnp.einsum("bt,k->btk", t[None], f, precision=HIGH),
    "matmul": lambda t, f: t[:, None] @ f[None],
    "einsum": lambda t, f: jnp.einsum("ti,ik->tk", t[:, None], f[None]),
    "batch": lambda t, f: jnp.einsum("bti,ik->btk", t.reshape(2, -1, 1), f[None]),
    "dot": lambda t, f: jnp.dot(t[:, None], f[None]),
    "tensordot": lambda t, f: jnp.tensordot(t[:, None], f[None], 1),
    "inner": lambda t, f: jnp.inner(t[:, None], f[:, None]),
    "batched": lambda t, f: t.reshape(2, -1, 1) @ jnp.stack([f[None]] * 2),
    "vmap": jax.vmap(lambda t, f: t[None, None] @ f[None], (0, None)),
    "two axes of one": lambda t, f: jnp.einsum(
        "tij,ijk->tk", t[:, None, None], f[None, None]
    ),
}
CASES |= {
    f"rotary angles, {n}": (f, (POSITIONS, FREQUENCIES)) for n, f in ANGLES.items()
}


WAYS = {
    "live": lambda f, dtype: jamp.autocast(dtype)(f),
    "jit_inside": lambda f, dtype: jamp.autocast(dtype)(jax.jit(f)),
}


def wrong(function, inputs) -> list[str]:
    """The ways in which a region changes the results."""
    inputs = arrays(*inputs)
    expected, found = function(*inputs), []
    for dtype in (jnp.float16, jnp.bfloat16):
        for way, run in WAYS.items():
            got = run(function, dtype)(*inputs)
            for a, b in zip(*map(jax.tree.leaves, (got, expected)), strict=True):
                if not np.allclose(a, b, rtol=2e-5, atol=2e-5, equal_nan=True):
                    found.append(f"{dtype.__name__} {way}: {a.dtype} {a} for {b}")
    return found


@pytest.mark.usefixtures("standard_promotion")
@cover(quick=5)
@pytest.mark.parametrize("name", CASES)
def test_a_call_of_a_library_is_float32(name):
    assert wrong(*CASES[name]) == []


# What stays half precision.


@pytest.mark.parametrize("way", WAYS)
def test_a_batch_of_one_is_multiplied_as_a_batch_of_two(way):
    """The gradient of a weight contracts the batch."""
    loss = lambda w, x: jnp.sum(jnp.sin((x @ w) @ w))
    run = WAYS[way](jax.grad(loss), jnp.float16)
    one, two = (products(run, SPD, SPD[:size]) for size in (1, 2))
    assert one == two == [{"float16"}] * 5


def test_what_a_user_hands_to_a_library_is_the_users():
    """Its products are lowered, and those of the library around them are not."""

    def run(x):
        loss = lambda y: jnp.sum((y[None] @ SPD) ** 2)
        return minimize(loss, x, method="BFGS").x

    found = products(jamp.autocast(jnp.float16)(run), LONG[:4])
    assert {"float16"} in found and {"float32"} in found


def test_whose_a_product_is_does_not_depend_on_who_came_first():
    @jamp.autocast(jnp.float16)
    def run(matrix):
        optax.matrix_inverse_pth_root(matrix, 2)
        product = jnp.matmul(matrix, matrix)
        power = jnp.linalg.matrix_power(matrix, 4)
        return product, power, jnp.matmul(matrix, matrix)

    found = [out.dtype for out in jax.eval_shape(run, SPD)]
    assert found == [jnp.float16, jnp.float32, jnp.float16]


def test_explain_names_the_module_whose_product_it_is():
    def loss_fn(x):
        return optax.power_iteration(x, num_iters=2)[0] + jnp.sum(x @ x)

    rows = jamp.debug.explain(loss_fn, jnp.float16)(SPD).rows
    assert {"float32", "lower"} <= {r.rule for r in rows if r.op == "dot_general"}


DERIVATIVES = {
    "value_and_grad": lambda f: (
        lambda t, k: jax.value_and_grad(
            lambda t: (jnp.sum(f(t, k)), f(t, k)), has_aux=True
        )(t)[0][1]
    ),
    "grad of another": lambda f: (
        lambda t, k: jax.grad(lambda z: (jnp.sum(f(t, k)) * z, f(t, k)), has_aux=True)(
            1.0
        )[1]
    ),
    "jvp": lambda f: lambda t, k: jax.jvp(f, (t, k), (t, k))[0],
    "linearize": lambda f: lambda t, k: jax.linearize(f, t, k)[0],
}
OF_EACH_ELEMENT = {
    "abs": jnp.abs,
    "where": lambda t: jnp.where(t > 0, t, 0.0),
    "rounded": lambda t: jnp.floor(jnp.round(t)),
    "negative": lambda t: -t,
}


@pytest.mark.usefixtures("standard_promotion")
@cover(quick=2)
@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", ANGLES)
def test_angles_are_exact_in_a_derivative(name, derivative):
    """It may be taken in the region, or around it."""
    angles, differentiated = ANGLES[name], DERIVATIVES[derivative]
    at = arrays(POSITIONS, FREQUENCIES)
    assert not wrong(differentiated(angles), at)
    expected = angles(*at)
    found = differentiated(jamp.autocast(jnp.float16)(angles))(*at)
    np.testing.assert_allclose(found, expected, 2e-5)


@pytest.mark.usefixtures("standard_promotion")
@cover(quick=2)
@pytest.mark.parametrize("name", OF_EACH_ELEMENT)
def test_an_op_of_each_element_leaves_an_outer_product_one(name):
    each = OF_EACH_ELEMENT[name]
    assert not wrong(lambda t, k: each(t[:, None]) @ k[None], (POSITIONS, FREQUENCIES))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["live", "jit"])
def test_distributions_and_bijections_of_flowjax(wrap):
    flowjax = pytest.importorskip("flowjax.distributions")
    from flowjax.bijections import TriangularAffine

    covariance = np.float32([[1003, 3], [3, 7.001]])

    def values(x):
        normal = flowjax.MultivariateNormal(jnp.ones(2), covariance)
        moved = TriangularAffine(jnp.ones(2), covariance).transform(x)
        return normal.sample(jax.random.key(0), (3,)), normal.log_prob(x), moved

    x = jnp.float32([1.003, 2.7])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = jamp.autocast(jnp.bfloat16)(wrap(values))(x)
    for each, expected in zip(found, values(x), strict=True):
        assert each.dtype == jnp.float32
        np.testing.assert_allclose(each, expected, rtol=1e-5)

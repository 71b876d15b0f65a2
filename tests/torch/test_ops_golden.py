"""jamp under autocast against torch's dtypes, values and gradients in the golden file.

torch is not needed. Some ops of each of torch's lists are quick, and all of them run on
each release of JAX.
"""

import pytest

from jamp._autocast.ops import FUNCTIONS, PRIMITIVES
from parity import golden, ops
from parity.ops_table import DIFFERENCES, NO_COUNTERPART
from tests.marks import cover

FILE = golden.load()
QUICK = [
    # in half precision
    "mm: jnp.dot, float16",
    "matmul: x @ y, float16",
    'convolution: lax.conv(x, y, (1,), "VALID"), float16',
    "bmm: x @ y, bfloat16",
    # in float32
    "exp: jnp.exp, float16",
    "sum.dim_IntList: jnp.sum(x, 1), float16",
    "cumsum: jnp.cumsum(x, 1), float16",
    "norm.Scalar: jnp.linalg.norm, float16",
    "pow.Tensor_Tensor: x ** y, float16",
    "softmax.int: jax.nn.softmax, bfloat16",
    "mse_loss: optax.squared_error, float16",
    # in the widest dtype of the inputs
    "vdot: jnp.vdot, float16",
    "cat: jnp.concatenate((x, y)), float16",
    "atan2: jnp.atan2, bfloat16",
    # on no list
    "mul.Tensor: x * y, float16",
    "add.Tensor: x + y, bfloat16",
    "relu: jax.nn.relu, float16",
    "mean: jnp.mean, float16",
]
CASES = {name: ops.CASES[name] for name in QUICK} | ops.CASES


def test_an_op_of_torch_is_in_one_table():
    rows = (PRIMITIVES | FUNCTIONS).values()
    mirrored = {op for row in rows for op in row.torch.split()}
    assert not mirrored & NO_COUNTERPART.keys()
    assert not mirrored & DIFFERENCES.keys()
    assert not NO_COUNTERPART.keys() & DIFFERENCES.keys()


def test_the_file_is_of_these_cases():
    assert {n for n in FILE if n.startswith("ops/")} == {f"ops/{n}" for n in ops.CASES}


@pytest.mark.cpu  # as torch's numbers; `python -m parity --device cuda` has others
@pytest.mark.every_release
@pytest.mark.usefixtures("standard_promotion")
@cover(quick=len(QUICK), ci=len(QUICK))
@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.name)
def test_equals_torch(case):
    result = ops.compare_with(case, FILE)
    assert list(result.data) == case.op.inputs
    assert result.compared and result.as_expected, result.where

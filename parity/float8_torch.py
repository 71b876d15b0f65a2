"""torchao's side of `float8`: its casts and its Linear, on the CPU.

torchao has float8 kernels only for GPUs. With `emulate` it quantizes as on a GPU, and
multiplies the values of the float8 numbers in float32.
"""

import dataclasses

import numpy as np
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic

from .float8_cases import Product
from .ops_torch import array, tensor

DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def cast(
    x: np.ndarray, format: str, axiswise_dim: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """The bits of the float8 numbers, and the inverse of their scales."""
    granularity = ScalingGranularity.TENSORWISE
    if axiswise_dim is not None:
        granularity = ScalingGranularity.AXISWISE
    found = hp_tensor_to_float8_dynamic(
        tensor(x),
        DTYPES[format],
        None,  # type: ignore[arg-type]  # how to multiply, which is not done
        scaling_granularity=granularity,
        axiswise_dim=axiswise_dim,
        round_scales_to_power_of_2=True,
    )
    values = found._data.view(torch.uint8).numpy()
    return values, found._scale.reciprocal().numpy()


def config(recipe: str) -> Float8LinearConfig:
    """torchao's recipe with jamp's settings."""
    return dataclasses.replace(
        Float8LinearConfig.from_recipe_name(recipe),
        emulate=True,
        round_scales_to_power_of_2=True,
    )


def product(case: Product) -> list[np.ndarray]:
    """The product of a Linear's input and weight, and the gradients of both."""
    return product_of(case.recipe, *case.inputs())


def product_of(recipe: str, *inputs: np.ndarray) -> list[np.ndarray]:
    """The same for `x`, `w` and a cotangent."""
    x, w, ct = map(tensor, inputs)
    linear = torch.nn.Linear(*w.shape, bias=False, dtype=w.dtype)
    linear.weight = torch.nn.Parameter(w.t().contiguous())
    model = torch.nn.Sequential(linear)
    model = convert_to_float8_training(model, config=config(recipe))
    x.requires_grad_()
    y = model(x)
    y.backward(ct)
    (weight,) = model.parameters()
    assert x.grad is not None and weight.grad is not None
    return [array(y), array(x.grad), array(weight.grad).T]

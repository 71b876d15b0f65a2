"""torch's side of `ops`: results, gradients and dtypes under its autocast."""

import contextlib
import warnings

import jax.numpy as jnp
import numpy as np
import torch

from shared.cells import function

from . import cells
from .ops_table import Function, Side
from .torch_autocast import cuda_lists, fake_cuda

# What cells of torch use besides its modules; the arguments of a convolution follow its
# weight and bias.
_TORCH = {
    "CONV": ([1], [0], [1], False, [0], 1),
    "F": torch.nn.functional,
    "labels": lambda x: torch.tensor(cells.LABELS.tolist(), device=x.device),
    "rows": lambda x: torch.tensor(cells.ROWS.tolist(), device=x.device),
    "torch": torch,
}


def tensor(x: np.ndarray, device: str = "cpu") -> torch.Tensor:
    if x.dtype == jnp.bfloat16:  # torch does not take it from NumPy
        return torch.tensor(x.view(np.int16), device=device).view(torch.bfloat16)
    return torch.tensor(x, device=device)


def array(x: torch.Tensor) -> np.ndarray:
    x = x.detach().cpu()
    if x.dtype is torch.bfloat16:
        return x.view(torch.int16).numpy().view(jnp.bfloat16)
    return x.numpy()


def _results(op: Function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about deprecated ops, mixed dtypes and so on
        results = function(op.torch, _TORCH, cells.INPUTS)(*inputs)
    return [results] if isinstance(results, torch.Tensor) else list(results)


def run(op: Function, half: str, device: str) -> dict[str, Side]:
    """Runs an op, and its derivative outside the region."""
    region = torch.autocast(device, dtype=getattr(torch, half))
    found = {}
    # A GPU uses CUDA's lists anyway.
    with cuda_lists() if device == "cpu" else contextlib.nullcontext():
        for name in op.inputs:
            inputs = [tensor(x, device) for x in op.arrays(name, half)]
            inputs = [x.requires_grad_() for x in inputs]
            with region:
                results = _results(op, inputs)
            given = op.cotangents([tuple(x.shape) for x in results])
            pairs = zip(given, results, strict=True)
            cast = [torch.tensor(g, device=device).to(x.dtype) for g, x in pairs]
            grads = torch.autograd.grad(results, inputs, cast)
            found[name] = Side([array(x) for x in results], [array(x) for x in grads])
    return found


def fake_dtypes(op: Function, half: str) -> dict[str, list[str]]:
    """The dtypes of an op's results under autocast on CUDA, on fake tensors."""
    found = {}
    with fake_cuda(getattr(torch, half)):
        for name in op.inputs:
            inputs = [
                torch.empty(x.shape, dtype=getattr(torch, x.dtype.name), device="cuda")
                for x in op.arrays(name, half)
            ]
            names = [str(x.dtype) for x in _results(op, inputs)]
            found[name] = [name.removeprefix("torch.") for name in names]
    return found

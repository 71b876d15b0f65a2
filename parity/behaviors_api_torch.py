"""torch's driver for the probes of `behaviors_api`."""

from typing import Any

import numpy as np
import torch

from .behaviors_api import show


class Driver:
    """One vector of parameters, its scaled gradient, an optimizer and a scaler."""

    device = "cpu"

    def __init__(self, dtype: str = "float32", **config: Any):
        options: Any = {"dtype": getattr(torch, dtype), "device": self.device}
        self.param = torch.zeros(8, requires_grad=True, **options)
        self.param.grad = torch.ones(8, **options)
        self.optimizer = torch.optim.SGD([self.param], lr=2.0**-4)
        self.scaler = torch.amp.GradScaler(self.device, **config)
        self.scaler.scale(torch.ones((), device=self.device))  # makes the scale

    def set_gradient(self, values: np.ndarray) -> None:
        self.param.grad = torch.from_numpy(values).to(self.param)

    def drop_gradient(self) -> None:
        self.param.grad = None

    def unscale_(self) -> None:
        self.scaler.unscale_(self.optimizer)

    def step(self, **kwargs: Any) -> None:
        self.scaler.step(self.optimizer, **kwargs)

    def scale(self, values: Any, dtype: str) -> str:
        result = self.scaler.scale(self._tensors(values, dtype))
        return show(result, lambda x: x.double().cpu().numpy())

    def _tensors(self, values: Any, dtype: str) -> Any:
        if isinstance(values, tuple):
            return tuple(self._tensors(value, dtype) for value in values)
        return torch.tensor(values, dtype=getattr(torch, dtype), device=self.device)

    @classmethod
    def pair(cls) -> torch.Tensor:
        """A tensor of two elements, which cannot be a scale."""
        return torch.ones(2, device=cls.device)


class CUDADriver(Driver):
    device = "cuda"


DRIVERS = {"cpu": Driver, "cuda": CUDADriver}

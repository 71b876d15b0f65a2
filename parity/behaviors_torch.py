"""torch's side of `behaviors`: its `GradScaler` in the runs of `behaviors_table`."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import devices, torch_autocast
from .behaviors_api import Answers, Probe, show
from .behaviors_table import (
    BETAS,
    GRID,
    HANDOVER,
    LEAVES,
    MAX_NORM,
    SIZE,
    STEPS,
    WEIGHT_DECAY,
    Behavior,
    Data,
    Record,
    Reference,
    Saved,
    Trainer,
    data,
)


class Model(nn.Module):
    """Two linear layers whose parameters come from a flat vector."""

    def __init__(self, behavior: Behavior, flat: np.ndarray, device: str):
        super().__init__()
        self.exact = behavior.exact
        dtype = torch.bfloat16 if behavior.bfloat16 else torch.float32
        for name, (part, shape) in LEAVES.items():
            value = torch.tensor(flat[part].reshape(shape), dtype=dtype, device=device)
            setattr(self, name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        w1, b1, w2, b2 = map(self.rounded, self.parameters())
        activation = F.relu if self.exact else torch.tanh
        return F.linear(activation(F.linear(x, w1.T, b1)), w2.T, b2)

    def rounded(self, w: Tensor) -> Tensor:
        if not self.exact:
            return w
        return torch.round(w.detach() * GRID) / GRID + (w - w.detach())

    def flat(self) -> np.ndarray:
        leaves = [p.detach().float().flatten() for p in self.parameters()]
        return torch.cat(leaves).cpu().numpy()


def losses(behavior: Behavior, models: list[Model], x: Tensor, y: Tensor) -> Any:
    """A loss for each model; with several, each depends on all of them."""
    outputs = [model(x) for model in models]
    if behavior.models == 2:
        first, second = outputs
        outputs = [0.25 * first + 0.75 * second, 0.5 * first - 0.5 * second]
    return [F.mse_loss(output, y) for output in outputs]


@contextlib.contextmanager
def autocast(behavior: Behavior, device: str) -> Iterator[None]:
    """float16 with CUDA's lists, on whatever device."""
    with contextlib.ExitStack() as stack:
        if behavior.autocast and device == "cpu":
            stack.enter_context(torch_autocast.cuda_lists())
        yield


def make_optimizer(behavior: Behavior, model: Model) -> torch.optim.Optimizer:
    params = [getattr(model, name) for name in behavior.trained]
    if behavior.optimizer == "AdamW":
        return torch.optim.AdamW(
            params, lr=behavior.learning_rate, betas=BETAS, weight_decay=WEIGHT_DECAY
        )
    return torch.optim.SGD(
        params, lr=behavior.learning_rate, momentum=behavior.momentum
    )


class Run(Trainer):
    def __init__(self, behavior: Behavior, saved: Saved | None, device: str):
        self.behavior, self.device = behavior, device
        tensors: Any = [torch.tensor(a, device=device) for a in data(behavior)]
        self.data = Data(*tensors)
        self.scaler = torch.amp.GradScaler(device, **behavior.scaler_kwargs)
        params = data(behavior).params
        if saved is not None:
            self.scaler = torch.amp.GradScaler(device)
            self.scaler.load_state_dict(json.loads(saved.scaler))
            params = saved.params
        self.models = [Model(behavior, flat, device) for flat in params]
        self.optimizers = [make_optimizer(behavior, model) for model in self.models]
        if saved is not None:
            self.set_momentum(saved.momentum)
        self.stepped: set[int] = set()
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(lambda opt, *_: self.stepped.add(id(opt)))

    def set_momentum(self, momentum: np.ndarray) -> None:
        for model, optimizer, flat in zip(
            self.models, self.optimizers, momentum, strict=True
        ):
            for name in self.behavior.trained:
                part, shape = LEAVES[name]
                value = torch.tensor(flat[part].reshape(shape), device=self.device)
                optimizer.state[getattr(model, name)]["momentum_buffer"] = value

    def momentum(self) -> np.ndarray:
        result = np.zeros((self.behavior.models, SIZE), np.float32)
        for model, optimizer, flat in zip(
            self.models, self.optimizers, result, strict=True
        ):
            for name in self.behavior.trained:
                buffer = optimizer.state[getattr(model, name)]["momentum_buffer"]
                flat[LEAVES[name][0]] = buffer.cpu().numpy().ravel()
        return result

    def save(self) -> Saved:
        params = np.stack([model.flat() for model in self.models])
        return Saved(json.dumps(self.scaler.state_dict()), params, self.momentum())

    def backward(self, step: int) -> float:
        """Leaves scaled gradients in the parameters; returns the loss."""
        behavior, scaler, total = self.behavior, self.scaler, 0.0
        if behavior.bfloat16:
            scaler.scale(torch.ones((), device=self.device))  # makes the scale
            self.write(self.models[0], self.data.drawn[step], lambda old, new: new)
            return 0.0
        for x, y in zip(self.data.x[step], self.data.y[step], strict=True):
            with torch.autocast(
                self.device, dtype=torch.float16, enabled=behavior.autocast
            ):
                each = losses(behavior, self.models, x, y)
            factor = self.data.factor[step] / behavior.accumulate
            each = [loss * factor for loss in each]
            if behavior.penalty:
                (loss,), (model,) = each, self.models
                grads = torch.autograd.grad(
                    scaler.scale(loss), list(model.parameters()), create_graph=True
                )
                inverse = 1.0 / scaler.get_scale()
                squares = [(g * inverse).pow(2).sum() for g in grads]
                each = [loss + torch.stack(squares).sum().sqrt()]
            for index, loss in enumerate(each):
                scaler.scale(loss).backward(retain_graph=index + 1 < len(each))
                total += loss.item()
        return total

    def write(
        self, model: Model, flat: Tensor, change: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        """Replaces gradients by a function of them and of a flat vector."""
        for name, (part, shape) in LEAVES.items():
            param, new = getattr(model, name), flat[part].reshape(shape)
            old = torch.zeros_like(param) if param.grad is None else param.grad
            param.grad = change(old, new.to(old.dtype))

    def poison(self, step: int) -> None:
        for model, flat in zip(self.models, self.data.poison[step], strict=True):
            self.write(model, flat, lambda old, new: torch.where(new == 0, old, new))

    def step(self, step: int, new_scale: Any) -> tuple[Any, ...]:
        behavior, scaler = self.behavior, self.scaler
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for model in self.models:
            model.zero_grad()
        loss = self.backward(step)
        if behavior.clip == "scaled":
            for model in self.models:
                norm = MAX_NORM * scaler.get_scale()
                nn.utils.clip_grad_norm_(model.parameters(), norm)
        if not behavior.overwrite:
            self.poison(step)
        if behavior.unscales:
            scaler.unscale_(self.optimizers[0])
        if behavior.clip == "unscaled":
            nn.utils.clip_grad_norm_(self.models[0].parameters(), MAX_NORM)
        if behavior.overwrite:
            self.poison(step)
        self.stepped.clear()
        for optimizer in self.optimizers:
            scaler.step(optimizer)
        scaler.update(new_scale)
        skipped = [id(optimizer) not in self.stepped for optimizer in self.optimizers]
        return skipped, loss, np.stack([model.flat() for model in self.models])

    def array(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device)

    def run(self, start: int = 0, stop: int = STEPS) -> Record:
        with autocast(self.behavior, self.device):
            return super().run(start, stop)


def reference(behavior: Behavior, device: str) -> Reference:
    """torch's run, and what it saves along the way.

    Raises:
      NotImplementedError: it is in bfloat16, which torch does not unscale on CUDA.
    """
    if behavior.bfloat16 and device == devices.REHEARSAL:
        raise NotImplementedError("torch on CUDA does not unscale bfloat16")
    run = Run(behavior, None, device)
    first = run.run(0, HANDOVER)
    saved = run.save() if behavior.resumed else None
    return Reference(first.then(run.run(HANDOVER)), saved=saved)


# The probes of `behaviors_api`.


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
    device = devices.CUDA


class RehearsalDriver(Driver):
    """On a CPU, with CUDA's product of an array in half precision and the scale."""

    def scale(self, values: Any, dtype: str) -> str:
        if not isinstance(values, list) or dtype not in ("float16", "bfloat16"):
            return super().scale(values, dtype)
        array = self._tensors(values, dtype)
        rounded = torch.tensor(self.scaler.get_scale()).to(array.dtype)
        return show(array * rounded, lambda x: x.double().numpy())


DRIVERS = {
    devices.CPU: Driver,
    devices.CUDA: CUDADriver,
    devices.REHEARSAL: RehearsalDriver,
}


def answers(probe: Probe, device: str) -> tuple[Answers, Answers]:
    """What torch answers, and what CUDA is to answer where jamp follows the CPU."""
    found = probe.ask(DRIVERS[device])
    if device == devices.CPU:
        return found, {}
    differ = {question for question in found if probe.as_on_cpu(question)}
    expected = probe.ask(RehearsalDriver) if differ else {}
    on_cpu = probe.ask(Driver) if differ else {}
    named = lambda those: {f"on CUDA, {q}": those[q] for q in those if q in differ}
    return found | {q: on_cpu[q] for q in differ} | named(found), named(expected)

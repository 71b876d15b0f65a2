"""torch's side of `training`: models, `torch.autocast` and `torch.amp.GradScaler`."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import torch_autocast
from .training_data import (
    ADAMW,
    BLOCKS,
    GROWTH_INTERVAL,
    LENGTH,
    MOMENTUM,
    SLOPE,
    STEPS,
    VOCABULARY,
    WIDTH,
    Run,
    Task,
    Variant,
    batches,
    weights,
)


class Linear(nn.Linear):
    """Adds the bias inside the product or, if `apart`, to the rounded product."""

    apart = False

    def forward(self, input: Tensor) -> Tensor:
        if not self.apart:
            return super().forward(input)
        product = F.linear(input, self.weight)
        return product + self.bias.to(product.dtype)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = Linear(64, 128), Linear(128, 128)
        self.fc3 = Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bn2, self.fc = nn.BatchNorm2d(16), Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(-1, 1)
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.v, self.o = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
        self.up, self.down = Linear(WIDTH, 4 * WIDTH), Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (
            project(h).unflatten(-1, (4, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(LENGTH, WIDTH)
        for i in range(BLOCKS):
            self.add_module(f"block{i}", Block())
        self.ln, self.head = nn.LayerNorm(WIDTH), Linear(WIDTH, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x) + self.position.weight
        for i in range(BLOCKS):
            x = self.get_submodule(f"block{i}")(x)
        return self.head(self.ln(x))


class Critic(nn.Module):
    def __init__(self, n_out: int):
        super().__init__()
        self.fc1, self.fc2 = Linear(8, 32), Linear(32, 32)
        self.fc3 = Linear(32, n_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.fc1(x), SLOPE)
        return self.fc3(F.leaky_relu(self.fc2(x), SLOPE))


class GAN(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = Critic(8), Critic(1)


MODELS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer, "gan": GAN}


def _optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"params": model.parameters(), "lr": task.learning_rate}
    if task.optimizer == "SGD":
        return torch.optim.SGD(**common, momentum=MOMENTUM, foreach=True)
    return torch.optim.AdamW(
        **common,
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        foreach=True,
    )


def _target(logits: Tensor, value: float) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, value))


def run(
    task: Task, seed: int, variant: Variant, device: str, steps: int = STEPS
) -> Run:
    model = MODELS[task.model]()
    initial = {k: torch.from_numpy(v) for k, v in weights(task.model, seed).items()}
    averages = model.state_dict().keys() - initial.keys()  # BatchNorm's
    model.load_state_dict(initial | {k: model.state_dict()[k] for k in averages})
    model.to(device)
    for module in model.modules():
        if isinstance(module, Linear):
            module.apart = variant.bias
    parts = list(model.children()) if task.model == "gan" else [model]
    optimizers = [_optimizer(task, part) for part in parts]
    scaler = torch.amp.GradScaler(device, growth_interval=GROWTH_INTERVAL)
    autocast = torch.autocast(device, dtype=torch.float16)
    stepped: set[int] = set()
    for optimizer in optimizers:
        optimizer.register_step_post_hook(lambda opt, *_: stepped.add(id(opt)))

    def train_step(batch: list[Tensor]) -> Tensor:
        if task.model == "gan":
            return gan_step(*batch)
        x, labels = batch
        optimizers[0].zero_grad()
        with autocast:
            logits = model(x)
            loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long())
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        return loss

    def gan_step(real: Tensor, noise: Tensor) -> Tensor:
        generator, discriminator = parts
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast:
            fake = generator(noise)
            loss = _target(discriminator(real), 1.0)
            loss = loss + _target(discriminator(fake.detach()), 0.0)
        scaler.scale(loss).backward()
        scaler.step(optimizers[1])
        optimizers[0].zero_grad()
        with autocast:
            generator_loss = _target(discriminator(generator(noise)), 1.0)
        scaler.scale(generator_loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        return loss

    records = []
    with contextlib.ExitStack() as contexts:
        if device == "cpu":
            contexts.enter_context(torch_autocast.cuda_lists())
            contexts.enter_context(_kernels(own=variant.kernels or task.model == "cnn"))
        data = (array[:steps] for array in batches(task.model, seed))
        for batch in zip(*data, strict=True):
            stepped.clear()
            rows = [torch.from_numpy(variant.rows(a)).to(device) for a in batch]
            loss = train_step(rows).item()
            tracker = scaler.state_dict()["_growth_tracker"]
            skipped = [id(optimizer) not in stepped for optimizer in optimizers]
            records.append((loss, scaler.get_scale(), tracker, skipped))
    loss, scale, tracker, skipped = map(np.array, zip(*records, strict=True))
    return Run(loss.astype("f4"), scale.astype("f4"), tracker, skipped)


@contextlib.contextmanager
def _kernels(own: bool) -> Iterator[None]:
    """One thread, and torch's own CPU kernels or oneDNN's."""
    before = torch.get_num_threads(), torch.backends.mkldnn.enabled
    torch.set_num_threads(1)
    torch.backends.mkldnn.enabled = not own
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.backends.mkldnn.enabled = before[1]

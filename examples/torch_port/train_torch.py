"""A training script in torch, whose port to JAX is `train_jamp.py`.

python examples/torch_port/train_torch.py --save weights.npz
torchrun --nproc-per-node 2 examples/torch_port/train_torch.py
"""

import argparse
import contextlib
import os

import blobs
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FEATURES = 16 * (blobs.SIZE // 2) ** 2
AVERAGE_AFTER = 60  # steps taken


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(16)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return x.flatten(1)


class Net(nn.Module):
    """Where is the blob?"""

    def __init__(self):
        super().__init__()
        self.trunk = Trunk()
        self.head = nn.Linear(FEATURES, 2)

    def forward(self, x):
        return self.head(self.trunk(x))


class Model(nn.Module):
    """The net, and a probe: can its features also say how wide the blob is?"""

    def __init__(self):
        super().__init__()
        self.net = Net()
        self.probe = nn.Linear(FEATURES, 1)

    def forward(self, x):
        features = self.net.trunk(x)
        return self.net.head(features), self.probe(features.detach())


class Trainer:
    def __init__(self, model, steps, compiled=False):
        self.net = model.to(DEVICE).net
        self.model = DistributedDataParallel(model) if dist.is_initialized() else model
        self.forward = torch.compile(self.model) if compiled else self.model

        # Two groups: weights decay, biases and norms do not and learn more slowly.
        params = list(self.net.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.05},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups)
        self.sgd = torch.optim.SGD(model.probe.parameters(), lr=1e-3, momentum=0.9)
        self.optimizers = self.adamw, self.sgd
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.adamw, max_lr=[4e-3, 1e-3], total_steps=steps
        )
        # Which optimizers stepped? The scale says only whether one was skipped.
        self.stepped = set()
        for optimizer in self.optimizers:
            optimizer.register_step_post_hook(lambda o, *_: self.stepped.add(o))
        self.scaler = torch.amp.GradScaler(
            DEVICE, init_scale=2.0**24, growth_interval=8
        )
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def no_sync(self):
        """DDP averages gradients in the last microbatch alone."""
        if dist.is_initialized():
            return self.model.no_sync()
        return contextlib.nullcontext()

    def backward(self, x, y, parts):
        with torch.autocast(DEVICE, dtype=torch.float16):
            position, width = self.forward(x)
            loss = F.mse_loss(position, y[:, :2]) + F.mse_loss(width, y[:, 2:])
            loss = loss / parts
        self.scaler.scale(loss).backward()
        return loss.detach()

    def step(self, micro):
        self.model.train()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        *first, last = micro
        loss = 0.0
        with self.no_sync():
            for x, y in first:
                loss += self.backward(x, y, len(micro))
        x, y = last
        loss += self.backward(x, y, len(micro))

        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_value_(self.model.parameters(), 0.1)
        self.stepped.clear()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.adamw in self.stepped:
            self.scheduler.step()
            if self.scheduler.last_epoch > AVERAGE_AFTER:
                self.average.update_parameters(self.net)
        return loss

    def evaluate(self, x, y):
        self.average.eval()
        with torch.inference_mode(), torch.autocast(DEVICE, dtype=torch.float16):
            return F.mse_loss(self.average(x), y[:, :2]).item()


def train(model, data, steps, compiled=False):
    """Trains, and returns what each step logged."""
    trainer, log = Trainer(model, steps, compiled), []
    for micro in data:
        group = trainer.adamw.param_groups[0]
        rates = {"lr": group["lr"], "beta1": group["betas"][0]}
        micro = [[torch.from_numpy(a).to(DEVICE) for a in part] for part in micro]
        loss = trainer.step(micro).item()
        skipped = [o not in trainer.stepped for o in trainer.optimizers]
        scale = trainer.scaler.get_scale()
        log.append({"loss": loss, "scale": scale, "skipped": skipped, **rates})
    x, y = (torch.from_numpy(a).to(DEVICE) for a in blobs.held_out())
    return log, trainer.evaluate(x, y)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--save", help="file for the initial weights, .npz")
    args = parser.parse_args(argv)
    if "RANK" in os.environ:  # set by torchrun
        dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    torch.manual_seed(0)
    model = Model()
    if args.save:
        np.savez(args.save, **{k: v.numpy() for k, v in model.state_dict().items()})
    data = blobs.batches(args.steps, seed=int(os.environ.get("RANK", 0)))
    log, final = train(model, data, args.steps, args.compile)
    if not int(os.environ.get("RANK", 0)):
        for step in range(0, args.steps, 20):
            print(step, log[step])
        print(f"held-out loss of the average: {final:.5f}")


if __name__ == "__main__":
    main()

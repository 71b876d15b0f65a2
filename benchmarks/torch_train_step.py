"""The training steps of train_step.py in torch, with torch.autocast and GradScaler.

    python -m benchmarks.torch_train_step                 # small models, on the CPU
    python -m benchmarks.torch_train_step --device gpu    # eager and torch.compile

The models, optimizer and FLOPs are those of train_step.py, and the JSON has the same
form, {"results": {model: {row: figures}}}. It runs in a separate process, so that each
library has all of the GPU's memory. Attention is scaled_dot_product_attention, AdamW is
fused on a GPU, and convolutions are channels-last. Weights and batches are random, from
torch. "memory" is the peak of torch's allocator, parameters and optimizer included. A
CPU shows that the program runs, and nothing about speed.
"""

import gc
import math
import statistics

import torch
import torch.nn.functional as F

from . import _harness, torch_models
from .model_sizes import (
    LEARNING_RATE,
    SEED,
    add_arguments,
    chosen,
    is_wanted,
    parameters,
    peak_tflops,
    rounds,
    step_flops,
)

WEIGHT_DECAY = 1e-4  # optax.adamw's default
WARMUP = 3

# Row -> whether it casts, and whether it is compiled.
ROWS = {
    "torch float32": (False, False),
    "torch AMP": (True, False),
    "torch.compile float32": (False, True),
    "torch.compile AMP": (True, True),
}


class Row:
    """A model with its optimizer, and a training step."""

    def __init__(self, size, device, amp, compiled):
        torch.manual_seed(SEED)
        self.amp, self.device = amp, device
        self.model = torch_models.make(size, device)
        self.batch = torch_models.make_batch(size, device)
        count = sum(p.numel() for p in self.model.parameters())
        assert count == parameters(size), f"{count}, in JAX {parameters(size)}"
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=LEARNING_RATE,
            weight_decay=WEIGHT_DECAY,
            fused=device == "cuda",
        )
        self.scaler = torch.amp.GradScaler(device, enabled=amp)
        self.forward = torch.compile(self.loss) if compiled else self.loss
        self.losses = []

    def loss(self, x, y):
        with torch.autocast(self.device, torch.float16, enabled=self.amp):
            logits = self.model(x)
            return F.cross_entropy(logits.flatten(0, -2).float(), y.flatten())

    def __call__(self):
        loss = self.forward(*self.batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(size, args, device, peak):
    """Trains one model in all rows, one after the other; row -> figures.

    Rows do not take turns, because the allocator's peak is that of the process.
    """
    table = {}
    for name, (amp, compiled) in ROWS.items():
        if not is_wanted(name, args) or (compiled and not args.compile):
            continue
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        row = Row(size, device, amp, compiled)
        seconds = _harness.take_turns({name: row}, rounds(args), WARMUP)[name]
        losses = [float(loss) for loss in row.losses]
        assert all(map(math.isfinite, losses)), f"{name}: {losses}"
        median = statistics.median(seconds)
        used = torch.cuda.max_memory_allocated() / 1e6 if device == "cuda" else None
        table[name] = {
            **_harness.figures(seconds),
            "per_second": size.items / median,
            "unit": size.unit,
            "mfu": step_flops(size) / median / peak / 1e12 if peak else None,
            "peak_megabytes": used,
            "losses": losses[:4],
        }
        del row
        gc.collect()
        if device == "cuda":
            torch.compiler.reset()
            torch.cuda.empty_cache()
    return table


def show(table):
    unit = next(iter(table.values()))["unit"]
    _harness.print_table(
        ["step", "time", f"{unit}/s", "MFU", "memory", "losses"],
        (
            [
                name,
                f"{row['milliseconds']:.1f} ms",
                f"{row['per_second']:,.0f}",
                "" if row["mfu"] is None else f"{100 * row['mfu']:.1f} %",
                "" if row["mfu"] is None else f"{row['peak_megabytes']:,.0f} MB",
                " ".join(f"{loss:.3f}" for loss in row["losses"]),
            ]
            for name, row in table.items()
        ),
    )


def main():
    parser = _harness.parser(__doc__)
    add_arguments(parser)
    parser.add_argument("--compile", action="store_true", help="on a CPU too")
    args = parser.parse_args()
    _harness.prepare(args, "benchmarks.torch_train_step")
    device = {"cpu": "cpu", "gpu": "cuda"}[args.device]
    args.compile |= device == "cuda"
    torch.set_float32_matmul_precision("high")  # TF32 on a GPU
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    # JAX would reserve GPU memory to name it.
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    found = _harness.versions()
    print(f"Python {found['python']}, torch {found['torch']}, {name}")
    peak = peak_tflops(name, args)
    results = {}
    for model, size in chosen(args).items():
        print(f"\n{model}: {parameters(size) / 1e6:.1f} M parameters, {size}")
        results[model] = measure(size, args, device, peak)
        show(results[model])
        # After each model, in case time runs out.
        _harness.save(args.json, results, name)


if __name__ == "__main__":
    main()

"""Sizes of the benchmarked models, and settings that JAX and torch programs share."""

from typing import NamedTuple

SEED = 0
LEARNING_RATE = 1e-4
# From data sheets: dense float16 and bfloat16 with float32 sums, without sparsity.
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312}


class GPT2(NamedTuple):
    batch: int
    layers: int
    width: int
    heads: int
    sequence: int
    vocabulary: int

    items = property(lambda self: self.batch * self.sequence)
    unit = "tokens"  # what `items` counts


class ResNet50(NamedTuple):
    batch: int
    pixels: int
    width: int  # channels of the first convolution
    classes: int
    stages: tuple[int, ...] = (3, 4, 6, 3)

    items = property(lambda self: self.batch)
    unit = "images"


class ViT(NamedTuple):
    batch: int
    pixels: int
    patch: int
    layers: int
    width: int
    heads: int
    classes: int

    items = property(lambda self: self.batch)
    unit = "images"


class MLP(NamedTuple):
    """Layers of equal width."""

    batch: int
    layers: int
    width: int

    items = property(lambda self: self.batch)
    unit = "rows"


class Llama(NamedTuple):
    batch: int
    layers: int
    width: int
    sequence: int
    experts: int = 1  # each token is sent to one of them
    head: int = 128  # at most the width

    items = property(lambda self: self.batch * self.sequence)
    unit = "tokens"


# GPT-2's vocabulary of 50257 is padded to a multiple of 128 in all programs.
SIZES = {
    "gpu": {
        "gpt2": GPT2(16, 12, 768, 12, 1024, 50304),
        "resnet50": ResNet50(256, 224, 64, 1000),
        "vit": ViT(128, 224, 16, 12, 768, 12, 1000),
    },
    "cpu": {
        "gpt2": GPT2(8, 4, 256, 4, 128, 2048),
        "resnet50": ResNet50(16, 64, 16, 100, (1, 1, 1, 1)),
        "vit": ViT(16, 64, 8, 4, 256, 4, 100),
    },
    "small": {
        "gpt2": GPT2(2, 1, 32, 2, 16, 128),
        "resnet50": ResNet50(4, 32, 8, 10, (1, 1)),
        "vit": ViT(2, 16, 8, 1, 32, 2, 10),
    },
}

# The arrays whose update `benchmarks.master_weights` times, and their width.
ARRAYS, WIDTHS = 4, {"gpu": 8192, "cpu": 1024, "small": 64}

# What `benchmarks.targets` compiles. Its tables have fewer layers of full width, and a
# TPU's compiler takes minutes for large arrays.
COMPILED = {
    "full": {
        "mlp": MLP(16384, 4, 8192),
        **SIZES["gpu"],
        "llama": Llama(8, 1, 8192, 2048),
        "moe": Llama(8, 1, 4096, 2048, experts=8),
    },
    "gpu": {
        "mlp": MLP(4096, 8, 2048),
        "gpt2": GPT2(8, 2, 768, 12, 1024, 50304),
        "resnet50": ResNet50(64, 224, 64, 1000, (1, 1, 1, 1)),
        "vit": ViT(64, 224, 16, 2, 768, 12, 1000),
        "llama": Llama(2, 1, 2048, 2048),
        "moe": Llama(2, 1, 1024, 1024, experts=8),
    },
    "tpu": {
        "mlp": MLP(512, 4, 512),
        "gpt2": GPT2(1, 1, 256, 4, 256, 1024),
        "resnet50": ResNet50(4, 64, 64, 128, (1, 1)),
        "vit": ViT(4, 64, 8, 1, 256, 4, 128),
        "llama": Llama(1, 1, 256, 256),
        "moe": Llama(1, 1, 256, 256, experts=4),
    },
    "small": {
        "mlp": MLP(64, 2, 64),
        **SIZES["small"],
        "llama": Llama(1, 1, 64, 32),
        "moe": Llama(1, 1, 64, 32, experts=2),
    },
}


def chosen(args) -> dict[str, GPT2 | ResNet50 | ViT]:
    """The models that the arguments ask for, by name."""
    sizes = SIZES["small" if args.small else args.device]
    names = args.models.split(",") if args.models else list(sizes)
    if unknown := set(names) - set(sizes):
        raise SystemExit(
            f"--models: unknown {sorted(unknown)}; there are {list(sizes)}"
        )
    batch = {} if args.batch is None else {"batch": args.batch}
    return {name: sizes[name]._replace(**batch) for name in names}


def add_arguments(parser) -> None:
    parser.add_argument("--models", help="some of gpt2,resnet50,vit")
    parser.add_argument(
        "--rows", help='rows with one of these words, such as "jamp,by hand"'
    )
    parser.add_argument("--rounds", type=int, help="20, with --small 4")
    parser.add_argument("--batch", type=int, help="instead of each model's own")
    parser.add_argument(
        "--peak-tflops", type=float, help="peak of the GPU, for the MFU"
    )


def rounds(args) -> int:
    return args.rounds or (4 if args.small else 20)


def is_wanted(row: str, args) -> bool:
    words = args.rows.split(",") if args.rows else [""]
    return any(word.strip().lower() in row.lower() for word in words)


def peak_tflops(device: str, args) -> float | None:
    """The device's peak rate; None on a CPU, for which MFU is not shown."""
    if args.device == "cpu":
        return None
    known = (
        peak
        for name, peak in PEAK_TFLOPS.items()
        if all(word in device for word in name.split())
    )
    peak = args.peak_tflops or next(known, None)
    if peak is None:
        raise SystemExit(
            f"pass --peak-tflops: the peak of a {device} is not known here"
        )
    return peak


def parameters(size) -> int:
    """The number of trained parameters."""
    if isinstance(size, ResNet50):
        *convolutions, (_, _, features) = resnet50_layers(size)
        convolved = sum(weights + 2 * width for _, weights, width in convolutions)
        return convolved + (features + 1) * size.classes
    width = size.width
    blocks = size.layers * (12 * width**2 + 13 * width) + 2 * width
    if isinstance(size, GPT2):
        return blocks + (size.vocabulary + size.sequence) * width
    positions = (size.pixels // size.patch) ** 2
    ends = width * (3 * size.patch**2 + 1 + positions) + (width + 1) * size.classes
    return blocks + ends


def step_flops(size) -> float:
    """FLOPs of the products, forward and backward, without recomputation."""
    if isinstance(size, ResNet50):
        *convolutions, (_, _, features) = resnet50_layers(size)
        products = sum(pixels * weights for pixels, weights, _ in convolutions)
        return 6.0 * size.batch * (products + features * size.classes)
    if isinstance(size, GPT2):  # arXiv 2204.02311, appendix B: as if not causal
        attention = 12 * size.layers * size.width * size.sequence
        return (6.0 * parameters(size) + attention) * size.items
    length = (size.pixels // size.patch) ** 2
    block = 24 * length * size.width**2 + 4 * length**2 * size.width
    ends = 2 * size.width * (3 * length * size.patch**2 + size.classes)
    return 3.0 * size.batch * (size.layers * block + ends)


def resnet50_layers(size: ResNet50):
    """Output pixels, weights and output channels of each convolution.

    A norm over its channels follows each one. The last entry, (0, 0, n), is the head's
    input.
    """
    pixels, inputs = size.pixels // 2, size.width
    yield pixels**2, 7**2 * 3 * inputs, inputs
    pixels //= 2
    for stage, depth in enumerate(size.stages):
        width = size.width * 2**stage
        for index in range(depth):
            yield pixels**2, inputs * width, width
            pixels //= 2 if stage > 0 and index == 0 else 1
            yield pixels**2, 9 * width**2, width
            yield pixels**2, 4 * width**2, 4 * width
            if index == 0:
                yield pixels**2, inputs * 4 * width, 4 * width
            inputs = 4 * width
    yield 0, 0, inputs

"""The models of models.py in torch, with the same sizes, parameters and arithmetic."""

import torch
import torch.nn.functional as F
from torch import nn

from .model_sizes import GPT2, ResNet50, ViT

EPSILON = 1e-6  # Flax's LayerNorm; its BatchNorm has 1e-5, as torch's


class Attention(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(x.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPSILON)
        self.attention = Attention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width, EPSILON)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def blocks(size, causal):
    each = (Block(size.width, size.heads, causal) for _ in range(size.layers))
    return nn.Sequential(*each)


class GPT(nn.Module):
    def __init__(self, size: GPT2):
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.sequence, size.width)
        self.blocks = blocks(size, causal=True)
        self.norm = nn.LayerNorm(size.width, EPSILON)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(positions)
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


class VisionTransformer(nn.Module):
    def __init__(self, size: ViT):
        super().__init__()
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        length = (size.pixels // size.patch) ** 2
        self.positions = nn.Parameter(0.02 * torch.randn(1, length, size.width))
        self.blocks = blocks(size, causal=False)
        self.norm = nn.LayerNorm(size.width, EPSILON)
        self.head = nn.Linear(size.width, size.classes)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


def conv_norm(inputs, outputs, kernel, stride, zero=False):
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    norm = nn.BatchNorm2d(outputs)
    if zero:
        nn.init.zeros_(norm.weight)
    return nn.Sequential(conv, norm)


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        self.reduce = conv_norm(inputs, width, 1, 1)
        self.middle = conv_norm(width, width, 3, stride)
        self.expand = conv_norm(width, 4 * width, 1, 1, zero=True)
        same = stride == 1 and inputs == 4 * width
        shortcut = nn.Identity() if same else conv_norm(inputs, 4 * width, 1, stride)
        self.shortcut = shortcut

    def forward(self, x):
        y = self.expand(F.relu(self.middle(F.relu(self.reduce(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, size: ResNet50):
        super().__init__()
        self.stem = conv_norm(3, size.width, 7, 2)
        layers, inputs = [], size.width
        for stage, depth in enumerate(size.stages):
            width = size.width * 2**stage
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(Bottleneck(inputs, width, stride))
                inputs = 4 * width
        self.blocks = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, size.classes)

    def forward(self, images):
        x = F.max_pool2d(F.relu(self.stem(images)), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


MODELS = {GPT2: GPT, ResNet50: ResNet, ViT: VisionTransformer}


def make(size, device):
    """The model; images and convolutions are channels-last."""
    model = MODELS[type(size)](size).to(device)
    images = not isinstance(size, GPT2)
    return model.to(memory_format=torch.channels_last) if images else model


def make_batch(size, device):
    if isinstance(size, GPT2):
        shape = (size.batch, size.sequence + 1)
        tokens = torch.randint(0, size.vocabulary, shape, device=device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    images = torch.randn(size.batch, 3, size.pixels, size.pixels, device=device)
    labels = torch.randint(0, size.classes, (size.batch,), device=device)
    return images.contiguous(memory_format=torch.channels_last), labels

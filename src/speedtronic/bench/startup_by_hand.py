"""What `startup.py` holds `speedtronic train` against: the same four steps written by hand, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, LAYERS, HEADS, WIDTH = 64, 32, 2, 4, 32
STEPS, MICRO_BATCHES, MICRO_BATCH = 4, 2, 2
HIDDEN = 88  # 2/3 of 4 · WIDTH, rounded up to a multiple of HEADS


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp_norm = nn.RMSNorm(WIDTH)
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.qkv(self.attn_norm(x)).view(batch, length, 3 * HEADS, WIDTH // HEADS)
        query, key, value = heads.transpose(1, 2).chunk(3, 1)
        query, key = rotated(query, cos, sin), rotated(key, cos, sin)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        out: Tensor = x + self.down(F.silu(gate) * up)
        return out


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
        angles = torch.outer(torch.arange(LENGTH), 10000.0 ** -(torch.arange(0, WIDTH // HEADS, 2) / (WIDTH // HEADS)))
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1))
        self.register_buffer("sin", torch.cat((angles.sin(), angles.sin()), -1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    torch.manual_seed(1234)
    tokens = torch.randint(VOCABULARY, (4096,))
    model = Model()
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95))
    place = 0
    for step in range(1, STEPS + 1):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            batch = tokens[place : place + MICRO_BATCH * (LENGTH + 1)].view(MICRO_BATCH, LENGTH + 1)
            place += MICRO_BATCH * LENGTH
            loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
            torch.autograd.backward(loss / MICRO_BATCHES)
            total += loss.item() / MICRO_BATCHES
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        print(f"step {step} | loss {total:.4f}")


if __name__ == "__main__":
    main()

"""Your own model: a gated recurrent network over bytes.

The decorator gives it the name that `custom_model.yaml` uses. The factory, here the class itself, is called with the
`model` section, and with the keys of `model.extra` as keyword arguments.
"""

import torch
from torch import nn

from speedtronic import ModelConfig, register_model


@register_model("gru")
class GruLanguageModel(nn.Module):
    def __init__(self, config: ModelConfig, *, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.gru = nn.GRU(config.d_model, config.d_model, num_layers=layers, batch_first=True)
        self.head = nn.Linear(config.d_model, config.vocab_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        # (B, T) token ids to (B, T, V) logits. Without a "loss", the trainer compares them with the labels.
        hidden, _ = self.gru(self.embedding(input_ids))
        return {"logits": self.head(hidden)}

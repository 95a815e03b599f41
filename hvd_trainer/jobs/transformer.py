"""A Transformer that classifies texts: a sequence of blocks, any of which may begin a pipeline stage.

    ids (N, T) -> embedding -> (hidden, padding) -> layer0 -> ... -> (hidden, padding) -> head -> logits (N, 2)

Between blocks the value is a pair: `hidden`, float32 (N, T, d_model), in whatever precision a block computes, and
`padding`, float32 (N, T), 1 where there is no token: pipeline stages exchange floating-point tensors only. Blocks
share no weights.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from hvd_trainer.jobs.options import TextSizes

PADDING = 0
"""The id that stands for no token."""
CLASSES = 2
INIT_STD = 0.02
"""Standard deviation of the embeddings and positions at the start, as in BERT and GPT-2."""

Hidden = tuple[Tensor, Tensor]


def transformer(sizes: TextSizes) -> nn.Sequential:
    """Build a Transformer encoder with a mean over all tokens and two classes: `embedding`, `layer0`, ..., `head`.

    It maps ids (N, T), with 0 for padding and T up to `sizes.sequence_length`, to logits (N, 2). Padding does not
    change the logits of a text, and a text without tokens gets the bias as logits.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict(embedding=TextEmbedding(sizes))
    for number in range(sizes.layers):
        blocks[f"layer{number}"] = EncoderLayer(sizes)
    blocks["head"] = PooledHead(sizes)
    return nn.Sequential(blocks)


class TextEmbedding(nn.Module):
    """Map ids (N, T) to (hidden, padding) by the sum of a token's and a position's learnt vectors."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.d_model, padding_idx=PADDING)
        # A parameter and not a computed buffer: buffers of floats are averaged over the ranks.
        self.position = nn.Parameter(torch.empty(sizes.sequence_length, sizes.d_model))
        self.dropout = nn.Dropout(sizes.dropout)
        nn.init.normal_(self.token.weight, std=INIT_STD)
        nn.init.normal_(self.position, std=INIT_STD)
        with torch.no_grad():
            self.token.weight[PADDING] = 0

    def forward(self, ids: Tensor) -> Hidden:
        hidden = self.token(ids) + self.position[: ids.shape[1]]
        return self.dropout(hidden), (ids == PADDING).float()


class EncoderLayer(nn.Module):
    """Apply attention among the tokens of a text, then two linear layers to each; both normalise their input.

    `nn.TransformerEncoderLayer` computes differently in evaluation and in training, and its mask makes a text that
    is all padding NaN.
    """

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        width = sizes.d_model
        self.heads = sizes.heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.hidden_norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, sizes.d_hid)
        self.narrow = nn.Linear(sizes.d_hid, width)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, value: Hidden) -> Hidden:
        hidden, padding = value
        hidden = hidden + self.dropout(self._attend(self.attention_norm(hidden), padding))
        inner = nn.functional.gelu(self.widen(self.hidden_norm(hidden)))
        return hidden + self.dropout(self.narrow(inner)), padding

    def _attend(self, hidden: Tensor, padding: Tensor) -> Tensor:
        """Return per token the mean of all tokens' values, weighted by how well its query matches their keys."""
        parts = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, values = parts.unbind(0)
        # A text that is all padding attends to its padding: a mean over nothing would be NaN.
        visible = (padding == 0) | padding.all(dim=1, keepdim=True)
        # Without dropout of the attention weights, CPUs and GPUs have kernels that never store them.
        mixed = nn.functional.scaled_dot_product_attention(query, key, values, attn_mask=visible[:, None, None, :])
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class PooledHead(nn.Module):
    """Map (hidden, padding) to logits (N, 2) by the mean over the tokens that are not padding."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.d_model)
        self.dropout = nn.Dropout(sizes.dropout)
        self.classes = nn.Linear(sizes.d_model, CLASSES)

    def forward(self, value: Hidden) -> Tensor:
        hidden, padding = value
        masked = self.norm(hidden).masked_fill(padding.unsqueeze(-1) != 0, 0)
        count = (padding == 0).sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.classes(self.dropout(masked.sum(dim=1) / count))
        return logits

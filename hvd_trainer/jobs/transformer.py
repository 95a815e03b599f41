"""A Transformer that classifies texts, as a sequence of blocks of which any may begin a pipeline stage.

    ids (N, T) -> embedding -> (hidden, padding) -> layer0 -> ... -> (hidden, padding) -> head -> logits (N, 2)

Between blocks the value is a pair: `hidden`, float32 (N, T, d_model), in whatever precision a block computes, and
`padding`, float32 (N, T), 1 where there is no token: what goes between pipeline stages is of floating point. No
block shares weights with another.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from hvd_trainer.jobs.options import TextSizes

PADDING = 0
"""The id of no token."""
CLASSES = 2
INIT_STD = 0.02
"""Of the embeddings and of positions, as in BERT and GPT-2."""

Hidden = tuple[Tensor, Tensor]


def transformer(sizes: TextSizes) -> nn.Sequential:
    """A Transformer encoder with a mean over all tokens and two classes: `embedding`, `layer0`, ..., `head`.

    Takes ids (N, T) with 0 for padding and T up to `sizes.sequence_length`; gives logits (N, 2). What padding a
    text has does not change its logits, and a text without tokens gets the logits of the bias.
    """
    blocks: OrderedDict[str, nn.Module] = OrderedDict(embedding=TextEmbedding(sizes))
    for number in range(sizes.layers):
        blocks[f"layer{number}"] = EncoderLayer(sizes)
    blocks["head"] = PooledHead(sizes)
    return nn.Sequential(blocks)


class TextEmbedding(nn.Module):
    """Ids (N, T) to (hidden, padding): what the token is plus where it stands, both learnt."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.token = nn.Embedding(sizes.vocabulary, sizes.d_model, padding_idx=PADDING)
        # Learnt and not computed: a buffer of floats would be averaged over the ranks again and again.
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
    """Attention among the tokens of a text, then two linear layers on each token; both normalise their input.

    `nn.TransformerEncoderLayer` computes another way in evaluation than in training, and its mask makes a text
    that is all padding NaN.
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
        """Each token's mean of the values of all tokens, weighted by how its query suits their keys."""
        parts = self.query_key_value(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, values = parts.unbind(0)
        # A text that is all padding attends to its padding: the mean of nothing would be NaN.
        visible = (padding == 0) | padding.all(dim=1, keepdim=True)
        # Without dropout of its weights: only so do CPUs and GPUs have kernels that never write them down.
        mixed = nn.functional.scaled_dot_product_attention(query, key, values, attn_mask=visible[:, None, None, :])
        out: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return out


class PooledHead(nn.Module):
    """(hidden, padding) to logits (N, 2), from the mean over the tokens that are there."""

    def __init__(self, sizes: TextSizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.d_model)
        self.dropout = nn.Dropout(sizes.dropout)
        self.classes = nn.Linear(sizes.d_model, CLASSES)

    def forward(self, value: Hidden) -> Tensor:
        hidden, padding = value
        there = self.norm(hidden).masked_fill(padding.unsqueeze(-1) != 0, 0)
        count = (padding == 0).sum(dim=1, keepdim=True).clamp(min=1)
        logits: Tensor = self.classes(self.dropout(there.sum(dim=1) / count))
        return logits

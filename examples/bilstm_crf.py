"""BiLSTM + CRF: tag sentences of an artificial language. `python examples/bilstm_crf.py [--quick]`."""

import sys

import torch
from torch import nn

from riskfield.nn import LinearChainCRF  # pytorch-crf's `CRF` returns minus this loss

TAGS, WORDS, LENGTH = 6, 40, 20


def sentences(number: int, rules: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draw words, tags and masks: tags follow each other by rules, and most words may have several tags."""
    follow, emit = (2 * rules[:, :TAGS]).softmax(1), (2 * rules[:, TAGS:]).softmax(1)
    tags = torch.randint(0, TAGS, (number, LENGTH))
    for t in range(1, LENGTH):
        tags[:, t] = follow[tags[:, t - 1]].multinomial(1)[:, 0]
    words = emit[tags.flatten()].multinomial(1).reshape(tags.shape)
    return words, tags, torch.arange(LENGTH) < torch.randint(5, LENGTH + 1, (number, 1))


def main(quick: bool) -> float:
    """Train, and return the share of right tags in new sentences."""
    torch.manual_seed(0)
    rules, embed, head = torch.randn(TAGS, TAGS + WORDS), nn.Embedding(WORDS, 32), nn.Linear(64, TAGS)
    lstm, crf = nn.LSTM(32, 32, batch_first=True, bidirectional=True), LinearChainCRF(TAGS, batch_first=True)
    optimiser = torch.optim.Adam(nn.ModuleList([embed, lstm, head, crf]).parameters(), lr=0.02)
    for _ in range(20 if quick else 200):
        words, tags, mask = sentences(50, rules)
        optimiser.zero_grad()
        crf(head(lstm(embed(words))[0]), tags, mask, reduction="token_mean").backward()
        optimiser.step()
    words, tags, mask = sentences(200, rules)
    paths = [torch.tensor(path) for path in crf.decode(head(lstm(embed(words))[0]), mask)]
    return float((torch.cat(paths) == tags[mask]).double().mean())


if __name__ == "__main__":
    print(f"right tags: {main('--quick' in sys.argv):.1%}")

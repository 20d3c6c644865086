"""Train a digit classifier, in one process or sharded over the ranks of torchrun.

    python train_digits.py result.json                                  torch.nn layers
    torchrun --nproc-per-node 2 train_digits.py result.json             sharded layers

Run it in a folder with a generated `parallel_embedding.py`. The data are the 1797
handwritten digits that scikit-learn ships: 8 x 8 pixels of 17 grey levels. Each grey level
is embedded, so that the first layer is a table (vocabulary divided) and the last a
classifier head (classes divided). Both programs are this file; only two lines differ.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torchshard as ts
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

GREY_LEVELS, PIXELS, CLASSES = 17, 64, 10
EPOCHS, BATCH_SIZE, SEED = 6, 64, 7


class Classifier(nn.Module):
    def __init__(self, is_sharded: bool) -> None:
        super().__init__()
        if is_sharded:
            from parallel_embedding import ParallelEmbedding

            self.embedding = ParallelEmbedding(GREY_LEVELS, 8, dim=0)
            head: nn.Module = ts.nn.ParallelLinear(128, CLASSES, dim=1)
        else:
            self.embedding = nn.Embedding(GREY_LEVELS, 8)
            head = nn.Linear(128, CLASSES)
        # The seed gives both programs the same numbers, drawn in the order of these lines.
        self.hidden = nn.Linear(PIXELS * 8, 128)
        self.head = head

    def forward(self, pixels: Tensor) -> Tensor:
        features = self.embedding(pixels).flatten(1)
        return self.head(self.hidden(features).relu())


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pixels and labels, test pixels and labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part).long() for part in parts)
    return train_x, train_y, test_x, test_y


def train(model: nn.Module) -> dict[str, object]:
    train_x, train_y, test_x, test_y = digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    shuffle = torch.Generator().manual_seed(SEED)
    losses = []
    for _ in range(EPOCHS):
        total = 0.0
        for batch in torch.randperm(len(train_x), generator=shuffle).split(BATCH_SIZE):
            loss = criterion(model(train_x[batch]), train_y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(train_x))
    with torch.no_grad():
        correct = (model(test_x).argmax(1) == test_y).sum().item()
    return {"losses": losses, "accuracy": correct / len(test_x)}


def main() -> None:
    torch.set_num_threads(1)
    is_sharded = "RANK" in os.environ
    if is_sharded:
        ts.init_process_group()
    torch.manual_seed(SEED)
    model = Classifier(is_sharded)
    result = train(model)
    result["head_bytes"] = sum(
        p.numel() * p.element_size() for p in model.head.parameters()
    )
    if ts.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(result), "utf-8")
    ts.destroy_process_group()


if __name__ == "__main__":
    main()

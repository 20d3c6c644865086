"""Train an ArcFace head beside a plain softmax head, in one process and on two ranks.

    python examples/face_head.py

The data are the 1797 handwritten digits that scikit-learn ships, a stand-in for faces: what
is asked of the features is the same, that samples of one class lie closer to their class'
centre than to any other. The figure for it is the margin of a test sample: the cosine with its
own centre less the highest with another. Prints accuracy and margin of both heads, and how far
one process and two ranks are apart.
"""

import torch
import torchshard as ts
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torchshard.nn.functional import parallel_accuracy
from torchshard.testing import run_ranks

FEATURES, CLASSES, SEED = 16, 10, 7


class Softmax(ts.ParallelLayer):
    """A plain classifier without a bias, and its loss; without a target, cosines."""

    def __init__(self) -> None:
        super().__init__()
        self.margin = ts.nn.functional.Margin(scale=1.0)
        self.declare(
            axes={"class": ts.Axis(CLASSES)},
            parameters={
                "weight": ts.ParameterSpec(
                    (CLASSES, FEATURES),
                    ts.Shard(0, "class"),
                    ts.kaiming_uniform(FEATURES),
                )
            },
            inputs={"input": ts.Whole(-1, FEATURES), "target": ts.Whole()},
            output=ts.Whole(),
        )

    def local_forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        ranges = ts.ranges_of("class", self.axes, self.group.size)
        if target is None:
            return ts.loss.cosines_of_shard(input, self.weight, ranges, self.group)
        logits = input @ self.weight.t()
        logits = ts.ShardedTensor.from_local(
            logits, -1, ranges=ranges, group=self.group
        )
        return nn.functional.cross_entropy(logits, target)


def heads() -> dict[str, nn.Module]:
    arc = ts.nn.ParallelArcFace(FEATURES, CLASSES, scale=16.0, margin=0.5)
    return {"softmax": Softmax(), "ArcFace": arc}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training pixels and labels, test pixels and labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.25, random_state=0)
    train_x, test_x, train_y, test_y = (torch.from_numpy(part) for part in parts)
    return train_x.float(), train_y, test_x.float(), test_y


def trained(head: nn.Module, epochs: int) -> dict[str, float | list[float]]:
    """Train a small network under the head; return its losses, accuracy and margin."""
    train_x, train_y, test_x, test_y = digits()
    torch.manual_seed(SEED)
    backbone = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, FEATURES))
    parameters = [*backbone.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    shuffle = torch.Generator().manual_seed(SEED)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(train_x), generator=shuffle).split(64):
            loss = head(backbone(train_x[batch]), train_y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        losses.append(total / len(train_x))
    with torch.no_grad():
        cosines = head(backbone(test_x))
        (accuracy,) = parallel_accuracy(cosines, test_y)
        return {
            "losses": losses,
            "accuracy": accuracy.item(),
            "margin": margin_of(cosines, test_y).item() / head.margin.scale,
        }


def margin_of(cosines: Tensor, target: Tensor) -> Tensor:
    """Return the mean of the cosine with the own centre less the highest with another."""
    whole, columns = ts.distributed.gather(cosines, dim=-1), target.unsqueeze(1)
    own = whole.gather(1, columns).squeeze(1)
    return (own - whole.scatter(1, columns, float("-inf")).amax(1)).mean()


def results(epochs: int) -> dict[str, dict[str, float | list[float]]]:
    torch.manual_seed(SEED)
    return {name: trained(head, epochs) for name, head in heads().items()}


def main() -> None:
    one, two = run_ranks(results, 1, 12)[0], run_ranks(results, 2, 12)[0]
    print("| head | ranks | test accuracy | mean margin | last loss |")
    print("|---|---|---|---|---|")
    for name in one:
        for ranks, run in ((1, one[name]), (2, two[name])):
            last = run["losses"][-1]
            figures = f"{run['accuracy']:.3f} | {run['margin']:.3f} | {last:.5f}"
            print(f"| {name} | {ranks} | {figures} |")
    apart = max(
        abs(a - b)
        for name in one
        for a, b in zip(one[name]["losses"], two[name]["losses"], strict=True)
    )
    print(f"largest difference of a loss between one rank and two: {apart:.1e}")


if __name__ == "__main__":
    main()

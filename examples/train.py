"""A PyTorch training script on hpcsgd: a few lines differ from the script for one process.

python examples/train.py                  one rank, one group
mpiexec -n 4 python examples/train.py     2 groups of 2
srun -n 64 python examples/train.py       2 groups of 32
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    train, test = TensorDataset(x[:1400], y[:1400]), (x[1400:], y[1400:])

    topology = hpcsgd.init(groups=2)
    sampler = hpcsgd.Sampler(train, topology)
    loader = DataLoader(train, batch_size=16, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    optimizer = hpcsgd.DistributedOptimizer(
        optimizer, model, topology, method=hpcsgd.hierarchical(sync_every=8)
    )

    for epoch in range(10):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()

    with optimizer.averaged_model():
        accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
    if topology.rank == 0:
        print(f"{topology.num_groups} groups of {topology.group_size}: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
    main()

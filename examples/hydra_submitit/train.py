"""Train with settings of Hydra, on ranks that submitit starts: python train.py --multirun lr=0.1,0.05."""

import hydra
import torch
from sklearn.datasets import load_digits
from submitit.helpers import TorchDistributedEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd


@hydra.main(version_base=None, config_path=".", config_name="config")
def main(config):
    TorchDistributedEnvironment().export()  # MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE
    topology = hpcsgd.init(groups=config.groups, backend="gloo")
    torch.manual_seed(0)
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    data = TensorDataset(x.float() / 16, y)
    loader = DataLoader(data, batch_size=16, sampler=hpcsgd.Sampler(data, topology))
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    method = hpcsgd.hierarchical(sync_every=config.sync_every)
    optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, method)
    state = hpcsgd.load("checkpoints", optimizer, epoch=0)
    for epoch in range(state["epoch"], config.epochs):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        hpcsgd.save("checkpoints", optimizer, epoch=epoch + 1)
    mean = hpcsgd.allreduce(loss.item(), topology)
    if topology.rank == 0:
        print(f"lr {config.lr}: loss {mean:.3f} on {topology.num_groups} × {topology.group_size} ranks")
    return mean


main()

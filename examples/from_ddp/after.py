"""Train on digits: bf16, clipping, a cosine schedule, evaluation and checkpoints."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd

EPOCHS = 4
topology = hpcsgd.init(groups=2)
rank, device = topology.rank, topology.device

x, y = (torch.tensor(a, device=device) for a in load_digits(return_X_y=True))
x = x.float() / 16
train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
sampler = hpcsgd.Sampler(train, topology)
loader = DataLoader(train, batch_size=16, sampler=sampler)
parts = hpcsgd.Sampler(test, topology, shuffle=False, drop_last=False)
tests = DataLoader(test, batch_size=64, sampler=parts)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
optimizer = hpcsgd.DistributedOptimizer(optimizer, model, topology, hpcsgd.hierarchical(sync_every=8))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

state = hpcsgd.load("checkpoints", optimizer, scheduler=scheduler, epoch=0)
first = state["epoch"]

for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()

    model.eval()
    right = torch.zeros(2, device=device)
    with torch.no_grad(), optimizer.averaged_model():
        for images, labels in tests:
            hits = model(images).argmax(1) == labels
            right += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
    right = hpcsgd.allreduce(right, topology, op="sum")
    model.train()
    if rank == 0:
        print(f"epoch {epoch + 1}: accuracy {(right[0] / right[1]).item():.3f}")
    hpcsgd.save("checkpoints", optimizer, scheduler=scheduler, epoch=epoch + 1)

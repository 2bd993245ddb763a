"""Train on digits: bf16, clipping, a cosine schedule, evaluation and checkpoints."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 4
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")

x, y = (torch.tensor(a, device=device) for a in load_digits(return_X_y=True))
x = x.float() / 16
train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=16, sampler=sampler)
parts = DistributedSampler(test, shuffle=False)
tests = DataLoader(test, batch_size=64, sampler=parts)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS)

first = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt", map_location=device)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    first = state["epoch"]

for epoch in range(first, EPOCHS):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    scheduler.step()

    model.eval()
    right = torch.zeros(2, device=device)
    with torch.no_grad():
        for images, labels in tests:
            hits = model(images).argmax(1) == labels
            right += torch.stack([hits.sum(), torch.tensor(len(hits), device=device)])
    dist.all_reduce(right)
    model.train()
    if rank == 0:
        print(f"epoch {epoch + 1}: accuracy {(right[0] / right[1]).item():.3f}")
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "scheduler": scheduler.state_dict(), "epoch": epoch + 1}, "checkpoint.pt")

dist.destroy_process_group()

"""Train on digits with a loop for Hugging Face's Accelerate: mpiexec -n 4 python accelerate_loop.py."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd
import hpcsgd.accelerate

accelerator = hpcsgd.accelerate.Accelerator(groups=2, method=hpcsgd.hierarchical(sync_every=8))
x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
x = x.float() / 16
train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader, tests = DataLoader(train, batch_size=16, shuffle=True), DataLoader(test, batch_size=64)
model, optimizer, loader, tests = accelerator.prepare(model, optimizer, loader, tests)

for _ in range(4):
    for images, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(nn.functional.cross_entropy(model(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state("checkpoint")

hits = []
with accelerator.averaged_model(), torch.no_grad():
    for images, labels in tests:
        hits.append(accelerator.gather_for_metrics(model(images).argmax(1) == labels))
accelerator.print(f"accuracy {torch.cat(hits).float().mean().item():.3f}")

"""A LightningModule on hpcsgd: the Trainer gets another strategy, and the module stays as it is.

mpiexec -n 4 python examples/lightning_digits.py
torchrun --nproc-per-node 4 examples/lightning_digits.py
"""

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpcsgd
import lightning
from hpcsgd.lightning import HpcsgdStrategy, LogMetrics

EPOCHS = 5


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        hits = (self.net(images).argmax(1) == labels).float()
        self.log("accuracy", hits.mean(), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)]


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    train, test = TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])

    strategy = HpcsgdStrategy(lambda: hpcsgd.hierarchical(sync_every=8), groups=2)
    trainer = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=4,
        max_epochs=EPOCHS,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True), LogMetrics()],
        logger=CSVLogger("runs"),
        enable_progress_bar=False,
    )
    module = Digits()
    tests = DataLoader(test, batch_size=64)
    trainer.fit(module, DataLoader(train, batch_size=16, shuffle=True), tests, ckpt_path="last")
    result = trainer.test(module, tests, verbose=False)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps: accuracy of the averaged model {result[0]['accuracy']:.3f}")


if __name__ == "__main__":
    main()

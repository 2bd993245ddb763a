"""Train a small GPT-2 with Hugging Face's Trainer: mpiexec -n 4 python trainer.py."""

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import hpcsgd
import hpcsgd.transformers


class Counting(Dataset):
    """Sequences that count up from a random token."""

    def __init__(self, size, seed):
        first = torch.randint(0, 32, (size, 1), generator=torch.Generator().manual_seed(seed))
        self.tokens = (first + torch.arange(16)) % 32

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i):
        return {"input_ids": self.tokens[i], "labels": self.tokens[i]}


topology = hpcsgd.transformers.init(groups=2)  # before TrainingArguments
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=32, n_positions=16, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
args = TrainingArguments(
    "out",
    num_train_epochs=4,
    per_device_train_batch_size=16,
    learning_rate=3e-3,
    eval_strategy="epoch",
    save_strategy="epoch",
    disable_tqdm=True,
    report_to=[],
    dataloader_pin_memory=topology.device.type == "cuda",
)
trainer = hpcsgd.transformers.Trainer(
    model,
    args,
    train_dataset=Counting(1024, seed=0),
    eval_dataset=Counting(256, seed=1),
    topology=topology,
    method=hpcsgd.hierarchical(sync_every=8),
)
trainer.train()
loss = trainer.evaluate()["eval_loss"]  # of the average of both groups' models
if topology.rank == 0:
    print(f"evaluation loss {loss:.3f}")
